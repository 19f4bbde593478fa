"""The lifecycle under any order of events: what a cluster, a clock and a user may do to a slot, and what must hold.

Reports come late, twice, in the wrong order, from another process and for another slot. `Books` says
of each slice whether it is under way, was counted or was lost, and how many steps it really did, those
included whose report never came or came too late; the slot's own must agree with them. Trainings that
save before they rest are for `test_user_commands.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from enum import Enum
from typing import Any, TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core.fleet import SliceFailed, SliceFailure, SliceReported
from orchestrator.core.lifecycle import advance
from orchestrator.core.slice_results import without_progress
from orchestrator.core.slot import (
    Abandon,
    CardQuarantined,
    Close,
    Command,
    Drain,
    EndRun,
    Event,
    Forget,
    Held,
    Hold,
    Moment,
    NodeJoined,
    NodeLeft,
    Note,
    Phase,
    Place,
    Reinstated,
    Restart,
    Rules,
    Slot,
    Tick,
    Unheld,
)
from tests.factories import report_of
from workers.messages import NO_COUNTS, Directive, Verdict, WorkerState

FINAL = {Phase.QUARANTINED, Phase.STOPPED, Phase.DONE}

#: What a report adds to; the other counters are the head's own.
SUMMED = tuple(asdict(NO_COUNTS))

#: A slice: its incarnation and its sequence.
Name: TypeAlias = tuple[int, int]


class FaultOutcome(Enum):
    """What became of a slice. It is in one of these at any time, and leaves only the first."""

    UNDER_WAY = "under way"
    COUNTED = "counted"
    LOST = "lost"
    UNSENT = "unsent"


class Books(RuleBasedStateMachine):
    """Feeds events to a slot, performs what it commands, and writes both down."""

    def moment(self, now_s: float | None = None) -> Moment:
        """Return now, or another time of this run."""
        at_s = self.now_s if now_s is None else now_s
        return Moment(now_s=at_s, rules=self.run_rules, ends_at_s=self.ends_at_s)

    def open(self, run_rules: Rules, earlier_incarnations: int) -> None:
        """Begin a run, perhaps one that another head began."""
        self.run_rules = run_rules
        self.now_s = 1000.0
        self.ends_at_s: float | None = None
        # A run that another head began: its last incarnation is gone.
        self.slot = Slot(
            slot="pc1/0", incarnation=earlier_incarnations, next_sequence=10 * earlier_incarnations
        )
        self.first_sequence = self.slot.next_sequence
        self.node_is_there = self.placed = self.abandoned = self.drained = False
        self.submitted: dict[Name, Directive] = {}
        self.fates: dict[Name, FaultOutcome] = {}
        self.really_done: Counter[Name] = Counter()
        """Good steps of each slice, told of or not."""
        self.reported: set[Name] = set()
        """Slices that are over: their process has made its report, whether it arrived or not."""
        self.expected: dict[str, int | float] = dict.fromkeys(SUMMED, 0)
        self.expected_lost = 0
        self.last_resume: object = None
        self.history: list[Slot] = [self.slot]

    @property
    def under_way(self) -> list[Name]:
        return [name for name, fate in self.fates.items() if fate is FaultOutcome.UNDER_WAY]

    def do_steps(self, name: Name, share: float) -> None:
        """Let a process do this share of the good steps that the slice may still do."""
        if self.fates[name] is FaultOutcome.UNSENT:
            return
        left = self.submitted[name].step_limit - self.really_done[name]
        self.really_done[name] += round(share * left)

    def accepted(self, name: Name, counts: dict[str, int | float], **changes: Any) -> None:
        # No more time than may have passed since the slice was sent: the head believes no more.
        seconds = {key: min(counts[key], 0.5) for key in ("busy_s", "wall_s")}
        event = reported(
            "pc1/0", name, counts | seconds | {"steps_ok": self.really_done[name]}, **changes
        )
        self.fates[name] = FaultOutcome.COUNTED
        self.reported.add(name)
        for counter in SUMMED:
            self.expected[counter] += getattr(event.report.counts, counter)
        self.last_resume = event.report.resume or self.last_resume
        self.feed(event)
        assert self.slot.report is event.report
        assert self.slot.heard_at_s == self.now_s

    def feed(self, event: Event) -> tuple[Command, ...]:
        before = self.slot
        self.slot, commands = advance(before, event, self.moment())
        for command in commands:
            self.perform(command)
        self.history.append(self.slot)
        same = advance(before, event, self.moment())
        assert same == (self.slot, commands), (
            "the same event at the same time gives the same result"
        )
        return commands

    def refused(self, event: SliceReported) -> None:
        before = self.slot
        (command,) = self.feed(event)
        assert isinstance(command, Note)
        assert command.name == "report_refused"
        assert self.slot == before

    def perform(self, command: Command) -> None:
        """Do what a fleet would, and refuse what it could not do."""
        match command:
            case Place():
                assert not self.placed, "an actor is created once, and again after it was ended"
                assert self.node_is_there
                self.placed = True
                self.abandoned = False
            case Directive():
                self.check_submit(command)
                name = (command.incarnation, command.sequence)
                self.submitted[name] = command
                self.fates[name] = FaultOutcome.UNDER_WAY
            case Forget():
                self.lose()
            case Restart():
                assert self.placed
                assert not self.under_way, "no slice is sent to a process that is to be ended"
            case Abandon():
                assert not self.abandoned, "an actor is ended once"
                self.abandoned = True
                self.placed = False
                self.lose()
            case EndRun():
                raise AssertionError("nothing here makes a run impossible")
            case Note(name=name_of_note):
                assert name_of_note in {"state", "report_refused"}

    def lose(self) -> None:
        for name in self.under_way:
            self.fates[name] = FaultOutcome.LOST
            self.expected_lost += self.submitted[name].step_limit or 0

    def check_submit(self, submit: Directive) -> None:
        assert self.placed
        assert not self.abandoned
        assert self.node_is_there
        assert not self.drained, "after Drain nothing is begun"
        assert self.slot.orders.hold is None, "what is held gets no work"
        assert submit.sequence == self.first_sequence + len(self.submitted), (
            "sequences are counted without a gap"
        )
        assert submit.incarnation == self.slot.incarnation
        assert submit.resume == self.last_resume
        assert submit.step_limit is not None
        assert submit.step_limit >= 1
        mine = [name for name in self.submitted if name[0] == submit.incarnation]
        if not any(self.fates[name] is FaultOutcome.COUNTED for name in mine):
            assert submit.duration_s == 0.0
            assert submit.step_limit == 1, "the first slice of a process is one step"
            assert not self.under_way, "nothing more is sent before its report"
            return
        assert self.run_rules.slice_s / 10 <= submit.duration_s <= self.run_rules.slice_s
        if self.ends_at_s is not None:
            busy_s = sum(self.submitted[name].duration_s for name in self.under_way)
            assert self.now_s + busy_s + submit.duration_s <= self.ends_at_s + 1e-6


def reported(
    slot: str, name: Name, counts: dict[str, int | float], **changes: Any
) -> SliceReported:
    return SliceReported(report=report_of(slot, *name, **{**counts, **changes}))


def failed(name: Name, failure: SliceFailure) -> SliceFailed:
    return SliceFailed(
        slot="pc1/0", incarnation=name[0], sequence=name[1], failure=failure, text="gone"
    )


rules_of_run = st.builds(
    Rules,
    slice_s=st.sampled_from([0.5, 1.0, 4.0]),
    hang_timeout_s=st.sampled_from([15.0, 60.0]),
    stale_after_s=st.sampled_from([5.0, 10.0]),
    start_timeout_s=st.sampled_from([2.0, 120.0]),
    slow_step_s=st.sampled_from([0.0, 30.0, 600.0]),
    restart_backoff_s=st.sampled_from([0.5, 1.0]),
    restart_backoff_max_s=st.sampled_from([1.0, 60.0, 600.0]),
    max_deaths=st.sampled_from([1, 3, 5, 8]),
    death_window_s=st.sampled_from([10.0, 300.0]),
    max_workload_errors=st.integers(1, 4),
    seed=st.integers(0, 3),
)
# Whole numbers, in floats too, so that the sums are exact in any order.
sums = st.fixed_dictionaries(
    {name: st.integers(0, 1000) for name in SUMMED[1:-2]}
    | {name: st.integers(0, 2**20).map(float) for name in SUMMED[-2:]}
    | {"wall_s": st.sampled_from([0.0, 0.01, 1.0, 7.0])}
)
durations_s = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 11.0, 61.0, 125.0, 1000.0, 100_000.0])
#: Nothing here makes the run impossible, as a process that cannot be built would.
failures = st.sampled_from([each for each in SliceFailure if each is not SliceFailure.UNBUILDABLE])
#: For what ends a slot, or makes it wait: once in a while, or the machine would do little else.
seldom = st.sampled_from([False] * 7 + [True])


class LifecycleMachine(Books):
    """Plays cluster, clock and user."""

    @initialize(run_rules=rules_of_run, earlier_incarnations=st.integers(0, 3), waits=seldom)
    def start(self, run_rules: Rules, earlier_incarnations: int, waits: bool) -> None:
        self.open(run_rules, earlier_incarnations)
        if not waits:
            self.node_joins()

    # What a cluster may do

    @precondition(lambda self: not self.node_is_there)
    @rule()
    def node_joins(self) -> None:
        before = self.slot
        self.node_is_there = True
        self.feed(NodeJoined())
        if before.phase not in FINAL and before.orders.hold is None:
            assert self.slot.incarnation == before.incarnation + before.placed, (
                "its actor starts again"
            )

    @precondition(lambda self: self.node_is_there)
    @rule(stays_away=seldom)
    def node_leaves(self, stays_away: bool) -> None:
        """Leave; mostly the node is back at once, as another raylet."""
        self.node_is_there = False
        self.feed(NodeLeft(reason="its node has left the cluster"))
        if not stays_away:
            self.node_joins()

    @precondition(
        lambda self: len(self.history) > 10 and self.slot.phase in {Phase.WORKING, Phase.PAUSING}
    )
    @rule(sick=seldom)
    def card_may_be_quarantined(self, sick: bool) -> None:
        if sick:
            self.feed(CardQuarantined(reason="pc1's card: all 2 workers keep dying"))
            assert self.slot.phase is Phase.QUARANTINED
            assert self.slot.reason == "pc1's card: all 2 workers keep dying"

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), share=st.floats(0, 1))
    def a_process_works(self, data: st.DataObject, share: float) -> None:
        """Let any slice go on, one that was given up too: it cannot be taken back from a process that lives."""
        going_on = [name for name in self.submitted if name not in self.reported]
        if going_on:
            self.do_steps(data.draw(st.sampled_from(going_on)), share)

    @precondition(lambda self: self.under_way)
    @rule(
        data=st.data(),
        counts=sums,
        share=st.floats(0, 1),
        resume=st.none() | st.fixed_dictionaries({"failures": st.integers(1, 9)}),
        state=st.sampled_from([WorkerState.RUNNING, WorkerState.BACKOFF, WorkerState.EMERGENCY]),
        verdict=st.sampled_from([Verdict.OK] * 5 + [Verdict.CONTEXT_CORRUPTED]),
        error=st.sampled_from([None] * 5 + ["Traceback …"]),
    )
    def slice_is_reported(
        self, data: st.DataObject, counts: dict[str, int | float], share: float, **told: Any
    ) -> None:
        """Report any slice under way, the queued one before the running one too; it must count."""
        name = data.draw(st.sampled_from(self.under_way))
        self.do_steps(name, share)
        self.accepted(name, counts, **told)

    @rule(data=st.data(), counts=sums, share=st.floats(0, 1))
    def report_is_late_twice_or_foreign(
        self, data: st.DataObject, counts: dict[str, int | float], share: float
    ) -> None:
        """Report a slice that is not under way any more, was never sent, or is another slot's; it must not count."""
        over = [name for name in self.submitted if name not in self.under_way]
        next_one = (self.slot.incarnation, self.slot.next_sequence)
        name = data.draw(st.sampled_from([*over, next_one, (next_one[0] + 1, next_one[1])]))
        if name in self.submitted and name not in self.reported:
            self.do_steps(name, share)
            self.reported.add(name)
        self.refused(reported("pc1/0", name, {**counts, "steps_ok": self.really_done[name]}))
        for name in self.under_way:
            self.refused(reported("pc1/1", name, counts))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), failure=failures)
    def slice_fails(self, data: st.DataObject, failure: SliceFailure) -> None:
        name = data.draw(st.sampled_from(self.under_way))
        if failure is SliceFailure.UNSENT:
            if self.really_done[name]:
                return  # it did steps, so it was sent
            self.fates[name] = FaultOutcome.UNSENT
        self.feed(failed(name, failure))
        assert not self.under_way, "a slot that lost its process gave up what was under way"

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), failure=failures)
    def failure_is_late_or_twice(self, data: st.DataObject, failure: SliceFailure) -> None:
        over = [name for name in self.submitted if name not in self.under_way]
        if over:
            before = self.slot
            assert self.feed(failed(data.draw(st.sampled_from(over)), failure)) == ()
            assert self.slot == before

    # What the clock and the user may do

    @rule(seconds=durations_s)
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(seconds=durations_s)
    def clock_ticks(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick())

    @precondition(lambda self: self.slot.phase not in FINAL and not self.drained)
    @rule(hold=st.sampled_from(Hold), now=seldom)
    def user_may_hold(self, hold: Hold, now: bool) -> None:
        if now:
            before = self.slot
            self.feed(Held(hold=hold))
            assert self.slot.in_flight == before.in_flight, "what was sent runs to its end"
            if before.phase is not Phase.ABSENT and not before.in_flight:
                assert self.slot.phase is Phase.HELD

    @precondition(
        lambda self: (
            self.slot.orders.hold is not None and self.slot.phase not in FINAL and not self.drained
        )
    )
    @rule()
    def user_lets_go(self) -> None:
        before = self.slot
        self.feed(Unheld())
        assert self.slot.phase is (Phase.ABSENT if before.phase is Phase.ABSENT else Phase.WORKING)

    @precondition(lambda self: self.slot.phase is Phase.QUARANTINED and not self.drained)
    @rule()
    def user_reinstates(self) -> None:
        self.feed(Reinstated(node_is_there=self.node_is_there))
        assert self.slot.phase is (Phase.WORKING if self.node_is_there else Phase.ABSENT)
        assert (self.slot.deaths_at_s, self.slot.errors_in_a_row) == ((), 0)
        self.history = [self.slot]

    @precondition(lambda self: self.ends_at_s is None)
    @rule(duration_s=st.sampled_from([0.0, 1.05, 30.0, 3600.0]))
    def run_begins_to_count(self, duration_s: float) -> None:
        self.ends_at_s = self.now_s + duration_s

    @precondition(lambda self: len(self.history) > 20)
    @rule(now=seldom)
    def run_may_drain(self, now: bool) -> None:
        if now:
            before = self.slot
            self.drained = True
            self.feed(Drain())
            # Only a process that has reported is known to run what was sent to it.
            is_awaited = before.ready and (before.in_flight or self.slot.in_flight)
            if before.phase not in FINAL and not is_awaited:
                assert self.slot.phase is Phase.STOPPED

    @precondition(lambda self: len(self.history) > 20)
    @rule(now=seldom)
    def run_may_close(self, now: bool) -> None:
        """Close, drained or not: an error may end a run at any point."""
        if not now:
            return
        self.drained = True
        self.feed(Close())
        assert self.slot.phase in FINAL

    # What must hold

    @invariant()
    def counters_are_the_sum_of_the_accepted_reports_and_the_bounds_of_the_lost_slices_exactly(
        self,
    ) -> None:
        assert asdict(self.slot.counts) == self.expected
        assert self.slot.steps_lost_upper_bound == self.expected_lost

    @invariant()
    def no_step_that_was_really_done_is_beyond_what_was_counted_lost_or_is_under_way(self) -> None:
        known = self.slot.counts.steps_ok + self.slot.steps_lost_upper_bound
        over = sum(
            done
            for name, done in self.really_done.items()
            if self.fates[name] is not FaultOutcome.UNDER_WAY
        )
        assert known >= over
        at_risk = sum(flight.step_limit for flight in self.slot.in_flight)
        assert known + at_risk >= self.really_done.total()

    @invariant()
    def every_slice_is_counted_lost_or_under_way(self) -> None:
        assert len(self.submitted) == self.slot.next_sequence - self.first_sequence
        assert [
            (self.slot.incarnation, flight.sequence) for flight in self.slot.in_flight
        ] == self.under_way
        assert [flight.step_limit for flight in self.slot.in_flight] == [
            self.submitted[name].step_limit for name in self.under_way
        ]
        assert len(self.slot.in_flight) <= (2 if self.slot.ready else 1)

    @invariant()
    def every_slot_that_is_not_final_has_a_flight_a_timer_or_waits_for_its_node(self) -> None:
        slot = self.slot
        if slot.draining:
            assert slot.phase in {Phase.WORKING, *FINAL}, (
                "a slot whose run is ending waits for nothing new"
            )
        match slot.phase:
            case Phase.ABSENT:
                assert not self.node_is_there
                assert (slot.in_flight, slot.wake_at_s) == ((), None)
            case Phase.HELD:
                assert self.node_is_there
                assert (slot.in_flight, slot.wake_at_s) == ((), None)
                assert self.placed or not slot.ready
                assert self.placed == slot.placed
                assert slot.orders.hold is Hold.PAUSE or (
                    slot.orders.hold is Hold.DRAIN and not self.placed
                )
            case Phase.PAUSING:
                assert slot.orders.hold is None
                assert slot.wake_at_s is not None
                assert slot.wake_at_s <= self.now_s + max(self.run_rules.restart_backoff_max_s, 0.5)
                assert slot.in_flight == ()
            case Phase.WORKING:
                assert slot.wake_at_s is None
                assert slot.ready or slot.heard_at_s is None, "this process has not reported"
                assert slot.in_flight or self.at_its_end(slot)
            case Phase.QUARANTINED | Phase.STOPPED:
                assert (slot.in_flight, slot.wake_at_s) == ((), None)

    @invariant()
    def quarantined_and_stopped_are_final(self) -> None:
        before, after = self.history[-2:] if len(self.history) > 1 else self.history * 2
        if before.phase in FINAL:
            assert replace(after, orders=before.orders) == before

    @invariant()
    def deaths_and_errors_are_below_their_limits(self) -> None:
        if self.slot.phase is not Phase.QUARANTINED:
            assert len(without_progress(self.slot)) < self.run_rules.max_deaths
            assert self.slot.errors_in_a_row < self.run_rules.max_workload_errors
        assert list(self.slot.deaths_at_s) == sorted(self.slot.deaths_at_s)

    @invariant()
    def with_a_cluster_that_helps_a_slot_soon_runs_or_rests_for_a_reason(self) -> None:
        """No slot is stuck: at most a timer, a first slice, and a slice that was running all along stand in the way."""
        slot, now_s = self.slot, self.now_s
        for _ in range(5):
            if slot.phase in {Phase.ABSENT, Phase.HELD, *FINAL} or self.at_its_end(slot):
                return
            if slot.ready and slot.state is WorkerState.RUNNING and not slot.draining:
                return
            event: Event = Tick()
            if slot.phase is Phase.PAUSING:
                assert slot.wake_at_s is not None
                now_s = max(now_s, slot.wake_at_s)
            else:
                event = reported(
                    "pc1/0", (slot.incarnation, slot.in_flight[0].sequence), {"steps_ok": 1}
                )
            slot, _ = advance(slot, event, self.moment(now_s))
        raise AssertionError(f"stuck in {slot}")

    @invariant()
    def with_a_cluster_that_is_silent_a_slot_tries_again_and_in_the_end_gives_up(self) -> None:
        if self.slot.phase not in {Phase.WORKING, Phase.PAUSING} or self.at_its_end(self.slot):
            return
        if self.slot.orders.hold is not None:
            return
        slot, now_s, tries = self.slot, self.now_s, 0
        # Each try costs one tick to be given up and one to be begun again; a working process may
        # have one of before.
        for ticks in range(2 * self.run_rules.max_deaths + 2):
            now_s += self.longest_wait_s
            slot, commands = advance(slot, Tick(), self.moment(now_s))
            tries += sum(isinstance(command, Directive) for command in commands)
            assert tries or slot.phase in FINAL or ticks < 2
        assert slot.phase in FINAL

    @property
    def longest_wait_s(self) -> float:
        numbers = self.run_rules
        slowest_s = (
            max(numbers.hang_timeout_s, numbers.start_timeout_s, numbers.slow_step_s)
            + numbers.slice_s
        )
        return max(slowest_s, numbers.restart_backoff_max_s) + 1.0

    def at_its_end(self, slot: Slot) -> bool:
        """Whether nothing more fits into the run, so that the slot waits for Drain, which the end of a run brings."""
        left_s = self.ends_at_s - self.now_s if self.ends_at_s is not None else float("inf")
        return (
            slot.phase is Phase.WORKING
            and not slot.in_flight
            and left_s < self.run_rules.slice_s / 10
        )


LifecycleMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestLifecycleMachine = LifecycleMachine.TestCase
