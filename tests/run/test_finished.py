"""Slots whose work is finished: they rest, the others go on, and the run ends when there is nothing left to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.slot import Phase
from orchestrator.errors import UsageError
from orchestrator.record.model import Row
from orchestrator.run.resume import environment_of, past_of
from tests.run.conftest import RunMaker
from workers.messages import WorkerState


def head_is_killed() -> None:
    raise KeyboardInterrupt


def states(rows: dict[str, Row]) -> dict[str, WorkerState]:
    return {slot: row.state for slot, row in rows.items()}


def test_the_run_ends_well_as_soon_as_all_is_done(new_run: RunMaker) -> None:
    scene = new_run()
    scene.fleet.finished_after = {"pc1/0": 40, "pc2/0": 100}
    rows = scene.finish()
    assert states(rows) == dict.fromkeys(rows, WorkerState.DONE)
    assert {slot: row.counts.steps_ok for slot, row in rows.items()} == scene.fleet.finished_after
    assert scene.supervisor.shortfalls() == ()
    assert scene.recorder.shown[-1].elapsed_s < 10.0
    assert sorted(scene.fleet.abandoned) == ["pc1/0", "pc2/0"], "their memory is free for others"
    assert [row.heartbeat_age_s for row in rows.values()] == [None, None]
    assert scene.stored().is_done
    assert not scene.stored().is_resumable


def test_one_that_is_done_rests_while_the_others_go_on(new_run: RunMaker) -> None:
    scene = new_run()
    scene.fleet.finished_after = {"pc1/0": 10}
    scene.fleet.at(8.0, lambda: scene.fleet.leave("pc1"))
    scene.fleet.at(12.0, lambda: scene.fleet.join("pc1"))
    rows = scene.finish()
    assert states(rows) == {"pc1/0": WorkerState.DONE, "pc2/0": WorkerState.RUNNING}
    assert scene.supervisor.shortfalls() == (), (
        "it worked for less than half of the time, and did all that there was"
    )
    assert (rows["pc1/0"].counts.steps_ok, rows["pc1/0"].restarts) == (10, 0)
    assert scene.recorder.shown[-1].elapsed_s == 20.0
    assert scene.states("pc1/0") == ["RUNNING", "DONE"]
    assert (rows["pc1/0"].tflops, rows["pc1/0"].duty_measured) == (None, None)


def test_a_wrong_result_degrades_what_is_done_too(new_run: RunMaker) -> None:
    scene = new_run(pc2=0)
    scene.fleet.finished_after = {"pc1/0": 10}
    scene.fleet.says["pc1/0"] = {"verify_checks": 2, "verify_errors": 1}
    scene.finish()
    assert any("wrong of" in missed for missed in scene.supervisor.shortfalls())


def test_a_head_that_goes_on_leaves_alone_what_is_done(new_run: RunMaker, tmp_path: Path) -> None:
    first = new_run(folder=tmp_path / "run")
    first.fleet.finished_after = {"pc1/0": 10}
    first.fleet.at(8.0, head_is_killed)
    with pytest.raises(KeyboardInterrupt):
        first.supervisor.run()
    first.close()
    past = past_of(first.stored())
    assert (past.slots["pc1/0"].phase, past.slots["pc2/0"].phase) == (Phase.DONE, Phase.ABSENT)
    second = new_run(folder=tmp_path / "run", past=past)
    second.fleet.finished_after = {"pc2/0": 60}
    rows = second.finish()
    assert second.fleet.placed == ["pc2/0"]
    assert states(rows) == dict.fromkeys(rows, WorkerState.DONE)
    assert rows["pc1/0"].counts.steps_ok == 10
    assert second.supervisor.shortfalls() == ()
    with pytest.raises(UsageError, match="finished all that there was to do"):
        environment_of(second.stored())


def test_a_node_that_was_ended_does_not_wait_for_what_is_done(new_run: RunMaker) -> None:
    scene = new_run(duration="60s", pc1=1, pc2=2, chaos="node:pc2@10s+5s")
    scene.fleet.finished_after = {"pc2/0": 10}
    scene.finish()
    (fault,) = scene.chaos.faults()
    assert fault["fate"] == "recovered", fault
