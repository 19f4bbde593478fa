"""Validation data is tokenised once, and computed in large batches in the training's precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.export.scene import CPU, labelled
from tests.hf.folders import make_folder
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer


@pytest.mark.parametrize("preset", ["hf-causal", "hf-pairs"])
def test_validation_is_the_same_however_many_at_once(preset: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "base", "gpt2")
    data, own = labelled(tmp_path), tmp_path / "unseen.jsonl"
    own.write_text("".join(data.read_text(encoding="utf-8").splitlines(keepends=True)[:11]))
    settings = TrainSettings.model_validate(
        {"preset": preset, "model": str(folder), "data": str(data), "validation": str(own)}
        | {"batch": 4, "seq": 32, "documents": "lines" if preset == "hf-causal" else "windows"}
    )
    task = find_task(settings, 0)
    model = task.model().eval()
    with torch.no_grad():
        alone = task.evaluate(model)
        own.unlink()
        assert task.evaluate(model, rows=4) == pytest.approx(alone, rel=1e-6), "and read once"
    sizes: list[int] = []
    seen = replace(task.evaluate, count=lambda part: sizes.append(len(part)) or 1)
    if preset == "hf-causal":
        with torch.no_grad():
            seen(model, rows=4)
        assert sizes[:-1] == [4] * (len(sizes) - 1)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_evaluation_computes_as_the_training_does(precision: str, dtype: torch.dtype) -> None:
    settings = TrainSettings.model_validate({"preset": "gpt-nano", "precision": precision})
    computed: list[torch.dtype] = []

    def evaluate(model: Any) -> dict[str, float]:
        computed.append(model(torch.zeros(1, 8, dtype=torch.int64)).dtype)
        return {}

    Trainer(replace(find_task(settings, 0), evaluate=evaluate), settings, CPU, 0).evaluate()
    assert computed == [dtype]
