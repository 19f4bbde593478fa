"""Every edge of the lifecycle's theory of operation: one event in, the state and the commands that come out."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.cluster.base import SliceFailure
from orchestrator.lifecycle import advance
from orchestrator.slots import (
    Abandon,
    Cancel,
    Command,
    Counters,
    Drain,
    EndRun,
    Event,
    Flight,
    Forget,
    NodeJoined,
    NodeLeft,
    Note,
    Phase,
    Place,
    Restart,
    Rules,
    SliceFailed,
    SliceReported,
    Slot,
    Submit,
    Tick,
)
from workers.messages import Report, Verdict, WorkerState

RULES = Rules(
    slice_s=1.0,
    hang_timeout_s=60.0,
    stale_after_s=10.0,
    start_timeout_s=120.0,
    restart_backoff_s=1.0,
    restart_backoff_max_s=5.0,
    max_deaths=6,
    death_window_s=300.0,
    max_workload_errors=3,
)


class Scene:
    """A slot, its clock and everything it has commanded; knows nothing of what should come out."""

    def __init__(self, *, ends_at_s: float | None = None, **rules: object) -> None:
        self.slot = Slot(slot="pc1/0")
        self.now_s = 1000.0
        self.ends_at_s = ends_at_s
        self.rules = replace(RULES, **rules)

    def feed(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """Let time pass, then the event happen; return the commands."""
        self.now_s += later_s
        self.slot, commands = advance(self.slot, event, self.now_s, self.rules, self.ends_at_s)
        return list(commands)

    def deeds(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """As `feed`, without what is only for the log."""
        return [command for command in self.feed(event, later_s=later_s) if not isinstance(command, Note)]

    def report(self, **changes: object) -> SliceReported:
        """Make the report of the running slice."""
        usual: dict[str, Any] = {
            "slot": self.slot.slot,
            "incarnation": self.slot.incarnation,
            "sequence": self.slot.in_flight[0].sequence if self.slot.in_flight else 0,
            "verdict": Verdict.OK,
            "state": WorkerState.RUNNING,
            "reason": "steady",
            "device": None,
            "memory": None,
            "size": 8192,
            "batch": 128,
            "claim_bytes": 1,
        }
        return SliceReported(report=Report(**{**usual, **changes}))

    def failure(self, kind: SliceFailure = SliceFailure.DIED, **changes: object) -> SliceFailed:
        """Make the failure of the running slice."""
        usual: dict[str, Any] = {
            "incarnation": self.slot.incarnation,
            "sequence": self.slot.in_flight[0].sequence,
            "failure": kind,
            "text": "worker died",
        }
        return SliceFailed(**{**usual, **changes})

    def work(self, **changes: object) -> None:
        """Join, and report the slice that proves the worker."""
        self.feed(NodeJoined())
        self.feed(self.report(**changes), later_s=1)

    def die(self) -> float:
        """Let the process die, prove a new one as soon as the slot wants one, and return how long it waited."""
        self.feed(self.failure())
        assert self.slot.phase is Phase.PAUSING
        assert self.slot.wake_at_s is not None
        wait_s = self.slot.wake_at_s - self.now_s
        self.feed(Tick(), later_s=wait_s)
        self.feed(self.report())
        return wait_s


def sequences(commands: list[Command]) -> list[int]:
    return [command.sequence for command in commands if isinstance(command, Submit)]


def notes(commands: list[Command], name: str) -> list[dict[str, Any]]:
    return [dict(command.fields) for command in commands if isinstance(command, Note) and command.name == name]


def test_a_new_slot_waits_for_its_node() -> None:
    scene = Scene()
    assert (scene.slot.phase, scene.slot.state) == (Phase.ABSENT, WorkerState.STARTING)
    assert scene.feed(Tick(), later_s=1e6) == []
    assert scene.slot == Slot(slot="pc1/0")


def test_a_node_that_joins_gets_the_actor_a_slice_that_proves_it_and_a_full_one_behind() -> None:
    scene = Scene()
    assert scene.feed(NodeJoined()) == [
        Place(),
        Submit(incarnation=0, sequence=0, duration_s=0.0, resume=None),
        Submit(incarnation=0, sequence=1, duration_s=1.0, resume=None),
    ]
    assert scene.slot.phase is Phase.WORKING
    assert scene.slot.reason == "its process is starting"
    assert scene.slot.in_flight == (
        Flight(sequence=0, duration_s=0.0, submitted_at_s=1000.0),
        Flight(sequence=1, duration_s=1.0, submitted_at_s=1000.0),
    )


def test_a_node_that_joins_twice_is_one_node() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    before = scene.slot
    assert scene.feed(NodeJoined(), later_s=1) == []
    assert scene.slot == before


def test_a_report_counts_and_the_next_slice_goes_out_at_once() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
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
        resume={"failures": 2},
    )
    commands = scene.feed(event, later_s=2)
    assert scene.slot.counters == Counters(
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
        Submit(incarnation=0, sequence=2, duration_s=1.0, resume={"failures": 2}),
        Note(
            name="state",
            fields=(("from_state", "STARTING"), ("to_state", "RUNNING"), ("cause", "steady"), ("incarnation", 0)),
        ),
    ]
    assert (scene.slot.state, scene.slot.reason, scene.slot.heard_at_s) == (WorkerState.RUNNING, "steady", 1002.0)
    assert scene.slot.report is event.report
    assert [flight.sequence for flight in scene.slot.in_flight] == [1, 2]


def test_two_slices_are_under_way_whatever_is_reported() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    for sequence in range(20):
        assert [flight.sequence for flight in scene.slot.in_flight] == [sequence, sequence + 1]
        assert sequences(scene.feed(scene.report(steps_ok=1), later_s=1)) == [sequence + 2]
    assert scene.slot.counters.steps_ok == 20


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


@pytest.mark.parametrize("end", [Phase.QUARANTINED, Phase.STOPPED])
def test_a_report_after_the_end_is_refused_with_a_note_and_not_counted(end: Phase) -> None:
    scene = Scene(max_deaths=1)
    scene.work()
    late = scene.report(steps_ok=5)
    scene.feed(scene.failure() if end is Phase.QUARANTINED else Drain())
    if end is Phase.STOPPED:
        scene.feed(scene.report())
    assert scene.slot.phase is end
    before = scene.slot
    assert len(notes(scene.feed(late), "report_refused")) == 1
    assert scene.slot == before


def test_a_report_from_before_a_death_is_refused_after_it() -> None:
    scene = Scene()
    scene.work()
    queued = scene.report(sequence=2, steps_ok=5)
    scene.feed(scene.failure())
    assert len(notes(scene.feed(queued), "report_refused")) == 1
    scene.feed(Tick())
    assert len(notes(scene.feed(queued), "report_refused")) == 1
    assert scene.slot.counters.steps_ok == 0


def test_a_process_that_dies_is_restarted_at_once_and_continues_where_the_last_report_left_it() -> None:
    scene = Scene()
    scene.work(steps_ok=3, resume={"failures": 2})
    assert scene.deeds(scene.failure()) == [Forget()]
    assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, WorkerState.RESTARTING)
    assert scene.slot.reason == "its process ended: killed, or crashed"
    assert scene.slot.counters == Counters(steps_ok=3, restarts=1, slices_lost=2)
    assert scene.feed(Tick()) == [
        Submit(incarnation=1, sequence=3, duration_s=0.0, resume={"failures": 2}),
        Submit(incarnation=1, sequence=4, duration_s=1.0, resume={"failures": 2}),
    ]
    assert scene.slot.counters.steps_ok == 3
    assert scene.slot.state is WorkerState.RESTARTING
    scene.feed(scene.report(steps_ok=4))
    assert (scene.slot.state, scene.slot.counters.steps_ok) == (WorkerState.RUNNING, 7)


def test_two_slices_that_fail_together_are_one_death() -> None:
    scene = Scene()
    scene.work()
    second = scene.failure(sequence=2)
    scene.feed(scene.failure())
    assert scene.feed(second) == []
    assert scene.slot.counters.restarts == 1


def test_restarts_wait_longer_each_time_up_to_the_cap() -> None:
    scene = Scene(max_deaths=7)
    scene.work()
    assert [scene.die() for _ in range(6)] == [0, 1, 2, 4, 5, 5]


def test_nothing_is_sent_before_the_back_off_is_over() -> None:
    scene = Scene()
    scene.work()
    scene.die()
    scene.feed(scene.failure())
    assert scene.feed(Tick(), later_s=0.99) == []
    assert sequences(scene.feed(Tick(), later_s=0.01)) == [6, 7]


def test_a_thousand_deaths_overflow_nothing() -> None:
    scene = Scene(max_deaths=1_000_000, death_window_s=86_400.0, restart_backoff_s=0.001, restart_backoff_max_s=0.01)
    scene.work()
    for _ in range(1100):
        assert scene.die() <= 0.01
    assert scene.slot.counters.restarts == 1100


def test_the_first_death_after_a_quiet_window_is_met_at_once_again() -> None:
    scene = Scene()
    scene.work()
    assert [scene.die(), scene.die()] == [0, 1]
    scene.feed(scene.report(), later_s=RULES.death_window_s)
    assert scene.die() == 0


def test_deaths_in_the_window_end_in_quarantine_for_good() -> None:
    scene = Scene(max_deaths=3)
    scene.work(steps_ok=3)
    scene.die()
    scene.die()
    assert scene.deeds(scene.failure()) == [Abandon()]
    assert (scene.slot.phase, scene.slot.state) == (Phase.QUARANTINED, WorkerState.QUARANTINED)
    assert scene.slot.reason == "3 deaths in 300 s; the last: its process ended: killed, or crashed"
    assert (scene.slot.in_flight, scene.slot.wake_at_s) == ((), None)
    before = scene.slot
    for event in (Tick(), NodeLeft(), NodeJoined(), Drain()):
        assert scene.feed(event, later_s=1000) == []
    assert scene.slot == before
    assert scene.slot.counters == Counters(steps_ok=3, restarts=3, slices_lost=6)


def test_deaths_further_apart_than_the_window_are_not_added_up() -> None:
    scene = Scene(max_deaths=2)
    scene.work()
    for _ in range(5):
        assert scene.die() == 0
        scene.feed(scene.report(), later_s=RULES.death_window_s)
    assert scene.slot.counters.restarts == 5


def test_an_actor_that_cannot_be_reached_right_after_a_restart_has_not_died_again() -> None:
    scene = Scene()
    scene.work()
    scene.feed(scene.failure())
    scene.feed(Tick())
    for retry in range(10):
        assert scene.deeds(scene.failure(SliceFailure.UNAVAILABLE)) == [Forget()]
        assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, WorkerState.RESTARTING)
        assert scene.feed(Tick(), later_s=0.4) == []
        assert len(sequences(scene.feed(Tick(), later_s=0.1))) == 2
        assert scene.slot.incarnation == retry + 2
    assert scene.slot.counters.restarts == 1
    scene.feed(scene.report())
    assert scene.slot.state is WorkerState.RUNNING


def test_an_actor_that_worked_and_cannot_be_reached_has_died() -> None:
    scene = Scene()
    scene.work()
    scene.feed(scene.failure(SliceFailure.UNAVAILABLE))
    assert (scene.slot.state, scene.slot.counters.restarts) == (WorkerState.RESTARTING, 1)


def test_a_process_that_dies_before_its_first_report_has_died() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    scene.feed(scene.failure(SliceFailure.DIED))
    assert (scene.slot.state, scene.slot.counters.restarts) == (WorkerState.RESTARTING, 1)


def test_an_actor_that_cannot_be_reached_for_the_start_timeout_is_quarantined() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    for _ in range(240):
        scene.feed(scene.failure(SliceFailure.UNAVAILABLE))
        scene.feed(Tick(), later_s=0.5)
    assert scene.slot.phase is Phase.WORKING
    assert scene.deeds(scene.failure(SliceFailure.UNAVAILABLE), later_s=0.1) == [Abandon()]
    assert scene.slot.reason == "no process came up in 120 s"


def test_the_back_off_is_no_part_of_the_start_timeout() -> None:
    scene = Scene(restart_backoff_s=600.0, restart_backoff_max_s=600.0, death_window_s=3600.0)
    scene.work()
    scene.die()
    scene.feed(scene.failure())
    scene.feed(Tick(), later_s=600)
    scene.feed(scene.failure(SliceFailure.UNAVAILABLE))
    assert scene.slot.phase is Phase.PAUSING


def test_the_start_timeout_begins_anew_with_a_report() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    scene.feed(scene.failure(SliceFailure.UNAVAILABLE))
    scene.feed(Tick(), later_s=100)
    scene.feed(scene.report())
    scene.feed(scene.failure())
    scene.feed(Tick(), later_s=100)
    scene.feed(scene.failure(SliceFailure.UNAVAILABLE))
    assert scene.slot.phase is Phase.PAUSING


def test_a_process_that_does_not_come_up_is_ended_and_started_again() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    assert scene.feed(Tick(), later_s=120) == []
    assert scene.deeds(Tick(), later_s=1) == [Forget(), Restart()]
    assert scene.slot.state is WorkerState.RESTARTING
    assert scene.slot.reason == "its process did not come up for 121 s; its process was ended"


def test_a_slot_whose_process_never_comes_up_is_given_up_though_its_deaths_are_far_apart() -> None:
    scene = Scene(max_deaths=4)
    scene.feed(NodeJoined())
    for _ in range(4):
        assert scene.slot.phase is Phase.WORKING
        scene.feed(Tick(), later_s=121)
        scene.feed(Tick(), later_s=5)
    assert scene.slot.phase is Phase.QUARANTINED
    # The deaths are at 121, 121 + 126, 121 + 2 x 126 and 121 + 3 x 126 seconds.
    assert scene.slot.reason.startswith("4 deaths in 378 s; the last: its process did not come up for 121 s")


def test_a_slice_that_hangs_has_its_process_ended() -> None:
    scene = Scene()
    scene.work(resume={"failures": 1})
    # The slice began with the last report and takes one second: it hangs 61 s later.
    assert scene.deeds(Tick(), later_s=61) == []
    assert scene.deeds(Tick(), later_s=0.1) == [Forget(), Restart()]
    assert scene.slot.reason == "no report for 60 s; its process was ended"
    assert scene.slot.counters == Counters(restarts=1, slices_lost=2)
    assert [command.resume for command in scene.feed(Tick()) if isinstance(command, Submit)] == [{"failures": 1}] * 2


def test_an_overdue_slice_is_stale_until_its_report_comes() -> None:
    scene = Scene()
    scene.work()
    scene.feed(Tick(), later_s=11)
    assert scene.slot.reason == "steady"
    scene.feed(Tick(), later_s=1)
    assert (scene.slot.state, scene.slot.reason) == (WorkerState.RUNNING, "STALE: its slice is 11 s overdue")
    scene.feed(scene.report(), later_s=1)
    assert scene.slot.reason == "steady"


def test_a_queued_slice_is_not_overdue_while_another_runs() -> None:
    scene = Scene()
    scene.work()
    for _ in range(8):
        scene.feed(scene.report(), later_s=10)
        scene.feed(Tick())
        assert scene.slot.reason == "steady"


def test_a_poisoned_process_is_replaced_and_its_last_report_counts() -> None:
    scene = Scene()
    scene.work()
    report = scene.report(verdict=Verdict.POISONED, reason="illegal access", steps_ok=2, resume={"failures": 1})
    assert scene.deeds(report) == [Forget(), Restart()]
    assert (scene.slot.phase, scene.slot.state, scene.slot.reason) == (
        Phase.PAUSING,
        WorkerState.RESTARTING,
        "illegal access",
    )
    assert scene.slot.counters == Counters(steps_ok=2, restarts=1, slices_lost=1)
    assert scene.slot.resume == {"failures": 1}


def test_poisoned_too_often_is_quarantined() -> None:
    scene = Scene(max_deaths=1)
    scene.work()
    assert scene.deeds(scene.report(verdict=Verdict.POISONED, reason="illegal access")) == [Abandon()]
    assert scene.slot.reason == "1 deaths in 300 s; the last: illegal access"


def test_a_misfit_ends_the_run_in_its_own_words() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    assert scene.deeds(scene.report(verdict=Verdict.MISFIT, reason="pc1/0: no such card")) == [
        EndRun(reason="pc1/0: no such card")
    ]


def test_a_worker_that_cannot_be_built_ends_the_run_and_is_named() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    assert scene.deeds(scene.failure(SliceFailure.UNBUILDABLE, text="no module workers")) == [
        EndRun(reason="pc1/0: cannot be started: no module workers")
    ]


@pytest.mark.parametrize("failure", ["misfit", "unbuildable"])
def test_once_the_run_counts_what_can_never_work_costs_one_slot_and_not_the_run(failure: str) -> None:
    scene = Scene(ends_at_s=1000.0)
    scene.feed(NodeJoined())
    event = (
        scene.failure(SliceFailure.UNBUILDABLE) if failure == "unbuildable" else scene.report(verdict=Verdict.MISFIT)
    )
    assert scene.deeds(event) == [Abandon()]
    assert scene.slot.phase is Phase.QUARANTINED


def test_a_card_too_full_for_a_context_is_waited_for_and_no_death() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    full = scene.report(verdict=Verdict.POISONED, device=None, oom_count=1, reason="out of memory")
    assert scene.deeds(full) == [Forget(), Restart()]
    assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, WorkerState.EMERGENCY)
    assert scene.slot.deaths_at_s == ()
    assert scene.slot.wake_at_s == scene.now_s + RULES.restart_backoff_max_s


@pytest.mark.parametrize("working", [True, False], ids=["in this process", "in an earlier one"])
def test_a_worker_that_cannot_be_built_but_has_worked_is_started_again(working: bool) -> None:
    scene = Scene()
    scene.work()
    if not working:
        scene.feed(scene.failure())
        scene.feed(Tick())
    deaths_before = scene.slot.counters.restarts
    assert scene.deeds(scene.failure(SliceFailure.UNBUILDABLE)) == [Forget(), Restart()]
    assert (scene.slot.state, scene.slot.counters.restarts) == (WorkerState.RESTARTING, deaths_before + 1)
    assert scene.slot.reason == "its process failed outside a step: worker died"


def test_errors_of_the_workload_in_a_row_end_in_quarantine() -> None:
    scene = Scene()
    scene.work()
    for _ in range(2):
        assert len(sequences(scene.feed(scene.report(error="Traceback …", reason="boom", steps_error=1)))) == 1
    assert scene.deeds(scene.report(error="Traceback …", reason="boom", steps_error=1)) == [Abandon()]
    assert scene.slot.reason == "the workload failed 3 times in a row: boom"
    assert scene.slot.counters == Counters(steps_error=3, slices_lost=1)


def test_errors_of_the_workload_count_whatever_else_the_report_says() -> None:
    scene = Scene(max_workload_errors=1)
    scene.work()
    report = scene.report(error="Traceback …", reason="boom", verdict=Verdict.POISONED)
    assert scene.deeds(report) == [Abandon()]
    assert scene.slot.phase is Phase.QUARANTINED


def test_a_good_slice_between_errors_of_the_workload_forgives_them() -> None:
    scene = Scene()
    scene.work()
    for _ in range(5):
        scene.feed(scene.report(error="Traceback …"))
        scene.feed(scene.report(error="Traceback …"))
        scene.feed(scene.report())
    assert scene.slot.phase is Phase.WORKING


def test_errors_of_the_workload_are_counted_on_over_a_death() -> None:
    scene = Scene(max_workload_errors=2)
    scene.work()
    scene.feed(scene.report(error="Traceback …"))
    scene.feed(scene.failure())
    scene.feed(Tick())
    scene.feed(scene.report(error="Traceback …"))
    assert scene.slot.phase is Phase.QUARANTINED


def test_a_node_that_leaves_takes_its_slots_along() -> None:
    scene = Scene()
    scene.work(steps_ok=3)
    assert scene.deeds(NodeLeft()) == [Forget()]
    assert (scene.slot.phase, scene.slot.state) == (Phase.ABSENT, WorkerState.LOST)
    assert scene.slot.reason == "its node has left the cluster"
    assert scene.slot.counters == Counters(steps_ok=3, slices_lost=2)
    before = scene.slot
    assert scene.feed(NodeLeft()) == []
    assert scene.feed(Tick(), later_s=1e6) == []
    assert scene.slot == before


@pytest.mark.parametrize(("died_before_s", "blamed"), [(59, True), (61, False)])
def test_deaths_shortly_before_a_node_leaves_are_blamed_on_the_node(died_before_s: float, blamed: bool) -> None:
    scene = Scene(max_deaths=2)
    scene.work()
    scene.feed(scene.failure())
    scene.feed(NodeLeft(), later_s=died_before_s)
    scene.feed(NodeJoined(), later_s=1)
    scene.feed(scene.report())
    scene.feed(scene.failure())
    assert (scene.slot.phase is Phase.PAUSING) == blamed


def test_a_node_that_joins_again_continues_with_a_new_incarnation_and_the_same_counters() -> None:
    scene = Scene()
    scene.work(steps_ok=3, resume={"failures": 2})
    scene.feed(NodeLeft())
    counters = scene.slot.counters
    assert scene.deeds(NodeJoined(), later_s=3600) == [
        Submit(incarnation=1, sequence=3, duration_s=0.0, resume={"failures": 2}),
        Submit(incarnation=1, sequence=4, duration_s=1.0, resume={"failures": 2}),
    ]
    assert scene.slot.state is WorkerState.STARTING
    assert scene.slot.counters == counters
    assert scene.feed(Tick()) == []


def test_a_node_that_leaves_during_the_back_off_wakes_nobody() -> None:
    scene = Scene()
    scene.work()
    scene.feed(scene.failure())
    scene.feed(NodeLeft())
    assert scene.feed(Tick(), later_s=100) == []
    assert scene.slot.phase is Phase.ABSENT


def test_draining_cancels_the_queued_slice_and_waits_for_the_running_one() -> None:
    scene = Scene()
    scene.work(steps_ok=1)
    assert scene.feed(Drain()) == [Cancel(sequence=2)]
    assert scene.slot.phase is Phase.WORKING
    assert scene.feed(Drain()) == []
    assert scene.deeds(scene.report(steps_ok=1)) == []
    assert (scene.slot.phase, scene.slot.state, scene.slot.counters) == (
        Phase.STOPPED,
        WorkerState.RUNNING,
        Counters(steps_ok=2),
    )


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="absent"),
        pytest.param([NodeJoined()], id="not proven"),
        pytest.param([NodeJoined(), NodeLeft()], id="lost"),
    ],
)
def test_draining_waits_for_nothing_that_may_not_be_running(before: list[Event]) -> None:
    scene = Scene()
    for event in before:
        scene.feed(event)
    assert scene.deeds(Drain()) == [Forget()]
    assert (scene.slot.phase, scene.slot.in_flight) == (Phase.STOPPED, ())


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
        "is poisoned": scene.report(verdict=Verdict.POISONED),
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
    assert scene.slot.state is WorkerState.LOST


def test_slices_are_cut_to_the_end_of_the_run() -> None:
    scene = Scene(ends_at_s=1002.5)
    scene.feed(NodeJoined())
    assert [flight.duration_s for flight in scene.slot.in_flight] == [0.0, 1.0]
    # At 1000.5 the slice until 1001.5 begins, so the next has its full length until the end.
    scene.feed(scene.report(), later_s=0.5)
    assert [flight.duration_s for flight in scene.slot.in_flight] == [1.0, 1.0]
    scene.feed(scene.report(), later_s=1.0)
    assert [flight.duration_s for flight in scene.slot.in_flight] == [1.0]
    scene.ends_at_s = 1002.875
    scene.feed(scene.report(), later_s=0.5)
    assert [flight.duration_s for flight in scene.slot.in_flight] == [0.875]


@pytest.mark.parametrize(("left_s", "begun"), [(0.125, [0.125]), (0.0625, []), (0.0, []), (-5.0, [])])
def test_no_slice_shorter_than_a_tenth_is_begun(left_s: float, begun: list[float]) -> None:
    scene = Scene(ends_at_s=1000.0 + left_s)
    commands = scene.feed(NodeJoined())
    assert [command.duration_s for command in commands if isinstance(command, Submit)] == [0.0, *begun]


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


def test_a_state_is_noted_when_it_changes_and_only_then() -> None:
    scene = Scene()
    scene.feed(NodeJoined())
    assert len(notes(scene.feed(scene.report()), "state")) == 1
    assert notes(scene.feed(scene.report(reason="other words")), "state") == []
    assert notes(scene.feed(scene.report(state=WorkerState.BACKOFF, reason="size 4096")), "state") == [
        {"from_state": "RUNNING", "to_state": "BACKOFF", "cause": "size 4096", "incarnation": 0}
    ]


def test_a_slot_survives_pickling() -> None:
    scene = Scene()
    scene.work(steps_ok=3, resume={"failures": 2})
    scene.die()
    assert pickle.loads(pickle.dumps(scene.slot)) == scene.slot  # noqa: S301 - our own bytes
