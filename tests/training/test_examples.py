"""The examples of docs/training.md do what it says."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.trainings import trained
from tests.in_child import InChild
from tests.scene import MIB, ROOT, spec_of
from workers.messages import Verdict
from workers.training import elastic
from workers.training.settings import TrainSettings

EXAMPLES = ROOT / "docs" / "examples"


def test_a_script_becomes_elastic_by_at_most_ten_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("nano_plain", "nano_elastic")
    texts = [(EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in names]
    changed = [line for line in difflib.ndiff(*texts) if line[:1] in "+-" and line[2:].strip()]
    assert max(sum(line.startswith(sign) for line in changed) for sign in "+-") <= 10
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plain, other = (importlib.import_module(name) for name in names)
    losses = plain.main(torch.device("cpu"))
    assert losses[-1] < 0.7 * losses[0]
    assert other.main(torch.device("cpu")) == pytest.approx(losses, rel=1e-6)
    # The same when memory holds five samples in a part, and six later.
    failed = []
    real = elastic.part_of

    def part_of(batch: object, first: int, rows: int) -> object:
        if rows > 5 + (len(failed) > 2):
            failed.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory. (acted)")
        return real(batch, first, rows)

    monkeypatch.setattr(elastic, "part_of", part_of)
    assert other.main(torch.device("cpu")) == pytest.approx(losses, rel=1e-6)
    assert failed


def own_task(folder: str) -> object:
    sys.path.insert(0, str(EXAMPLES))
    usual = spec_of(name="train", policy="adaptive", budget_bytes=160 * MIB)
    keys = TrainSettings(
        preset="own_task:rings", batch=32, steps=60, precision="fp32", warmup_steps=5
    )
    spec = replace(
        usual, workers_on_host=64, workload=replace(usual.workload, settings=keys.model_dump())
    )
    return trained(folder, spec, [{"duration_s": 600.0}])[-1]


def test_the_documented_task_is_trained_to_its_end(in_child: InChild, tmp_path: Path) -> None:
    text = (EXAMPLES / "own_task.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 30
    assert text in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text("utf-8"), re.DOTALL
    )
    report = in_child(own_task, str(tmp_path))
    assert report.verdict is Verdict.DONE
    assert report.progress.loss < 0.9 * report.progress.first_loss
    assert [event for event in report.events if event.name == "hazard"] == []
