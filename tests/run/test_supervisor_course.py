"""Ordinary runs under the real supervisor, and runs with any faults at any time.

A run starts, counts, works and ends when it should, and counts each step exactly once.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from orchestrator.core.run_outcome import outcome_of
from orchestrator.core.slot import HeadState, NodeLeft, Phase
from orchestrator.errors import UsageError
from orchestrator.record.model import Row
from orchestrator.run.resume import environment_of, past_of
from orchestrator.run.terminal import Interrupts
from tests.run.conftest import RunMaker
from tests.run.scene import Run
from tests.run.scripted_fleet import START_S, STEPS_PER_S
from workers.messages import Orders, WorkerState


def test_every_slot_is_placed_once_and_works_to_the_planned_end(new_run: RunMaker) -> None:
    run = new_run(pc1=2, pc2=1)
    rows = run.finish()
    assert run.fleet.placed == list(rows) == ["pc1/0", "pc1/1", "pc2/0"]
    for row in rows.values():
        assert (row.state, row.restarts) == (WorkerState.RUNNING, 0)
        assert row.counts.steps_ok == pytest.approx(20 * STEPS_PER_S, rel=0.1)
        assert run.fleet.really_done[row.slot] == row.counts.steps_ok, (
            "what it does until it rests is counted"
        )
    (counting,) = run.events("counting")
    assert counting["startup_s"] == pytest.approx(START_S, abs=0.5)
    last = run.recorder.shown[-1]
    assert (last.elapsed_s, last.restart_count) == (20.0, 0)
    assert run.clock.now_s - run.fleet.began_s == pytest.approx(START_S + 20, abs=0.5)
    assert {slot.slot: slot.row.counts.steps_ok for slot in run.stored().slots} == {
        slot: row.counts.steps_ok for slot, row in rows.items()
    }


def test_the_planned_time_begins_with_the_slowest_worker(new_run: RunMaker) -> None:
    run = new_run()
    run.fleet.start_s["pc2/0"] = 30.0
    rows = run.finish()
    (counting,) = run.events("counting")
    assert counting["startup_s"] == pytest.approx(30, abs=0.5)
    assert rows["pc1/0"].counts.steps_ok > rows["pc2/0"].counts.steps_ok > 19 * STEPS_PER_S
    awaited = [shown for shown in run.recorder.shown if shown.starting_s is not None]
    assert max(shown.starting_s or 0.0 for shown in awaited) == pytest.approx(30, abs=0.5)
    assert all(shown.elapsed_s == 0.0 for shown in awaited)


def test_the_store_knows_of_every_process_before_it_is_begun(new_run: RunMaker) -> None:
    run = new_run(duration="5s")

    def check(slot: str, orders: Orders) -> None:
        record = next(record for record in run.stored().slots if record.slot == slot)
        assert record.incarnation == orders.incarnation
        assert orders.begin is None or orders.begin.resume == record.resume
        assert orders.begin is None or orders.begin.fresh is (orders.incarnation == 0)

    run.fleet.on_order = check
    run.fleet.at(3, lambda: run.fleet.kill("pc1/0"))
    assert all(row.counts.steps_ok > 0 for row in run.finish().values())


@pytest.mark.parametrize("seed", range(3))
def test_answers_that_are_lost_cost_no_event_and_no_step(new_run: RunMaker, seed: int) -> None:
    run = new_run(pc1=2, duration="60s", max_deaths=9)
    run.fleet.lost_answers = 0.4
    run.fleet._chance.seed(seed)
    run.fleet.at(12, lambda: run.fleet.kill("pc1/0"))
    run.fleet.at(25, lambda: run.fleet.end_program("pc1/1"))
    run.fleet.at(40, lambda: run.fleet.corrupt("pc2/0"))
    rows = run.finish()  # also compares the counts
    for slot, row in rows.items():
        assert (row.state, row.restarts) == (WorkerState.RUNNING, 1)
        assert row.counts.steps_ok == pytest.approx(56 * STEPS_PER_S, rel=0.12)
        assert len(run.events("device_opened", slot=slot)) == 2
    assert len(run.events("process_ended")) == 1


def test_a_run_in_which_every_slot_was_given_up_ends_at_once(new_run: RunMaker) -> None:
    run = new_run(duration="1h", max_workload_errors=3)
    for slot in ("pc1/0", "pc2/0"):
        run.fleet.says[slot] = {
            "error": "Traceback …",
            "reason": "no such column",
            "steps_error": 1,
        }
    rows = run.finish()
    assert {row.state for row in rows.values()} == {HeadState.QUARANTINED}
    assert all(row.reason.endswith("no such column") for row in rows.values())
    assert len(run.events("workload_error")) == 6
    assert run.clock.now_s - run.fleet.began_s < 10


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """The run's own handling of signals."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    handler = Interrupts()
    handler.install()
    yield handler
    handler.restore()
    for number, usual in before.items():  # `restore` leaves signals ignored for a command that ends
        signal.signal(number, usual)


