"""The lifecycle under any order of events: what a fleet and a clock may do to a slot, and what must hold all the same.

The machine keeps its own books from the commands alone, as a fleet would: what is under way, what was lost, what was
counted. The slot's own books must agree.
"""

from __future__ import annotations

import pickle
from dataclasses import fields

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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

FINAL = {Phase.QUARANTINED, Phase.STOPPED}

#: What a report adds to; the rest of the counters is the head's own.
SUMMED = (
    "steps_ok",
    "steps_oom",
    "steps_error",
    "oom_count",
    "emergency_count",
    "verify_checks",
    "verify_errors",
    "work_flop",
    "busy_s",
)

rules_of_run = st.builds(
    Rules,
    slice_s=st.sampled_from([0.5, 1.0, 4.0]),
    hang_timeout_s=st.sampled_from([15.0, 60.0]),
    stale_after_s=st.sampled_from([5.0, 10.0]),
    start_timeout_s=st.sampled_from([2.0, 120.0]),
    restart_backoff_s=st.sampled_from([0.5, 1.0]),
    restart_backoff_max_s=st.sampled_from([1.0, 60.0, 600.0]),
    max_deaths=st.integers(1, 5),
    death_window_s=st.sampled_from([10.0, 300.0]),
    max_workload_errors=st.integers(1, 4),
)
# Whole numbers, in floats too, so that the sums are exact in any order.
sums = st.fixed_dictionaries(
    {name: st.integers(0, 1000) for name in SUMMED[:-2]}
    | {name: st.integers(0, 2**20).map(float) for name in SUMMED[-2:]}
)
durations_s = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 11.0, 61.0, 125.0, 1000.0, 100_000.0])
resumes = st.none() | st.fixed_dictionaries({"failures": st.integers(0, 9)})
working_states = st.sampled_from([WorkerState.RUNNING, WorkerState.BACKOFF, WorkerState.EMERGENCY])


