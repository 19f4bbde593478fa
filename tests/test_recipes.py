"""Recipes fit their cards, as `plan` says."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from render_recipes import FOLDER, main, sums_of, with_sums


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


def test_a_recipe_that_does_not_fit_has_no_sum() -> None:
    step = {
        "micro_batch": 1,
        "accumulation": 2,
        "memory_level": 0,
        "on_host_bytes": 0,
        "checkpoint_copy_bytes": 0,
    }
    step |= {"total_bytes": 2**31, "fits": True}
    step |= dict.fromkeys(
        ("weights_bytes", "gradients_bytes", "optimizer_bytes", "average_bytes"), 2**28
    )
    step |= {"activations_bytes": 2**30, "workspace_bytes": 0}
    cap: dict[str, Any] = {
        "nodes": ["pc1"],
        "verdict": "fits",
        "cap_bytes": 3 * 2**30,
        "steps": [step],
    }
    text = with_sums("# plan:\n# old\n# sums\n\nnodes:\n", {"blocks": 6, "caps": [cap]})
    assert text.startswith(
        "# plan:\n# pc1 with 1 x 2 samples:\n#   weights 0.25 + gradients 0.25 + "
    )
    assert text.endswith("#   = 2.00 of 3.00 GiB\n\nnodes:\n")
    (of_last,) = sums_of(
        {
            "blocks": 6,
            "caps": [cap | {"steps": [step | {"fits": False}, step | {"memory_level": 6}]}],
        }
    )
    assert of_last.startswith("# pc1 with 1 x 2 samples, all blocks recomputed:\n")
    refused = {"verdict": "does_not_fit", "sentence": "does not fit: the smallest step"}
    with pytest.raises(ValueError, match=refused["sentence"]):
        sums_of({"blocks": 6, "caps": [cap | refused]})
    late = "it took longer than 300 s"
    with pytest.raises(ValueError, match=late):
        sums_of({"blocks": 6, "caps": [], "not_planned": late})
