"""Processes that die, hang, lose their device or never start, failing cards, injected faults."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestrator.core.slot import HeadState
from orchestrator.errors import OrchestratorError
from orchestrator.record.archive import read_run
from orchestrator.run.resume import past_of
from tests.run.conftest import RunMaker
from tests.run.scripted_fleet import START_S


@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        ("incompatible", "no such card", 3),
        ("bad input", "no such card", 2),
        ("unbuildable", "cannot be started: The actor died", 3),
    ],
)
def test_what_can_never_work_ends_the_run_before_it_counts(
    new_run: RunMaker, how: str, words: str, code: int
) -> None:
    run = new_run()
    run.can_never_work("pc2/0", how)
    run.fleet.start_s["pc1/0"] = 5.0
    with pytest.raises(OrchestratorError, match=f"pc2/0: {words}") as raised:
        run.supervisor.run()
    assert raised.value.exit_code == code
    assert run.events("counting") == []


def test_the_planned_time_waits_for_no_given_up_worker(new_run: RunMaker) -> None:
    run = new_run(max_deaths=2, start_timeout_s=120)
    run.fleet.dies_at_once.add("pc2/0")
    rows = run.finish()
    (counting,) = run.events("counting")
    assert START_S < counting["startup_s"] < 15
    assert rows["pc2/0"].state is HeadState.QUARANTINED


def test_a_killed_heads_run_goes_on_with_its_counters(new_run: RunMaker, tmp_path: Path) -> None:
    first = new_run(duration="40s", pc1=2)
    copy = tmp_path / "killed"
    # The files on the disk, as a head leaves them that is killed at this time.
    first.fleet.at(
        15,
        lambda: shutil.copytree(first.folder, copy),
    )
    first.finish()

    left = read_run(copy)
    assert (left.outcome, left.was_killed, left.is_resumable) == ("interrupted", True, True)
    assert left.elapsed_s == pytest.approx(15 - START_S, abs=1)
    run = new_run(duration="40s", pc1=2, folder=copy, past=past_of(left))
    rows = run.finish()
    last = run.recorder.shown[-1]
    assert last.elapsed_s == 40.0
    assert run.clock.now_s - run.fleet.began_s == pytest.approx(
        START_S + 40 - left.elapsed_s, abs=1
    )
    for slot in left.slots:
        first_orders = run.fleet.begun[slot.slot][0]
        assert first_orders.incarnation == slot.incarnation + 1
        assert first_orders.begin is not None
        assert first_orders.begin.resume == slot.resume
        assert rows[slot.slot].counts.steps_ok > slot.row.counts.steps_ok > 0
    assert (run.stored().facts.heads, run.stored().outcome) == (2, "good")
