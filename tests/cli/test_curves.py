"""`report --curves` writes what the store knows of each training, step by step."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import UsageError
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.view.curves import write_curves
from tests.cli.conftest import Command
from tests.factories import FACTS, STARTED_UNIX_S, make_row, make_snapshot
from workers.messages import Progress

RUN = "20261120-051500-0b76"


def make_run(folder: Path, losses: list[float | None]) -> Path:
    """Make a run of two slots, sampled each second; one of them trains, if there are losses."""
    store = RunStore(folder / RUN / STORE_NAME)
    store._path.parent.mkdir(parents=True)
    store.begin(FACTS)
    store.commit()
    for second, loss in enumerate(losses, start=1):
        progress = Progress(train_step=second // 2, loss=loss)
        rows = make_row(slot="pc1/0", progress=progress), make_row(slot="pc1/1")
        store.update(make_snapshot(*rows, elapsed_s=float(second)))
        store.commit()
    evaluated: dict[str, Any] = {
        "step": 2,
        "validation_loss": 2.5,
        "kind": "text",
        "worker_at_unix_s": 1.0,
    }
    told = {"at": "2026-11-20T05:16:00+00:00", "event": "evaluated", "slot": "pc1/0"}
    if losses:
        store.event({**told, **evaluated})
        store.commit()
    return folder / RUN


def test_a_csv_has_each_step_once_with_its_validation(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [None, 4.0, 3.9, 3.0, 3.0])
    *_, last = write_curves(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pc1-0"]
    with (tmp_path / "out" / "pc1-0" / "curves.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["step"], line["loss"], line["validation_loss"]) for line in lines] == [
        ("1", "4.0", ""),
        ("2", "3.0", "2.5"),
    ]
    assert float(lines[0]["at_unix_s"]) == STARTED_UNIX_S + 2
    assert set(lines[0]) == {"step", "at_unix_s", "loss", "validation_loss"}
    events = list(tmp_path.rglob("events.out.tfevents.*"))
    if importlib.util.find_spec("tensorboard") is None:
        assert events == []
        assert last == "for event files of TensorBoard type: pip install tensorboard"
    else:
        assert len(events) == 1


def test_a_run_without_training_has_no_curves(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"run {RUN} has no optimiser step"):
        list(write_curves(make_run(tmp_path, []), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_verb_prints_each_file(nowhere: Path, command: Command) -> None:
    make_run(nowhere / "runs", [1.0, 0.5])
    done = command("report", "latest", "--curves", "out")
    assert done.returncode == 0
    assert done.stdout.startswith("out/pc1-0/curves.csv\n")
    both = command("report", "latest", "--curves", "out", "--json")
    assert both.returncode == 2
