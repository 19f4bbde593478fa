"""From what a worker tells of its training to rows, records, summary and the next head.

In virtual time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.record.summary import summary_dict
from orchestrator.run.resume import past_of
from tests.run.conftest import RunMaker
from tests.run.test_finished import head_is_killed
from workers.messages import NO_PROGRESS, Progress


def test_progress_is_shown_of_slots_that_train_only(new_run: RunMaker) -> None:
    scene = new_run()
    scene.fleet.trains = {"pc1/0"}
    rows = scene.finish()
    step = rows["pc1/0"].progress.train_step
    assert step is not None
    assert step == rows["pc1/0"].counts.steps_ok > 300
    expected = Progress(
        train_step=step, saved_step=step // 50 * 50, loss=10.0 / (1 + step), redone_steps=0
    )
    assert rows["pc1/0"].progress == expected
    assert rows["pc2/0"].progress == NO_PROGRESS
    stored = {row.slot: row for row in scene.stored().snapshot().rows}
    assert stored["pc1/0"].progress == expected
    summary = json.loads(json.dumps(summary_dict(scene.recorder.shown[-1], "good", 0, "")))
    told = {row["slot"]: row for row in summary["workers"]}
    assert told["pc1/0"]["train_step"] == step
    assert told["pc1/0"]["mfu_pct"] is None
    assert told["pc2/0"]["train_step"] is None
    assert told["pc1/0"]["loss"] == expected.loss


def test_unsaved_steps_of_dead_processes_count_as_redone(new_run: RunMaker) -> None:
    scene = new_run(duration="40s", max_deaths=9)
    scene.fleet.trains = {"pc1/0", "pc2/0"}
    for at_s in (7.3, 12.9, 21.4):
        scene.fleet.at(at_s, lambda: scene.fleet.kill("pc1/0"))
    scene.fleet.at(25.2, lambda: scene.fleet.leave("pc1"))
    scene.fleet.at(27.0, lambda: scene.fleet.join("pc1"))
    rows = scene.finish()
    assert rows["pc1/0"].progress.redone_steps == scene.fleet.redone["pc1/0"] > 0
    assert rows["pc2/0"].progress.redone_steps == 0
    away = [row for row in scene.shown("pc1/0") if row.state == "LOST"]
    assert away
    assert {row.progress.train_step is not None for row in away} == {True}


def test_without_a_process_there_is_no_speed(new_run: RunMaker) -> None:
    scene = new_run(pc2=0)
    told = Progress(
        train_step=5,
        samples_per_s=3.0,
        tokens_per_s=3.0,
        eta_s=9.0,
        mfu_pct=1.0,
        data_wait_pct=1.0,
        copies_pct=1.0,
        optimizer_pct=1.0,
        loss=2.0,
    )
    scene.fleet.says["pc1/0"] = {"progress": told}
    scene.fleet.at(9.0, lambda: scene.fleet.leave("pc1"))
    row = scene.finish()["pc1/0"]
    assert row.progress == Progress(train_step=5, loss=2.0, redone_steps=0)


def test_another_head_counts_what_the_last_was_told(new_run: RunMaker, tmp_path: Path) -> None:
    first = new_run(folder=tmp_path / "run", pc2=0)
    first.fleet.trains = {"pc1/0"}
    first.fleet.says["pc1/0"] = {"resume": {"the same": "all the time"}}
    found: list[tuple[int | None, int]] = []

    def look() -> None:
        """See what a head leaves behind that is killed now and writes nothing more."""
        (row,) = first.stored().snapshot().rows
        found.append((row.progress.train_step, first.fleet.told["pc1/0"]))

    for tenth in range(60, 85):
        first.fleet.at(tenth / 10, look)
    first.fleet.at(8.52, head_is_killed)
    with pytest.raises(KeyboardInterrupt):
        first.supervisor.run()
    first.close()
    assert [stored for stored, _ in found] == [told for _, told in found], (
        "also between two samples"
    )
    second = new_run(folder=tmp_path / "run", pc2=0, past=past_of(first.stored()))
    second.fleet.trains = {"pc1/0"}
    second.fleet.saved["pc1/0"] = first.fleet.saved["pc1/0"]
    row = second.finish()["pc1/0"]
    assert row.progress.redone_steps == first.fleet.told["pc1/0"] - first.fleet.saved["pc1/0"] > 0
