"""The invariants of the lifecycle under any order of events of a cluster, a clock and a user.

`Cluster` follows orders as an actor and its processes do: polls are lost, arrive late, or find
another process of the actor. Its count of the steps really done must agree with the slot's, except
for steps of a killed process since its last status. `test_user_commands.py` tests trainings that
save before they rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.config.schema import RunConfig
from orchestrator.core.fleet import ActorUnreachable, StatusReceived
from orchestrator.core.lifecycle import advance, orders_of
from orchestrator.core.processes import without_progress
from orchestrator.core.slot import (
    Abandon,
    CardQuarantined,
    Close,
    Command,
    Drain,
    EndRun,
    Event,
    Held,
    Hold,
    Moment,
    NodeJoined,
    NodeLeft,
    Note,
    Phase,
    Place,
    Reinstated,
    Slot,
    Tick,
    Unheld,
)
from tests.factories import status_of
from workers.messages import Begin, Cause, Ending, Orders, Quiet, Status, Verdict, WorkerState
from workers.settings import PolicyState

FINAL = {Phase.QUARANTINED, Phase.STOPPED, Phase.DONE}


@dataclass
class Process:
    """A program that an actor has started."""

    incarnation: int
    done: int = 0
    told: int = 0
    """Steps in the last status that arrived."""
    verdict: Verdict = Verdict.OK
    errors: int = 0
    holds: bool = False
    alive: bool = True


class Cluster:
    """One actor, which may end with its node, and its program."""

    def __init__(self) -> None:
        self.actors = 0
        self.process: Process | None = None
        self.last: Process | None = None
        """The last program."""
        self.started: list[int] = []
        """The incarnations of this run in the order of their starts."""
        self.really_done = 0
        self.unseen = 0
        """Upper bound of the steps of ended processes that no received status has reported."""

    @property
    def name(self) -> str:
        return f"actor {self.actors}"

    def new_actor(self) -> None:
        """Replace the actor's process, or the actor."""
        self.actors += 1
        self.end()
        self.last = None

    def end(self) -> None:
        """Kill the program."""
        if self.process is not None:
            self.unseen += self.process.done - self.process.told
            self.process.alive = False
        self.process = None

    def obey(self, orders: Orders) -> None:
        """Follow the orders of a poll as an actor does."""
        if orders.actor != self.name:
            return
        process = self.process
        if process is not None and (not orders.runs or orders.incarnation > process.incarnation):
            self.end()
        known = -1 if self.last is None else self.last.incarnation
        if orders.runs and self.process is None and orders.incarnation > known:
            assert orders.begin is not None, "a process is told how to begin"
            self.process = self.last = Process(orders.incarnation)
            self.started.append(orders.incarnation)
        if self.process is not None:
            self.process.holds = orders.holds

    def work(self, steps: int) -> None:
        if self.process is not None and not self.process.holds:
            self.process.done += steps
            self.really_done += steps

    def status(self, wall_s: float, **changes: Any) -> Status:
        process = self.last
        if process is None:
            return status_of("pc1/0", None, actor=self.name, is_up=False)
        died = Ending(cause=Cause.KILLED, text="killed by signal 9")
        usual: dict[str, Any] = {
            "actor": self.name,
            "steps_ok": process.done,
            "verdict": process.verdict,
            "errors_in_a_row": process.errors,
            "is_held": process.holds,
            "wall_s": wall_s,
            "died": None if process.alive else died,
            "resume": PolicyState(failures=self.really_done),
        }
        return status_of("pc1/0", process.incarnation, **{**usual, **changes})


rules_of_run = st.builds(
    RunConfig,
    hang_timeout_s=st.sampled_from([15.0, 60.0]),
    stale_after_s=st.sampled_from([5.0, 10.0]),
    start_timeout_s=st.sampled_from([2.0, 120.0]),
    restart_backoff_s=st.sampled_from([0.5, 1.0]),
    restart_backoff_max_s=st.sampled_from([1.0, 60.0, 600.0]),
    max_deaths=st.sampled_from([1, 3, 5, 8]),
    death_window_s=st.sampled_from([10.0, 300.0]),
    max_workload_errors=st.integers(1, 4),
)
slow_steps_s = st.sampled_from([0.0, 30.0, 600.0])
durations_s = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 11.0, 61.0, 125.0, 1000.0, 100_000.0])
#: For rules that end a slot or make it wait, which would otherwise fill most runs of the machine.
seldom = st.sampled_from([False] * 7 + [True])


