"""The ordinary course of a run under the real supervisor, and one in which anything happens at any time.

It starts, counts, works and ends when it should; no step is counted twice, and none is forgotten.
"""

from __future__ import annotations

import io
import random
import signal
from collections.abc import Callable, Iterator

import pytest

from orchestrator.core.lifecycle import IllegalEventError
from orchestrator.core.slot import HeadState, NodeLeft
from orchestrator.run.terminal import Interrupts
from orchestrator.view.live import PlainLines
from tests.run.conftest import RunMaker
from tests.run.scene import Run
from tests.run.scripted_fleet import START_S, STEPS_PER_S
from workers.messages import Directive, WorkerEvent, WorkerState


def test_every_slot_is_placed_once_and_works_to_the_planned_end(new_run: RunMaker) -> None:
    run = new_run(pc1=2, pc2=1)
    rows = run.finish()
    assert run.fleet.placed == list(rows) == ["pc1/0", "pc1/1", "pc2/0"]
    for row in rows.values():
        assert (row.state, row.restarts) == (WorkerState.RUNNING, 0)
        assert row.counts.steps_ok == pytest.approx(20 * STEPS_PER_S, rel=0.1)
        assert run.fleet.really_done[row.slot] == row.counts.steps_ok, (
            "what was sent is waited for, and counted"
        )
    (counting,) = run.events("counting")
    assert counting["startup_s"] == pytest.approx(START_S, abs=0.2)
    last = run.recorder.shown[-1]
    assert (last.elapsed_s, last.restart_count, last.steps_lost_upper_bound) == (20.0, 0, 0)
    assert run.clock.now_s - run.fleet.began_s == pytest.approx(START_S + 20, abs=0.5)
    assert {slot.slot: slot.counters["steps_ok"] for slot in run.stored().slots} == {
        slot: row.counts.steps_ok for slot, row in rows.items()
    }


def test_a_process_is_sent_one_step_first(new_run: RunMaker) -> None:
    run = new_run()
    run.fleet.at(5, lambda: run.fleet.kill("pc1/0"))
    run.finish()
    sent = run.fleet.directives["pc1/0"]
    assert {directive.incarnation for directive in sent} == {0, 1}
    for incarnation in (0, 1):
        limits = [
            directive.step_limit for directive in sent if directive.incarnation == incarnation
        ]
        tries = limits.count(1)
        assert limits[:tries] == [1] * tries
        assert len(limits) > tries >= 1


def test_the_planned_time_begins_with_the_slowest_worker(new_run: RunMaker) -> None:
    run = new_run()
    run.fleet.start_s["pc2/0"] = 30.0
    rows = run.finish()
    (counting,) = run.events("counting")
    assert counting["startup_s"] == pytest.approx(30, abs=0.2)
    assert rows["pc1/0"].counts.steps_ok > rows["pc2/0"].counts.steps_ok > 19 * STEPS_PER_S
    awaited = [shown for shown in run.recorder.shown if shown.starting_s is not None]
    assert max(shown.starting_s or 0.0 for shown in awaited) == pytest.approx(30, abs=0.5)
    assert all(shown.elapsed_s == 0.0 for shown in awaited)
    reasons = [row.reason for row in run.shown("pc2/0") if row.state is HeadState.STARTING]
    assert any(reason.endswith(", 29 s so far") for reason in reasons)


def test_a_worker_that_is_late_delays_the_run_by_its_timeout(new_run: RunMaker) -> None:
    run = new_run(start_timeout_s=15)
    run.fleet.start_s["pc2/0"] = 1000.0
    rows = run.finish()
    (counting,) = run.events("counting")
    assert counting["startup_s"] == pytest.approx(START_S + 15, abs=0.3)
    assert (rows["pc2/0"].counts.steps_ok, rows["pc1/0"].state) == (0, WorkerState.RUNNING)
    assert run.fleet.restarts.count("pc2/0") >= 2, "it is started again meanwhile"


def test_the_store_knows_of_every_slice_before_it_is_sent(new_run: RunMaker) -> None:
    run = new_run(duration="5s")

    def check(slot: str, directive: Directive) -> None:
        record = next(record for record in run.stored().slots if record.slot == slot)
        assert record.next_sequence > directive.sequence
        assert record.steps_at_risk >= (directive.step_limit or 0)

    run.fleet.on_submit = check
    assert all(row.counts.steps_ok > 0 for row in run.finish().values())


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
    for number, usual in before.items():  # those of a command that is to end stay ignored
        signal.signal(number, usual)


