"""How a slot ends with its run: slices cut to fit, drained, closed."""

from __future__ import annotations

import pytest

from orchestrator.core.slot import (
    Close,
    Drain,
    Event,
    Forget,
    HeadState,
    NodeJoined,
    NodeLeft,
    Phase,
    Tick,
)
from tests.core.scene import Scene, submits
from tests.counting import counters, counters_of
from workers.messages import Verdict, WorkerState


def test_draining_waits_for_the_running_slice_and_the_queued_one_and_counts_both() -> None:
    scene = Scene()
    scene.work(steps_ok=1)
    assert scene.feed(Drain()) == []
    assert scene.feed(Drain()) == []
    assert scene.deeds(scene.report(steps_ok=1)) == []
    assert scene.slot.phase is Phase.WORKING
    assert scene.deeds(scene.report(steps_ok=1)) == []
    assert (scene.slot.phase, scene.slot.state) == (Phase.STOPPED, WorkerState.RUNNING)
    assert counters_of(scene.slot) == counters(steps_ok=3)


@pytest.mark.parametrize(
    ("before", "lost"),
    [
        pytest.param([], 0, id="absent"),
        pytest.param([NodeJoined()], 1, id="not ready"),
        pytest.param([NodeJoined(), NodeLeft()], 1, id="lost"),
    ],
)
def test_draining_waits_for_nothing_that_may_not_be_running(before: list[Event], lost: int) -> None:
    scene = Scene()
    for event in before:
        scene.feed(event)
    assert scene.deeds(Drain()) == [Forget()]
    assert (scene.slot.phase, scene.slot.in_flight) == (Phase.STOPPED, ())
    assert counters_of(scene.slot) == counters(steps_lost_upper_bound=lost)


def test_draining_during_the_back_off_stops_at_once() -> None:
    scene = Scene()
    scene.work()
    scene.feed(scene.failure())
    scene.feed(Drain())
    assert (scene.slot.phase, scene.slot.wake_at_s) == (Phase.STOPPED, None)


@pytest.mark.parametrize("how", ["dies", "is poisoned", "hangs", "loses its node"])
def test_a_draining_slot_whose_process_is_lost_stops_and_begins_nothing(how: str) -> None:
    scene = Scene()
    scene.work()
    scene.feed(Drain())
    events: dict[str, Event] = {
        "dies": scene.failure(),
        "is poisoned": scene.report(verdict=Verdict.CONTEXT_CORRUPTED),
        "hangs": Tick(),
        "loses its node": NodeLeft(),
    }
    scene.feed(events[how], later_s=100 if how == "hangs" else 0)
    assert scene.slot.phase is Phase.STOPPED
    for event in (Tick(), NodeJoined(), Tick()):
        assert scene.feed(event, later_s=100) == []


def test_a_draining_slot_that_loses_its_node_is_still_shown_as_lost() -> None:
    scene = Scene()
    scene.work()
    scene.feed(Drain())
    scene.feed(NodeLeft())
    assert scene.slot.state is HeadState.LOST


@pytest.mark.parametrize("reported", [0, 1])
def test_what_is_still_under_way_when_the_run_closes_is_lost(reported: int) -> None:
    scene = Scene()
    scene.work()
    scene.feed(Drain())
    for _ in range(reported):
        scene.feed(scene.report(steps_ok=2))
    assert scene.feed(Close()) == [Forget()]
    assert (scene.slot.phase, scene.slot.in_flight) == (Phase.STOPPED, ())
    assert counters_of(scene.slot) == counters(steps_ok=2 * reported, steps_lost_upper_bound=4 * (2 - reported))


def test_slices_are_cut_to_the_end_of_the_run() -> None:
    scene = Scene(ends_at_s=1003.5)
    scene.feed(NodeJoined())
    scene.feed(scene.report(), later_s=0.5)
    assert [flight.duration_s for flight in scene.slot.in_flight] == [1.0, 1.0]
    # The slice until 1002.5 begins, so the next has its full length until the end.
    scene.feed(scene.report(), later_s=1.0)
    assert [flight.duration_s for flight in scene.slot.in_flight] == [1.0, 1.0]
    scene.feed(scene.report(), later_s=1.0)
    assert [flight.duration_s for flight in scene.slot.in_flight] == [1.0]
    scene.ends_at_s = 1003.875
    scene.feed(scene.report(), later_s=0.5)
    assert [flight.duration_s for flight in scene.slot.in_flight] == [0.875]


@pytest.mark.parametrize(("left_s", "begun"), [(0.125, [0.125]), (0.0625, []), (0.0, []), (-5.0, [])])
def test_no_slice_shorter_than_a_tenth_is_begun(left_s: float, begun: list[float]) -> None:
    scene = Scene(ends_at_s=1000.0 + left_s)
    scene.feed(NodeJoined())
    assert [submit.duration_s for submit in submits(scene.feed(scene.report()))] == begun


def test_a_slot_that_has_nothing_left_to_do_waits_for_the_end_without_alarm() -> None:
    scene = Scene(ends_at_s=1000.0)
    scene.feed(NodeJoined())
    scene.feed(scene.report())
    before = scene.slot
    assert before.in_flight == ()
    assert scene.feed(Tick(), later_s=1000) == []
    assert scene.slot == before
    scene.feed(Drain())
    assert scene.slot.phase is Phase.STOPPED
