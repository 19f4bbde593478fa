"""tuned.yaml: the user's file with other values of `train:`."""

from __future__ import annotations

import pytest

from orchestrator.config.load import config_from_text, load_config
from orchestrator.lab.tune.tuned_yaml import tuned_yaml
from tests.scene import ROOT
from workers.training.settings import TrainSettings


def test_only_changed_lines_differ_and_each_has_its_note() -> None:
    path = ROOT / "cluster.yaml"
    text, config = path.read_text(encoding="utf-8"), load_config(str(path))
    changes = {"precision": "fp32", "optimizer": "adamw-loop"}
    edited = tuned_yaml(text, config, changes, {"precision": "tune x: 1.2 x\nthe speed"})
    wanted = {**config.train.model_dump(), **changes}
    assert config_from_text(edited, "tuned.yaml") == config.model_copy(
        update={"train": TrainSettings.model_validate(wanted)}
    )
    differing = [line for line in edited.splitlines() if line not in text.splitlines()]
    assert differing == ["  precision: fp32  # tune x: 1.2 x the speed", "  optimizer: adamw-loop"]


@pytest.mark.parametrize(
    "section", ["", "train: {preset: gpt-mini, batch: 8}\n", "train:\n    preset: gpt-mini\n"]
)
def test_it_can_be_made_of_any_file(section: str) -> None:
    node = "{gpu: rtx-3090, workers: 1, vram_per_worker_gib: 3}"
    text = f"nodes:\n  pc1: {node}\n{section}run: {{duration: 3}}\n"
    config = config_from_text(text, "x.yaml")
    edited = tuned_yaml(text, config, {"precision": "fp32"}, {})
    wanted = TrainSettings.model_validate({**config.train.model_dump(), "precision": "fp32"})
    assert config_from_text(edited, "tuned.yaml") == config.model_copy(update={"train": wanted})
