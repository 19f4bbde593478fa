"""Recipes fit their cards, as `plan` says."""

from __future__ import annotations

import sys

import pytest
from render_recipes import FOLDER, main


@pytest.mark.torch
def test_each_recipe_fits_and_says_so_with_its_sum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that does not fit is refused, and so is a file or page that tells another sum."""
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {
        "gpt2-medium-3060", "gpt2-medium-3070", "gpt-1b-3090", "cnn-landmarks-3090", "reference-pair",
        "hf-gpt2-medium-3070", "hf-gpt2-medium-3060", "hf-llama-1b-dora-3090",
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["render_recipes.py", "--check"])
    status = main()
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err) == (0, "", "")
