"""Recipes fit their cards according to `plan`."""

from __future__ import annotations

import re

import pytest
from render_recipes import FOLDER, plans_of, with_sums

RECIPES = {path.stem: path for path in FOLDER.glob("*.yaml")}

#: One recipe for each kind of model, because planning a large one takes 30 s.
#: `scripts/render_recipes.py` plans all.
PLANNED = ("cnn-landmarks-3090", "gpt2-medium-3060", "hf-llama-1b-dora-3090")


def test_each_recipe_fits_and_says_so_with_its_sum() -> None:
    assert set(RECIPES) == {
        "gpt2-medium-3060", "gpt2-medium-3070", "gpt-1b-3090", "cnn-landmarks-3090", "reference-pair",
        "hf-gpt2-medium-3070", "hf-gpt2-medium-3060", "hf-llama-1b-dora-3090",
    }  # fmt: skip
    for path in RECIPES.values():
        told = re.findall(
            r"^#   (\w+ [\d.]+(?: \+ \w+ [\d.]+)*)\n#   = ([\d.]+) of ([\d.]+) GiB$",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        assert told, path
        for parts, total, cap in told:
            found = sum(float(part.split()[1]) for part in parts.split(" + "))
            assert found == pytest.approx(float(total), abs=0.03), path
            assert float(total) <= float(cap), path


@pytest.mark.torch
def test_plan_gives_the_sums_that_recipes_tell() -> None:
    """A recipe that does not fit is refused, and so is a file with another sum."""
    paths = [RECIPES[name] for name in PLANNED]
    for path, training in zip(paths, plans_of(paths), strict=True):
        text = path.read_text(encoding="utf-8")
        assert with_sums(text, training) == text, f"{path}: python scripts/render_recipes.py"
