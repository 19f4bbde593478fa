"""The ordinary course of a slot: it joins, reports, works, loses its node and gets it back.

One event in, the state and the commands that come out. How it ends is in `test_lifecycle_end.py`, what goes wrong in
`test_lifecycle_faults.py` and `test_lifecycle_losses.py`, any order of events in `test_lifecycle_machine.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.slot import (
    Accept,
    Flight,
    Forget,
    HeadState,
    NodeJoined,
    NodeLeft,
    NodeRefused,
    Note,
    Phase,
    Place,
    Slot,
    Submit,
    Tick,
)
from tests.core.scene import RULES, Scene, notes, sequences
from tests.counting import counters, counters_of
from workers.messages import WorkerState


def test_a_new_slot_waits_for_its_node() -> None:
    scene = Scene()
    assert (scene.slot.phase, scene.slot.state) == (Phase.ABSENT, HeadState.STARTING)
    assert scene.feed(Tick(), later_s=1e6) == []
    assert scene.slot == Slot(slot="pc1/0")


def test_a_node_that_joins_gets_the_actor_and_one_slice_of_one_step_and_waits_for_its_report() -> None:
    scene = Scene()
    assert scene.feed(NodeJoined()) == [
        Place(),
        Submit(incarnation=0, sequence=0, duration_s=0.0, step_limit=1, resume=None),
    ]
    assert scene.slot.phase is Phase.WORKING
    assert not scene.slot.ready
    assert scene.slot.reason == "its process is starting"
    assert scene.slot.in_flight == (Flight(sequence=0, duration_s=0.0, submitted_at_s=1000.0, step_limit=1),)


def test_nothing_is_sent_behind_the_first_slice_before_its_report() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    for _ in range(int(RULES.start_timeout_s)):
        assert scene.feed(Tick(), later_s=1) == []
    assert len(scene.slot.in_flight) == 1


def test_the_first_report_of_a_process_fills_the_pipeline() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    # One step in 10 ms is 100 a second: twice as many, and four.
    assert scene.deeds(scene.report(steps_ok=1, wall_s=0.01, resume={"failures": 2}), later_s=2) == [
        Submit(incarnation=0, sequence=1, duration_s=1.0, step_limit=204, resume={"failures": 2}),
        Submit(incarnation=0, sequence=2, duration_s=1.0, step_limit=204, resume={"failures": 2}),
    ]
    assert scene.slot.ready
    assert scene.slot.in_flight == (
        Flight(sequence=1, duration_s=1.0, submitted_at_s=1002.0, step_limit=204),
        Flight(sequence=2, duration_s=1.0, submitted_at_s=1002.0, step_limit=204),
    )


def test_a_report_counts_and_the_next_slice_goes_out_at_once() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    scene.feed(scene.report())
    event = scene.report(
        steps_ok=7,
        steps_oom=2,
        steps_error=1,
        oom_count=3,
        emergency_count=4,
        verify_checks=5,
        verify_errors=6,
        work_flop=1e12,
        busy_s=0.5,
        wall_s=1.0,
        reason="size 4096",
        state=WorkerState.BACKOFF,
        resume={"failures": 2},
    )
    commands = scene.feed(event, later_s=2)
    assert counters_of(scene.slot) == counters(
        steps_ok=7,
        steps_oom=2,
        steps_error=1,
        oom_count=3,
        emergency_count=4,
        verify_checks=5,
        verify_errors=6,
        work_flop=1e12,
        busy_s=0.5,
    )
    assert commands == [
        Accept(report=event.report),
        Submit(incarnation=0, sequence=3, duration_s=1.0, step_limit=18, resume={"failures": 2}),
        Note(
            name="state",
            fields=(("from_state", "RUNNING"), ("to_state", "BACKOFF"), ("cause", "size 4096"), ("incarnation", 0)),
        ),
    ]
    assert (scene.slot.state, scene.slot.reason, scene.slot.heard_at_s) == (WorkerState.BACKOFF, "size 4096", 1002.0)
    assert scene.slot.report is event.report
    assert [flight.sequence for flight in scene.slot.in_flight] == [2, 3]


def test_two_slices_are_under_way_whatever_is_reported() -> None:
    scene = Scene()
    scene.work(steps_ok=1)
    for sequence in range(1, 20):
        assert [flight.sequence for flight in scene.slot.in_flight] == [sequence, sequence + 1]
        assert sequences(scene.feed(scene.report(steps_ok=1), later_s=1)) == [sequence + 2]
    assert scene.slot.counts.steps_ok == 20


def test_reports_that_arrive_in_the_wrong_order_both_count() -> None:
    scene = Scene()
    scene.work()
    scene.feed(scene.report(sequence=2, steps_ok=3))
    scene.feed(scene.report(sequence=1, steps_ok=4))
    assert scene.slot.counts.steps_ok == 7
    assert [flight.sequence for flight in scene.slot.in_flight] == [3, 4]


def test_a_report_without_resume_state_leaves_the_last_one() -> None:
    scene = Scene()
    scene.work(resume={"failures": 2})
    scene.feed(scene.report(resume=None))
    assert scene.slot.resume == {"failures": 2}


@pytest.mark.parametrize(
    "foreign",
    [{"incarnation": 1}, {"sequence": 0}, {"sequence": 99}, {"slot": "pc1/1"}],
    ids=["another incarnation", "counted before", "never begun", "another slot"],
)
def test_a_report_that_is_not_awaited_is_refused_with_a_note_and_not_counted(foreign: dict[str, Any]) -> None:
    scene = Scene()
    scene.work(steps_ok=3)
    before = scene.slot
    commands = scene.feed(scene.report(steps_ok=5, **foreign))
    assert scene.slot == before
    refused = notes(commands, "report_refused")
    assert len(commands) == len(refused) == 1
    assert refused[0] == {
        "incarnation": foreign.get("incarnation", 0),
        "sequence": foreign.get("sequence", 1),
        "steps_ok": 5,
        "expected_incarnation": 0,
    }


def test_a_node_that_leaves_takes_its_slots_along() -> None:
    scene = Scene()
    scene.work(steps_ok=3)
    assert scene.deeds(NodeLeft()) == [Forget()]
    assert (scene.slot.phase, scene.slot.state) == (Phase.ABSENT, HeadState.LOST)
    assert scene.slot.reason == "its node has left the cluster"
    assert counters_of(scene.slot) == counters(steps_ok=3, steps_lost_upper_bound=8)
    before = scene.slot
    assert scene.feed(Tick(), later_s=1e6) == []
    assert scene.slot == before


def test_a_node_that_does_not_answer_is_lost_in_those_words() -> None:
    scene = Scene()
    scene.work()
    scene.feed(NodeLeft(reason="its node does not answer"))
    assert (scene.slot.state, scene.slot.reason) == (HeadState.LOST, "its node does not answer")


def test_a_node_that_joins_again_continues_with_a_new_incarnation_and_the_same_counters() -> None:
    scene = Scene()
    scene.work(steps_ok=3, resume={"failures": 2})
    scene.feed(NodeLeft())
    counts = scene.slot.counts
    assert scene.deeds(NodeJoined(), later_s=3600) == [
        Submit(incarnation=1, sequence=3, duration_s=0.0, step_limit=1, resume={"failures": 2})
    ]
    assert scene.slot.state is HeadState.STARTING
    assert scene.slot.counts == counts
    assert scene.feed(Tick()) == []


@pytest.mark.parametrize("known", [True, False], ids=["after it was lost", "before it ever came"])
def test_a_refused_node_changes_only_the_reason_of_a_slot_that_waits(known: bool) -> None:
    scene = Scene()
    if known:
        scene.work()
        scene.feed(NodeLeft())
    before = scene.slot
    assert scene.feed(NodeRefused(reason="pc1 offers 4 CPUs")) == []
    assert scene.slot.reason == "pc1 offers 4 CPUs"
    assert scene.slot == replace(before, reason="pc1 offers 4 CPUs")
    scene.feed(NodeJoined())
    assert (scene.slot.phase, scene.slot.reason) == (Phase.WORKING, "its process is starting")


def test_a_state_is_noted_when_it_changes_and_only_then() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    assert len(notes(scene.feed(scene.report()), "state")) == 1
    assert notes(scene.feed(scene.report(reason="other words")), "state") == []
    assert notes(scene.feed(scene.report(state=WorkerState.BACKOFF, reason="size 4096")), "state") == [
        {"from_state": "RUNNING", "to_state": "BACKOFF", "cause": "size 4096", "incarnation": 0}
    ]
