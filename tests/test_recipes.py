"""Recipes fit their cards, as `plan` says, and the page about them is up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from render_recipes import CARDS, FOLDER, comparison, main, measured_in, sums_of, with_sums

#: As `planned_for_cards` tells it, of the model and its parts.
PLANS = {
    f"{key} {level}": {"micro": 3, "parameters_m": 354.8}
    for key in CARDS
    for level in ("none", "all")
}


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


def test_what_was_measured_replaces_what_the_card_is_rated_for(tmp_path: Path) -> None:
    def row(uuid: str, name: str, tokens: float | None) -> dict[str, Any]:
        return {
            "gpu_uuid": uuid,
            "gpu_name": name,
            "device_total_bytes": None,
            "tokens_per_s": tokens,
        }

    rows = [
        row("a", "NVIDIA GeForce RTX 3090", 9_000.0),
        row("a", "NVIDIA GeForce RTX 3090", 1_500.0),
    ]
    rows += [row("b", "NVIDIA H200", 1e6), row("c", "NVIDIA GeForce RTX 4090", None)]
    settings = {"workload": {"name": "train"}, "train": {"preset": "gpt2-medium"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": "night", "workers": rows}))
    measured = measured_in(tmp_path)
    assert measured == [{"card": "rtx-3090", "run": "night", "tokens_per_s": 10_500.0}]
    tokens = next(
        line for line in comparison(PLANS, measured).splitlines() if "tokens a second" in line
    )
    assert "10,500 (measured, run night)" in tokens
    assert tokens.count("(card's data)") == len(CARDS) - 1
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(settings | {"train": {"preset": "gpt-nano"}})
    )
    with pytest.raises(ValueError, match="did not train gpt2-medium"):
        measured_in(tmp_path)