class LifecycleMachine(RuleBasedStateMachine):
    """Plays cluster, clock and user."""

    @initialize(run_rules=rules_of_run)
    def start(self, run_rules: Rules) -> None:
        self.run_rules = run_rules
        self.now_s = 1000.0
        self.ends_at_s: float | None = None
        self.slot = Slot(slot="pc1/0")
        self.node_is_there = False
        self.placed = self.abandoned = self.drained = self.run_ended = False
        self.under_way: dict[int, Submit] = {}
        self.submitted: list[Submit] = []
        self.accepted_count = self.lost_count = self.cancelled_count = 0
        self.expected: dict[str, int | float] = dict.fromkeys(SUMMED, 0)
        self.last_resume: object = None
        self.history: list[Slot] = [self.slot]

    # What may happen

    @rule()
    def node_joins(self) -> None:
        self.node_is_there = True
        self.feed(NodeJoined())

    @rule()
    def node_leaves(self) -> None:
        self.node_is_there = False
        self.feed(NodeLeft())

    @rule(seconds=durations_s)
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(seconds=durations_s)
    def clock_ticks(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick())

    @precondition(lambda self: self.ends_at_s is None)
    @rule(duration_s=st.sampled_from([0.0, 1.05, 30.0, 3600.0]))
    def run_begins_to_count(self, duration_s: float) -> None:
        self.ends_at_s = self.now_s + duration_s

    @precondition(lambda self: self.under_way)
    @rule(
        data=st.data(),
        counts=sums,
        resume=resumes,
        state=working_states,
        verdict=st.sampled_from([Verdict.OK] * 6 + [Verdict.POISONED]),
        error=st.sampled_from([None, None, None, "Traceback …"]),
    )
    def slice_is_reported(
        self,
        data: st.DataObject,
        counts: dict[str, int | float],
        resume: dict[str, int] | None,
        state: WorkerState,
        verdict: Verdict,
        error: str | None,
    ) -> None:
        """Report any slice under way; it must count."""
        submit = data.draw(st.sampled_from(list(self.under_way.values())))
        event = report_of(submit, counts, resume=resume, state=state, verdict=verdict, error=error)
        del self.under_way[submit.sequence]
        self.accepted_count += 1
        for name, count in counts.items():
            self.expected[name] += count
        self.last_resume = resume if resume is not None else self.last_resume
        assert refusals(self.feed(event)) == 0
        assert self.slot.report is event.report
        assert self.slot.heard_at_s == self.now_s

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), counts=sums)
    def report_is_late_or_twice(self, data: st.DataObject, counts: dict[str, int | float]) -> None:
        """Report a slice that was begun once and is not under way any more; it must not count."""
        over = [submit for submit in self.submitted if submit.sequence not in self.under_way]
        if over:
            self.refused(report_of(data.draw(st.sampled_from(over)), counts))

    @rule(
        counts=sums,
        slot=st.sampled_from(["pc1/0", "pc1/1", "pc2/0"]),
        incarnation=st.integers(-1, 6),
        sequence=st.integers(-1, 30),
    )
    def report_is_foreign(self, counts: dict[str, int | float], slot: str, incarnation: int, sequence: int) -> None:
        """Report what is not one of ours under way, such as another slot's slice or another process's."""
        mine = self.under_way.get(sequence)
        if slot == "pc1/0" and mine is not None and mine.incarnation == incarnation:
            return
        submit = Submit(incarnation=incarnation, sequence=sequence, duration_s=1.0, resume=None)
        self.refused(report_of(submit, counts, slot=slot))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), failure=st.sampled_from(list(SliceFailure)))
    def slice_fails(self, data: st.DataObject, failure: SliceFailure) -> None:
        if failure is SliceFailure.UNBUILDABLE and not self.accepted_count:
            return  # see run_can_never_work
        submit = data.draw(st.sampled_from(list(self.under_way.values())))
        self.feed(failure_of(submit, failure))
        assert not self.under_way, "a slot that lost its process gave up what was under way"

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), failure=st.sampled_from(list(SliceFailure)))
    def failure_is_late_or_twice(self, data: st.DataObject, failure: SliceFailure) -> None:
        over = [submit for submit in self.submitted if submit.sequence not in self.under_way]
        if over:
            before = self.slot
            assert self.feed(failure_of(data.draw(st.sampled_from(over)), failure)) == ()
            assert self.slot == before

    @precondition(lambda self: self.under_way)
    @precondition(lambda self: not self.accepted_count)
    @rule(data=st.data(), how=st.sampled_from(["misfit", "unbuildable"]))
    def run_can_never_work(self, data: st.DataObject, how: str) -> None:
        submit = data.draw(st.sampled_from(list(self.under_way.values())))
        before = self.slot
        event: Event = failure_of(submit, SliceFailure.UNBUILDABLE)
        if how == "misfit":
            event = report_of(submit, {}, verdict=Verdict.MISFIT)
        _, commands = advance(before, event, self.now_s, self.run_rules, self.ends_at_s)
        # Once the run counts, one slot's misfit no longer ends it for the others.
        expected = EndRun if self.ends_at_s is None else Abandon
        assert [type(command) for command in commands if not isinstance(command, Note)] == [expected]
        # What the slot would be now does not matter: the machine goes on as if it had not been.

    @precondition(lambda self: len(self.history) > 20)
    @rule()
    def run_drains(self) -> None:
        self.drained = True
        # What is queued has not begun: it is taken back, not lost, even where nobody knows whether the first runs.
        for sequence in list(self.under_way)[1:] if not self.slot.proven else []:
            del self.under_way[sequence]
            self.cancelled_count += 1
        self.feed(Drain())

    # The books

    def feed(self, event: Event) -> tuple[Command, ...]:
        before = self.slot
        self.slot, commands = advance(before, event, self.now_s, self.run_rules, self.ends_at_s)
        for command in commands:
            self.perform(command)
        self.history.append(self.slot)
        same = advance(before, event, self.now_s, self.run_rules, self.ends_at_s)
        assert same == (self.slot, commands), "the same event at the same time gives the same result"
        return commands

    def refused(self, event: SliceReported) -> None:
        before = self.slot
        commands = self.feed(event)
        assert refusals(commands) == len(commands) == 1
        assert self.slot == before

    def perform(self, command: Command) -> None:
        """Do what a fleet would, and refuse what it could not do."""
        match command:
            case Place():
                assert not self.placed, "an actor is created once"
                assert self.node_is_there
                self.placed = True
            case Submit():
                self.check_submit(command)
                self.under_way[command.sequence] = command
                self.submitted.append(command)
            case Forget():
                self.lost_count += len(self.under_way)
                self.under_way.clear()
            case Cancel(sequence=sequence):
                assert self.drained
                del self.under_way[sequence]
                self.cancelled_count += 1
            case Restart():
                assert self.placed
                assert not self.under_way, "no slice is sent to a process that is to be ended"
            case Abandon():
                assert self.placed
                assert not self.abandoned, "an actor is ended once"
                self.abandoned = True
                self.lost_count += len(self.under_way)
                self.under_way.clear()
            case EndRun():
                raise AssertionError("nothing here makes a run impossible")
            case Note(name=name):
                assert name in {"state", "report_refused"}

    def check_submit(self, submit: Submit) -> None:
        assert self.placed
        assert not self.abandoned
        assert not self.drained, "after Drain nothing is submitted"
        assert self.node_is_there
        assert submit.sequence == len(self.submitted), "sequences are counted without a gap"
        assert submit.incarnation == self.slot.incarnation
        assert submit.resume == self.last_resume
        is_proof = not any(other.incarnation == submit.incarnation for other in self.submitted)
        if is_proof:
            assert submit.duration_s == 0.0
            return
        assert self.run_rules.slice_s / 10 <= submit.duration_s <= self.run_rules.slice_s
        if self.ends_at_s is not None:
            busy_s = sum(other.duration_s for other in self.under_way.values())
            assert self.now_s + busy_s + submit.duration_s <= self.ends_at_s + 1e-6

    # What must hold

    @invariant()
    def counters_are_the_sum_of_the_accepted_reports_exactly(self) -> None:
        assert {name: getattr(self.slot.counters, name) for name in SUMMED} == self.expected
        assert self.slot.counters.slices_lost == self.lost_count

    @invariant()
    def counters_never_go_backwards(self) -> None:
        for before, after in zip(self.history[-2:], self.history[-1:], strict=False):
            for field in fields(Counters):
                assert getattr(after.counters, field.name) >= getattr(before.counters, field.name), field.name

    @invariant()
    def every_slice_is_counted_lost_cancelled_or_under_way(self) -> None:
        assert len(self.submitted) == self.slot.next_sequence
        accounted = self.accepted_count + self.lost_count + self.cancelled_count + len(self.slot.in_flight)
        assert accounted == self.slot.next_sequence

    @invariant()
    def what_is_in_flight_is_what_the_fleet_has_and_never_more_than_two(self) -> None:
        assert [flight.sequence for flight in self.slot.in_flight] == list(self.under_way)
        assert len(self.slot.in_flight) <= 2
        for flight in self.slot.in_flight:
            assert self.under_way[flight.sequence].incarnation == self.slot.incarnation

    @invariant()
    def every_slot_that_is_not_final_has_a_flight_a_timer_or_waits_for_its_node(self) -> None:
        slot = self.slot
        match slot.phase:
            case Phase.ABSENT:
                assert not self.node_is_there
                assert (slot.in_flight, slot.wake_at_s) == ((), None)
            case Phase.PAUSING:
                assert slot.wake_at_s is not None
                assert slot.wake_at_s <= self.now_s + max(self.run_rules.restart_backoff_max_s, 0.5)
                assert slot.in_flight == ()
            case Phase.WORKING:
                assert slot.wake_at_s is None
                assert slot.in_flight or self.at_its_end(slot)
            case Phase.QUARANTINED | Phase.STOPPED:
                assert (slot.in_flight, slot.wake_at_s) == ((), None)

    @invariant()
    def the_words_fit_the_phase(self) -> None:
        slot = self.slot
        assert slot.reason
        assert (slot.phase is Phase.QUARANTINED) == (slot.state is WorkerState.QUARANTINED)
        if slot.phase is Phase.ABSENT:
            assert slot.state is (WorkerState.LOST if slot.placed else WorkerState.STARTING)

    @invariant()
    def quarantined_and_stopped_are_final(self) -> None:
        before, after = self.history[-2:] if len(self.history) > 1 else self.history * 2
        if before.phase in FINAL:
            assert after == before

    @invariant()
    def incarnations_and_sequences_only_grow(self) -> None:
        before, after = self.history[-2:] if len(self.history) > 1 else self.history * 2
        assert after.incarnation in {before.incarnation, before.incarnation + 1}
        assert after.next_sequence >= before.next_sequence

    @invariant()
    def deaths_and_errors_below_their_limits(self) -> None:
        if self.slot.phase is not Phase.QUARANTINED:
            assert len(self.slot.deaths_at_s) < self.run_rules.max_deaths
            assert self.slot.errors_in_a_row < self.run_rules.max_workload_errors
        assert list(self.slot.deaths_at_s) == sorted(self.slot.deaths_at_s)

    @invariant()
    def time_alone_leads_to_another_try_or_to_the_end(self) -> None:
        """Nothing is stuck: with nothing but ticks a slot whose node is there sends a slice, or is given up."""
        if self.slot.phase not in {Phase.WORKING, Phase.PAUSING} or self.at_its_end(self.slot):
            return
        slot, now_s = self.slot, self.now_s
        for _ in range(3):
            now_s += self.longest_wait_s
            slot, commands = advance(slot, Tick(), now_s, self.run_rules, self.ends_at_s)
            if slot.phase in FINAL or any(isinstance(command, Submit) for command in commands):
                return
        raise AssertionError(f"stuck in {slot}")

    @invariant()
    def a_slot_that_never_answers_again_ends(self) -> None:
        if self.slot.phase not in {Phase.WORKING, Phase.PAUSING} or self.at_its_end(self.slot):
            return
        slot, now_s = self.slot, self.now_s
        # Each try costs one tick to be given up and one to be begun again; a working process may have one of before.
        for _ in range(2 * self.run_rules.max_deaths + 2):
            now_s += self.longest_wait_s
            slot, _ = advance(slot, Tick(), now_s, self.run_rules, self.ends_at_s)
        assert slot.phase in FINAL

    @invariant()
    def a_slot_survives_pickling(self) -> None:
        assert pickle.loads(pickle.dumps(self.slot)) == self.slot  # noqa: S301 - our own bytes

    @property
    def longest_wait_s(self) -> float:
        numbers = self.run_rules
        slowest_s = max(numbers.hang_timeout_s, numbers.start_timeout_s) + numbers.slice_s
        return max(slowest_s, numbers.restart_backoff_max_s) + 1.0

    def at_its_end(self, slot: Slot) -> bool:
        """Whether nothing more fits into the run, so that the slot waits for Drain, which the end of a run brings."""
        left_s = self.ends_at_s - self.now_s if self.ends_at_s is not None else float("inf")
        return slot.phase is Phase.WORKING and not slot.in_flight and left_s < self.run_rules.slice_s / 10


def report_of(
    submit: Submit, counts: dict[str, int | float], *, slot: str = "pc1/0", **changes: object
) -> SliceReported:
    usual: dict[str, object] = {"state": WorkerState.RUNNING, "verdict": Verdict.OK}
    return SliceReported(
        report=Report(
            slot=slot,
            incarnation=submit.incarnation,
            sequence=submit.sequence,
            reason="steady",
            device=None,
            memory=None,
            size=8192,
            batch=128,
            claim_bytes=1,
            **{**usual, **counts, **changes},
        )
    )


def failure_of(submit: Submit, failure: SliceFailure) -> SliceFailed:
    return SliceFailed(incarnation=submit.incarnation, sequence=submit.sequence, failure=failure, text="gone")


def refusals(commands: tuple[Command, ...]) -> int:
    return sum(isinstance(command, Note) and command.name == "report_refused" for command in commands)


LifecycleMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLifecycleMachine = LifecycleMachine.TestCase