def press_ctrl_c() -> None:
    # By SIGTERM, which means the same: a program that was started in the background may have SIGINT
    # ignored.
    signal.raise_signal(signal.SIGTERM)


def test_an_interrupted_run_lets_its_slices_end_and_begins_none(
    new_run: RunMaker, interrupts: Interrupts
) -> None:
    run = new_run(duration="1h", interrupts=interrupts)
    run.fleet.at(10, press_ctrl_c)
    rows = run.finish()
    assert run.clock.now_s - run.fleet.began_s == pytest.approx(12, abs=1)
    for row in rows.values():
        assert row.state is WorkerState.RUNNING
        assert row.counts.steps_ok == run.fleet.really_done[row.slot]
    assert run.recorder.shown[-1].steps_lost_upper_bound == 0
    assert 0 < run.recorder.shown[-1].elapsed_s < 12


def test_a_second_interrupt_ends_the_run_and_loses_slices(
    new_run: RunMaker, interrupts: Interrupts
) -> None:
    run = new_run(duration="1h", interrupts=interrupts)
    run.fleet.at(10, press_ctrl_c)
    run.fleet.at(10.3, press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run.supervisor.run()
    assert run.clock.now_s - run.fleet.began_s < 11
    assert all(slot.counters["steps_lost_upper_bound"] > 0 for slot in run.stored().slots)
    run.check_books()


def test_a_worker_that_hangs_at_the_end_is_lost_in_time(new_run: RunMaker) -> None:
    run = new_run(stop_grace_s=3)
    run.fleet.at(START_S + 19, lambda: run.fleet.hang("pc2/0"))
    rows = run.finish()
    assert run.clock.now_s - run.fleet.began_s == pytest.approx(START_S + 20 + 3 + 3, abs=1)
    assert (
        run.recorder.shown[-1].steps_lost_upper_bound
        == run.stored().slots[1].counters["steps_lost_upper_bound"]
        > 0
    )
    assert rows["pc1/0"].counts.steps_ok == run.fleet.really_done["pc1/0"]


def test_what_was_under_way_when_the_head_failed_is_lost(new_run: RunMaker) -> None:
    run = new_run()

    def fail() -> None:
        raise RuntimeError("a bug of ours")

    run.fleet.at(10, fail)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        run.supervisor.run()
    stored = run.stored()
    assert [slot.steps_at_risk for slot in stored.slots] == [0, 0]
    lost = [slot.counters["steps_lost_upper_bound"] for slot in stored.slots]
    assert all(steps > 0 for steps in lost)
    assert run.supervisor.snapshot().steps_lost_upper_bound == sum(lost)
    run.check_books()


@pytest.mark.parametrize("strict", [True, False])
def test_an_illegal_event_is_raised_or_logged(new_run: RunMaker, strict: bool) -> None:
    run = new_run(strict=strict)
    absent = NodeLeft()
    if strict:
        with pytest.raises(IllegalEventError, match="pc1/0: NodeLeft cannot happen while absent"):
            run.supervisor._feed("pc1/0", absent)
        return
    run.supervisor._feed("pc1/0", absent)
    assert [
        (event["phase"], event["refused"]) for event in run.events("illegal_event", slot="pc1/0")
    ] == [("absent", "NodeLeft")]
    assert run.finish()["pc1/0"].counts.steps_ok > 0


SLOTS = ("pc1/0", "pc1/1", "pc2/0", "pc2/1")
NODES = ("pc1", "pc2")

#: Nothing happens after this, so that what can recover does.
CALM_AFTER_S = 60


def happening(run: Run, drawn: random.Random) -> Callable[[], object]:
    """Draw something that can happen to a slot, to a node or to the head."""
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
@pytest.mark.parametrize("seed", range(20))
def test_a_run_ends_and_its_books_hold_whatever_happens_and_when(
    new_run: RunMaker, seed: int
) -> None:
    drawn = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
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


def test_a_hazard_of_many_slots_is_told_once(new_run: RunMaker) -> None:
    """In the head of table and page, in the summary, and as one plain line."""
    run = new_run(pc1=2, pc2=2)
    told = WorkerEvent(name="hazard", at_unix_s=0.0, detail={"reason": "it draws numbers"})
    for slot in ("pc1/0", "pc1/1", "pc2/0"):
        run.fleet.says[slot] = {"events": (told, told)}
    run.finish()
    (notice,) = run.recorder.shown[-1].notices
    assert notice == "training hazard: it draws numbers"
    stream = io.StringIO()
    plain = PlainLines(stream)
    for snapshot in run.recorder.shown:
        plain.update(snapshot)
    assert stream.getvalue().count("it draws numbers") == 1