class LifecycleMachine(RuleBasedStateMachine):
    """Plays cluster, clock and user."""

    @initialize(
        run_rules=rules_of_run,
        slow_step_s=slow_steps_s,
        earlier_incarnations=st.integers(0, 3),
        waits=seldom,
    )
    def start(
        self, run_rules: RunConfig, slow_step_s: float, earlier_incarnations: int, waits: bool
    ) -> None:
        self.run_rules, self.slow_step_s = run_rules, slow_step_s
        self.now_s = 1000.0
        self.ends_at_s: float | None = None
        # A run that another head began: its last incarnation has ended.
        self.slot = Slot(slot="pc1/0", incarnation=earlier_incarnations)
        self.cluster = Cluster()
        self.node_is_there = self.placed = self.drained = False
        self.history: list[Slot] = [self.slot]
        if not waits:
            self.node_joins()

    def moment(self, now_s: float | None = None) -> Moment:
        """Return the present moment, or another one of this run."""
        at_s = self.now_s if now_s is None else now_s
        return Moment(
            now_s=at_s,
            run=self.run_rules,
            ends_at_s=self.ends_at_s,
            slow_step_s=self.slow_step_s,
        )

    @property
    def orders(self) -> Orders:
        return orders_of(self.slot, None, Begin(resume=self.slot.resume))

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

    def perform(self, command: Command) -> None:
        """Perform a command as a fleet would, and fail on commands that no fleet can perform."""
        match command:
            case Place():
                assert not self.placed, "an actor is created once, and again after it was ended"
                assert self.node_is_there
                self.placed = True
                self.cluster.new_actor()
            case Abandon():
                assert self.placed, "an actor is ended once"
                self.placed = False
                self.cluster.end()
            case EndRun():
                raise AssertionError("nothing here makes a run impossible")
            case Note(name=name_of_note):
                assert name_of_note == "state"

    def tell(self, status: Status) -> None:
        """Let a status arrive; its steps are then known to the head."""
        before = self.slot
        self.feed(StatusReceived(status=status))
        process = self.cluster.last
        is_counted = before.phase not in {Phase.ABSENT, Phase.QUARANTINED, Phase.DONE}
        is_counted &= before.actor in {None, status.actor}
        is_counted &= before.incarnation == status.incarnation
        if process is not None and is_counted:
            if not process.alive:
                self.cluster.unseen -= max(0, status.counts.steps_ok - process.told)
            process.told = max(process.told, status.counts.steps_ok)

    # What a cluster may do

    @precondition(lambda self: not self.node_is_there)
    @rule()
    def node_joins(self) -> None:
        before = self.slot
        self.node_is_there = True
        if self.placed:
            self.cluster.new_actor()  # Ray starts the actor again with the node
        self.feed(NodeJoined())
        if before.phase not in FINAL and before.orders.hold is None:
            assert self.slot.incarnation == before.incarnation + before.placed

    @precondition(lambda self: self.node_is_there)
    @rule(stays_away=seldom)
    def node_leaves(self, stays_away: bool) -> None:
        """Remove the node; usually it returns at once, as another raylet."""
        self.node_is_there = False
        self.cluster.end()
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

    @rule(steps=st.integers(0, 50))
    def a_process_works(self, steps: int) -> None:
        self.cluster.work(steps)

    @precondition(lambda self: self.placed and self.node_is_there)
    @rule(
        arrives=st.sampled_from([True, True, False]),
        state=st.sampled_from([WorkerState.RUNNING, WorkerState.BACKOFF, WorkerState.EMERGENCY]),
        is_up=st.sampled_from([True] * 5 + [False]),
        quiet_s=st.none() | durations_s,
    )
    def a_poll_comes_to_an_end(
        self, arrives: bool, state: WorkerState, is_up: bool, quiet_s: float | None
    ) -> None:
        """Let the actor follow its orders and answer; the answer may be lost."""
        self.cluster.obey(self.orders)
        if not arrives:
            return
        process = self.cluster.last
        is_up |= process is None or process.told > 0
        quiet = None if quiet_s is None else Quiet(seconds=quiet_s, idle_s=quiet_s / 2)
        wall_s = self.now_s - (self.slot.working_since_s or self.now_s)
        more = {} if process is None else {"state": state, "is_up": is_up, "quiet": quiet}
        if not is_up:
            more |= {"steps_ok": 0, "verdict": Verdict.OK}
        self.tell(self.cluster.status(wall_s, **more))

    @precondition(lambda self: self.cluster.process is not None)
    @rule(how=st.sampled_from(["dies", "actor dies", "corrupted", "errors"]), now=seldom)
    def a_process_fails(self, how: str, now: bool) -> None:
        process = self.cluster.process
        assert process is not None
        if how == "errors":
            process.errors += 1
        elif how == "corrupted" and now:
            process.verdict = Verdict.CONTEXT_CORRUPTED
        elif how == "actor dies":
            self.cluster.new_actor()
        elif how == "dies":
            self.cluster.end()

    @precondition(lambda self: self.placed)
    @rule()
    def a_poll_comes_to_nothing(self) -> None:
        before = self.slot
        self.feed(ActorUnreachable(slot="pc1/0", text="unavailable"))
        assert self.slot.deaths_at_s == before.deaths_at_s

    @precondition(lambda self: self.placed)
    @rule(incarnation=st.none() | st.integers(0, 9), steps=st.integers(0, 99))
    def a_status_is_of_another_process_of_the_slot(
        self, incarnation: int | None, steps: int
    ) -> None:
        """Such a status must not count."""
        if incarnation != self.slot.incarnation:
            before = self.slot
            actor = before.actor or self.cluster.name
            status = status_of("pc1/0", incarnation, actor=actor, steps_ok=steps)
            assert self.feed(StatusReceived(status=status)) == ()
            assert self.slot == replace(
                before, actor=self.slot.actor, unreached_since_s=self.slot.unreached_since_s
            )

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
            if before.phase in {Phase.PAUSING, Phase.HELD}:
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
        self.feed(Reinstated())
        assert self.slot.phase is Phase.ABSENT
        if self.node_is_there:
            self.feed(NodeJoined())
        assert self.slot.deaths_at_s == ()
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
            if before.phase not in FINAL and not (before.phase is Phase.WORKING and before.ready):
                assert self.slot.phase is Phase.STOPPED

    @precondition(lambda self: len(self.history) > 20)
    @rule(now=seldom)
    def run_may_close(self, now: bool) -> None:
        """Close the run, drained or not, because an error may end it at any point."""
        if not now:
            return
        self.drained = True
        self.feed(Close())
        assert self.slot.phase in FINAL

    # What must hold

    @invariant()
    def what_was_done_is_counted_once_up_to_what_a_killed_process_did_since_its_last_status(
        self,
    ) -> None:
        counted = self.slot.counts.steps_ok
        process = self.cluster.process
        under_way = 0 if process is None else process.done - process.told
        assert counted <= self.cluster.really_done <= counted + under_way + self.cluster.unseen

    @invariant()
    def each_process_is_another_incarnation(self) -> None:
        started = self.cluster.started
        assert started == sorted(set(started))
        assert not started or started[-1] <= self.slot.incarnation

    @invariant()
    def what_is_wanted_fits_the_phase(self) -> None:
        slot, wanted = self.slot, self.orders
        assert self.placed == slot.placed
        assert slot.wake_at_s is None or slot.phase is Phase.PAUSING
        assert wanted.holds == (slot.draining or slot.orders.hold is not None)
        if wanted.runs:
            assert self.placed
            assert slot.phase in {Phase.WORKING, Phase.HELD, Phase.STOPPED}
            assert slot.heard_at_s is not None or slot.actor is None or wanted.begin is not None
        match slot.phase:
            case Phase.ABSENT:
                assert not self.node_is_there
                assert not wanted.runs
            case Phase.HELD:
                assert self.node_is_there
                assert wanted.runs == slot.ready
                assert slot.orders.hold is Hold.PAUSE or (
                    slot.orders.hold is Hold.DRAIN and not self.placed
                )
            case Phase.PAUSING:
                assert slot.orders.hold is None
                assert not wanted.runs
                assert slot.wake_at_s is not None
                assert slot.wake_at_s <= self.now_s + self.run_rules.restart_backoff_max_s
            case Phase.WORKING:
                assert wanted.runs
            case Phase.QUARANTINED | Phase.DONE:
                assert not self.placed
        if slot.draining:
            assert slot.phase in {Phase.WORKING, *FINAL}, (
                "a slot whose run is ending waits for nothing new"
            )

    @invariant()
    def quarantined_is_final_and_a_stopped_slot_only_counts(self) -> None:
        before, after = self.history[-2:] if len(self.history) > 1 else self.history * 2
        if before.phase is Phase.QUARANTINED:
            assert replace(after, orders=before.orders) == before
        if before.phase is Phase.STOPPED:
            assert (after.phase, after.state, after.reason) == (
                before.phase,
                before.state,
                before.reason,
            )

    @invariant()
    def deaths_are_below_their_limit(self) -> None:
        if self.slot.phase is not Phase.QUARANTINED:
            assert len(without_progress(self.slot)) < self.run_rules.max_deaths
        assert list(self.slot.deaths_at_s) == sorted(self.slot.deaths_at_s)

    @invariant()
    def with_a_cluster_that_helps_a_slot_soon_runs_or_rests_for_a_reason(self) -> None:
        """No slot is stuck: it waits at most for a timer and some answers."""
        slot, now_s = self.slot, self.now_s
        for _ in range(6):
            if slot.phase in {Phase.ABSENT, Phase.HELD, *FINAL}:
                return
            if slot.ready and slot.state is WorkerState.RUNNING and not self.rests(slot):
                return
            event: Event = Tick()
            if slot.phase is Phase.PAUSING:
                assert slot.wake_at_s is not None
                now_s = max(now_s, slot.wake_at_s)
            else:
                actor = slot.actor or "actor 0"
                told = {"actor": actor, "is_held": self.rests(slot), "saves": slot.saves}
                event = StatusReceived(status=status_of("pc1/0", slot.incarnation, **told))
            slot, _ = advance(slot, event, self.moment(now_s))
        raise AssertionError(f"stuck in {slot}")

    @invariant()
    def with_a_cluster_that_is_silent_a_slot_tries_again_and_in_the_end_gives_up(self) -> None:
        if self.slot.phase not in {Phase.WORKING, Phase.PAUSING} or self.rests(self.slot):
            return
        slot, now_s, tries = self.slot, self.now_s, 0
        # Each try needs one tick to be given up, and one to begin again.
        for ticks in range(2 * self.run_rules.max_deaths + 2):
            now_s += self.longest_wait_s
            before = slot
            slot, _ = advance(slot, Tick(), self.moment(now_s))
            tries += slot.incarnation > before.incarnation
            assert tries or slot.phase in FINAL or ticks < 2
        assert slot.phase in FINAL

    @property
    def longest_wait_s(self) -> float:
        numbers = self.run_rules
        slowest_s = max(numbers.hang_timeout_s, numbers.start_timeout_s, self.slow_step_s)
        return max(slowest_s, numbers.restart_backoff_max_s) + 1.0

    @staticmethod
    def rests(slot: Slot) -> bool:
        """Return whether the slot must come to rest."""
        return slot.draining or slot.orders.hold is not None


LifecycleMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestLifecycleMachine = LifecycleMachine.TestCase