def press_ctrl_c() -> None:
    # SIGTERM has the same effect: a program in the background may ignore
    # SIGINT.
    signal.raise_signal(signal.SIGTERM)


def test_an_interrupted_run_waits_until_its_workers_rest(
    new_run: RunMaker, interrupts: Interrupts
) -> None:
    run = new_run(duration="1h", interrupts=interrupts)
    run.fleet.at(10, press_ctrl_c)
    rows = run.finish()
    assert run.clock.now_s - run.fleet.began_s == pytest.approx(10.6, abs=0.7)
    for row in rows.values():
        assert row.state is WorkerState.RUNNING
        assert row.counts.steps_ok == run.fleet.really_done[row.slot]
    assert 0 < run.recorder.shown[-1].elapsed_s < 12


def test_a_second_interrupt_ends_the_run_at_once(new_run: RunMaker, interrupts: Interrupts) -> None:
    run = new_run(duration="1h", interrupts=interrupts)
    run.fleet.at(9, lambda: run.fleet.hang("pc2/0"))
    run.fleet.at(10, press_ctrl_c)
    run.fleet.at(10.3, press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run.supervisor.run()
    assert run.clock.now_s - run.fleet.began_s < 11
    run.close()
    run.check_books()


def test_a_worker_that_hangs_at_the_end_is_lost_in_time(new_run: RunMaker) -> None:
    run = new_run(stop_grace_s=3)
    run.fleet.at(START_S + 19, lambda: run.fleet.hang("pc2/0"))
    rows = run.finish()
    assert run.clock.now_s - run.fleet.began_s == pytest.approx(START_S + 20 + 3 + 3, abs=1)
    assert rows["pc1/0"].counts.steps_ok == run.fleet.really_done["pc1/0"]


def test_an_illegal_event_is_logged_and_ends_no_run(new_run: RunMaker) -> None:
    run = new_run()
    run.may_be_illegal = True
    run.supervisor._feed("pc1/0", NodeLeft())
    (told,) = run.events("illegal_event", slot="pc1/0")
    assert (told["phase"], told["refused"]) == ("absent", "NodeLeft")
    assert run.finish()["pc1/0"].counts.steps_ok > 0


SLOTS = ("pc1/0", "pc1/1", "pc2/0", "pc2/1")
NODES = ("pc1", "pc2")

#: Time after which no fault occurs, so that everything can recover.
CALM_AFTER_S = 60


def happening(run: Run, drawn: random.Random) -> Callable[[], object]:
    """Draw a fault of a slot, of a node or of the head."""
    fleet, slot, node = run.fleet, drawn.choice(SLOTS), drawn.choice(NODES)
    to_slot = drawn.choice([fleet.kill, fleet.hang, fleet.corrupt])
    return drawn.choice(
        [
            lambda: to_slot(slot) if fleet.has_process(slot) else None,
            lambda: fleet.lose(node),
            lambda: fleet.leave(node),
            lambda: fleet.has_node(node) or fleet.join(node),
            lambda: fleet.silence(node, silent=drawn.random() < 0.5),
            lambda: fleet.head_stands_still(drawn.choice([2.0, 5.0, 30.0])),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_run_ends_and_its_books_hold_whatever_happens_and_when(
    new_run: RunMaker, seed: int
) -> None:
    drawn = random.Random(seed)  # noqa: S311 - must be repeatable
    patience = {"hang_timeout_s": 8, "stale_after_s": 3, "start_timeout_s": 15, "max_deaths": 8}
    run = new_run(pc1=2, pc2=2, duration="200s", **patience)
    for _ in range(drawn.randint(1, 12)):
        run.fleet.at(drawn.uniform(0, CALM_AFTER_S), happening(run, drawn))
    for node in NODES:
        run.fleet.at(CALM_AFTER_S + 1, lambda node=node: run.fleet.silence(node, silent=False))
        run.fleet.at(
            CALM_AFTER_S + 20, lambda node=node: run.fleet.has_node(node) or run.fleet.join(node)
        )
    rows = run.finish()
    assert run.recorder.shown[-1].elapsed_s == 200
    for row in rows.values():
        assert row.state is WorkerState.RUNNING or (
            row.state is HeadState.QUARANTINED and row.restarts >= 3
        ), row
    for slot in SLOTS:
        for name in ("steps_ok", "restarts"):
            values = [row.to_dict()[name] for row in run.shown(slot)]
            assert values == sorted(values), "no counter goes back"
    assert run.events("counting")[0]["at_s"] >= START_S


def head_is_killed() -> None:
    raise KeyboardInterrupt


def states(rows: dict[str, Row]) -> dict[str, WorkerState]:
    return {slot: row.state for slot, row in rows.items()}


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


Script: TypeAlias = Callable[[Run], object]


def says(
    slot: str, state: WorkerState, *, from_s: float = 0.0, until_s: float = 99.0, **more: object
) -> Script:
    """Return a script in which a slot's workers report a state for a while."""

    def script(run: Run) -> None:
        run.fleet.at(
            from_s,
            lambda: run.fleet.says.update({slot: {"state": state, "reason": "as told", **more}}),
        )
        run.fleet.at(until_s, lambda: run.fleet.says.pop(slot, None))

    return script


def hangs_in_every_process(run: Run) -> None:
    """Make a step of pc2/0 hang in each of its first three processes."""
    for at_s in (6.0, 16.0, 28.0):
        run.fleet.at(at_s, lambda: run.fleet.hang("pc2/0"))


def works_while_the_other_starts(run: Run) -> None:
    """Make pc2/0 do most of its work before the planned time begins."""
    run.fleet.start_s["pc1/0"] = 20.0
    says("pc2/0", WorkerState.EMERGENCY, from_s=20.0, until_s=40.0)(run)


def once(at_s: float, what: str) -> Script:
    return lambda run: run.fleet.at(
        at_s, lambda: getattr(run.fleet, what)("pc2" if what == "leave" else "pc2/0")
    )


def joins_late(run: Run) -> None:
    run.fleet.leave("pc2")
    run.fleet.at(15.0, lambda: run.fleet.join("pc2"))


FELL_SHORT = {
    "emergency": (
        says("pc2/0", WorkerState.EMERGENCY, from_s=19.0),
        r"pc2/0: ended in EMERGENCY: as told",
    ),
    "hangs in every process": (
        hangs_in_every_process,
        r"pc2/0: ended STALE: no report for \d+ s; worked .* \(restarts 2, .*",
    ),
    "restarting": (
        once(31.0, "kill"),
        r"pc2/0: ended in RESTARTING: its process ended: killed, or crashed",
    ),
    "lost": (once(25.0, "leave"), r"pc2/0: ended in LOST: .*"),
    "idle": (
        works_while_the_other_starts,
        r"pc2/0: worked 1\d\.\d of 30\.\d s, .* \(restarts 0, .*",
    ),
    "wrong": (
        says("pc2/0", WorkerState.RUNNING, verify_checks=2, verify_errors=1),
        r"pc2/0: \d+ wrong of \d+ .*",
    ),
    "rate": (
        says("pc2/0", WorkerState.RUNNING, steps_oom=3),
        r"success rate 0\.\d{3} < run.min_success_rate 0.95",
    ),
}


@pytest.mark.parametrize("what", FELL_SHORT)
def test_what_fell_short_degrades_the_run_and_is_named(new_run: RunMaker, what: str) -> None:
    script, missed = FELL_SHORT[what]
    run = new_run(hang_timeout_s=5, stale_after_s=4, max_deaths=9, duration="30s", stop_grace_s=60)
    script(run)
    run.finish()
    (told,) = run.supervisor.shortfalls()
    assert re.fullmatch(missed, told), told
    assert outcome_of([told], interrupted=False) == ("degraded", 1)
    assert outcome_of([told], interrupted=True) == ("interrupted", 130)


NO_FAULT: dict[str, Script] = {
    "paused for heat": says("pc2/0", WorkerState.PAUSED),
    "throttled": says("pc2/0", WorkerState.THROTTLED),
    "the search for the size": says("pc2/0", WorkerState.RUNNING, steps_oom=3, steps_oom_probe=3),
    "a short emergency": says("pc2/0", WorkerState.EMERGENCY, until_s=14.0),
    "a long start": lambda run: run.fleet.start_s.update({"pc2/0": 60.0}),
    "joins late": joins_late,
    "killed once": once(10.0, "kill"),
}


@pytest.mark.parametrize("what", NO_FAULT)
def test_what_is_no_fault_of_a_slot_leaves_the_run_good(new_run: RunMaker, what: str) -> None:
    run = new_run(duration="30s")
    NO_FAULT[what](run)
    run.finish()
    assert run.supervisor.shortfalls() == ()
    assert outcome_of((), interrupted=False) == ("good", 0)
