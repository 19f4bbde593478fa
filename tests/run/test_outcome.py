"""How a run ends: good, or degraded with a sentence for each slot and each limit that fell short; in virtual time.

What a user gets to read of it is in `test_runner.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import pytest

from orchestrator.core.run_outcome import outcome_of
from tests.run.conftest import RunMaker
from tests.run.scene import Run
from workers.messages import WorkerState

Script: TypeAlias = Callable[[Run], object]


def says(
    slot: str, state: WorkerState, *, from_s: float = 0.0, until_s: float = 99.0, **more: object
) -> Script:
    """Have a slot's workers report a state for a while."""

    def script(run: Run) -> None:
        run.fleet.at(
            from_s,
            lambda: run.fleet.says.update({slot: {"state": state, "reason": "as told", **more}}),
        )
        run.fleet.at(until_s, lambda: run.fleet.says.pop(slot, None))

    return script


def hangs_in_every_process(run: Run) -> None:
    """Let a step of pc2/0 not return, in the first process and in the two after it."""
    for at_s in (6.0, 16.0, 28.0):
        run.fleet.at(at_s, lambda: run.fleet.hang("pc2/0"))


def works_while_the_other_starts(run: Run) -> None:
    """Let pc2/0 do most of its work before the planned time begins."""
    run.fleet.start_s["pc1/0"] = 20.0
    says("pc2/0", WorkerState.EMERGENCY, from_s=20.0, until_s=40.0)(run)


def once(at_s: float, what: str) -> Script:
    return lambda run: run.fleet.at(
        at_s, lambda: getattr(run.fleet, what)("pc2" if what == "leave" else "pc2/0")
    )


def joins_late(run: Run) -> None:
    run.fleet.leave("pc2")
    run.fleet.at(15.0, lambda: run.fleet.join("pc2"))


@pytest.mark.parametrize(
    ("script", "missed"),
    [
        (says("pc2/0", WorkerState.EMERGENCY, from_s=19.0), r"pc2/0: ended in EMERGENCY: as told"),
        (says("pc2/0", WorkerState.PARKED, from_s=19.0), r"pc2/0: ended in PARKED: as told"),
        (
            hangs_in_every_process,
            r"pc2/0: ended STALE: its slice is \d+ s overdue; worked .* \(restarts 2, .*",
        ),
        (once(29.5, "hang"), r"pc2/0: ended STALE: its slice is \d+ s overdue"),
        (once(31.0, "kill"), r"pc2/0: ended in RESTARTING: its process ended: killed, or crashed"),
        (once(25.0, "leave"), r"pc2/0: ended in LOST: .*"),
        (works_while_the_other_starts, r"pc2/0: worked 1\d\.\d of 30\.\d s, .* \(restarts 0, .*"),
        (
            says("pc2/0", WorkerState.RUNNING, verify_checks=2, verify_errors=1),
            r"pc2/0: \d+ wrong of \d+ .*",
        ),
        (
            says("pc2/0", WorkerState.RUNNING, steps_oom=3),
            r"success rate 0\.\d{3} < run.min_success_rate 0.95",
        ),
    ],
    ids=[
        "emergency",
        "parked",
        "hangs in every process",
        "hangs",
        "restarting",
        "lost",
        "idle",
        "wrong",
        "rate",
    ],
)
def test_what_fell_short_degrades_the_run_and_is_named(
    new_run: RunMaker, script: Script, missed: str
) -> None:
    run = new_run(hang_timeout_s=5, stale_after_s=4, max_deaths=9, duration="30s", stop_grace_s=60)
    script(run)
    run.finish()
    (told,) = run.supervisor.shortfalls()
    assert re.fullmatch(missed, told), told
    assert outcome_of([told], interrupted=False) == ("degraded", 1)
    assert outcome_of([told], interrupted=True) == ("interrupted", 130)


@pytest.mark.parametrize(
    "script",
    [
        says("pc2/0", WorkerState.PAUSED),
        says("pc2/0", WorkerState.THROTTLED),
        says("pc2/0", WorkerState.RUNNING, steps_oom=3, steps_oom_probe=3),
        says("pc2/0", WorkerState.EMERGENCY, until_s=14.0),
        lambda run: run.fleet.start_s.update({"pc2/0": 60.0}),
        joins_late,
        once(10.0, "kill"),
    ],
    ids=[
        "paused for heat",
        "throttled",
        "the search for the size",
        "a short emergency",
        "a long start",
        "joins late",
        "killed once",
    ],
)
def test_what_is_no_fault_of_a_slot_leaves_the_run_good(new_run: RunMaker, script: Script) -> None:
    run = new_run(duration="30s")
    script(run)
    run.finish()
    assert run.supervisor.shortfalls() == ()
    assert outcome_of((), interrupted=False) == ("good", 0)


def test_a_step_that_outlasts_the_run_is_no_fault_by_itself(new_run: RunMaker) -> None:
    run = new_run(duration="30s", stop_grace_s=10, stale_after_s=120, hang_timeout_s=300)
    once(29.5, "hang")(run)
    run.finish()
    assert run.supervisor.shortfalls() == ()
