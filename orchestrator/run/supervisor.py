"""Runs the lifecycle: owns the clock, polls the fleet, feeds events, performs commands, informs watchers.

A turn takes in what has happened, writes it to the store, and only then sends anything. So a head that is killed has
never sent a slice that its store does not know. Decides nothing about a slot (`lifecycle.py`), about nodes
(`membership.py`) or about where slots go (`placement.py`). It decides only when a run begins to count and when it ends.
One thread, no callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.config.schema import Config
from orchestrator.core import circuit_breaker, dispatch, lifecycle
from orchestrator.core import slot as slots
from orchestrator.core.fleet import Fleet, SliceEnded, SliceFailed, SliceFailure, SliceReported
from orchestrator.core.memory_broker.broker import MemoryBroker
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Phase, Slot
from orchestrator.errors import PreflightError
from orchestrator.run import collector
from orchestrator.run.clock import Clock, SystemClock
from orchestrator.run.fault_injection import FaultInjector
from orchestrator.run.learned_limits import LearnedLimits
from orchestrator.run.node_watch import NodeWatch
from orchestrator.run.run_info import RunInfo, rules_of
from orchestrator.run.snapshot import Meter, Recorder, SlotRows
from orchestrator.run.timers import Timers
from orchestrator.watch.model import Snapshot
from orchestrator.watch.sinks import Outlets
from workers.messages import Directive, ProcessFault, Report

#: How long one wait for a report may last: Ctrl-C and timers may be late by so much.
_POLL_S = 0.1

#: A turn begins so much later than the one before for each slot: what many workers report meanwhile is written in one
#: transaction. No worker waits for it: it has another slice queued.
_TURN_S_PER_SLOT = 50e-6
_TURN_MOST_S = 0.05

#: An overdue slice is checked again after so long: its reason shows the seconds.
_LOOK_AGAIN_S = 0.2
_NODES_EVERY_S = 1.0
_SNAPSHOT_EVERY_S = 0.25

#: If the clock jumps by so much, this process was suspended; for so long afterwards no timer counts.
_SUSPENDED_S = 3.0
_CATCH_UP_S = 2.0

#: Ray's memory monitor and its process table know within a second; a new process reports after two or more.
_EXPLAIN_WITHIN_S = 3.0

_CLOCK = SystemClock()


class Supervisor:
    """Runs one run from the first actor to the last report."""

    def __init__(  # noqa: PLR0913 - each is a part of a run that tests replace
        self,
        *,
        info: RunInfo,
        config: Config,
        plans: Sequence[SlotPlan],
        fleet: Fleet,
        outlets: Outlets,
        interrupted: Callable[[], bool],
        learned_limits: LearnedLimits,
        injector: FaultInjector | None = None,
        clock: Clock = _CLOCK,
        strict: bool = False,
    ) -> None:
        """Prepare; nothing is placed before `run`.

        Args:
            info: Identity, planned length, and what is behind it.
            config: Of this run, scaled if it was.
            plans: Every slot.
            fleet: Connected.
            outlets: Told of every event, every snapshot, and every slot that changed before anything is sent because
                of it.
            interrupted: Asked at every turn whether the user wants to stop.
            learned_limits: Takes in what workers learn.
            injector: Injects faults, if the user asked for them.
            clock: Read for every timer and deadline; tests pass one in virtual time.
            strict: Whether an event that the lifecycle does not allow ends the run (tests), or is written to the event
                log and otherwise ignored.
        """
        self._info = info
        self._config = config
        self._plans = {plan.reservation.slot: plan for plan in plans}
        self._fleet = fleet
        self._outlets = outlets
        self._interrupted = interrupted
        self._learned_limits = learned_limits
        self._injector = injector
        self._clock = clock
        self._strict = strict
        self._rules = rules_of(config, info.past)
        self._slots = {name: info.past.slots.get(name, Slot(slot=name)) for name in self._plans}
        self._meters = {name: Meter() for name in self._plans}
        self._recorder = Recorder(self._plans, self._meters, outlets.store)
        self._nodes = NodeWatch(config, plans, outlets.events)
        self._broker = MemoryBroker(self._plans)
        self._outbox: list[tuple[str, slots.Command]] = []
        self._changed: dict[str, None] = dict.fromkeys(self._plans)
        """In the order of their changes; at first in that of the plan."""
        self._timers = Timers()
        self._turn_s = min(_TURN_MOST_S, _TURN_S_PER_SLOT * len(self._plans), self._rules.slice_s / 10)
        self._turn_at_s = float("-inf")
        self._cards_wait = False
        """Whether a slot changed in a way that may make its card one to give up."""
        self._unexplained: dict[str, float] = {}
        """Slots whose process has ended for an unknown reason -> until when to ask."""
        self._began_s = self._looked_at_s = self._clock.monotonic_s()
        self._ticks_from_s = self._began_s
        self._first_ready_s: float | None = None
        self._counting_since_s: float | None = None
        self._ends_at_s: float | None = None
        self._nodes_at_s = self._snapshot_at_s = float("-inf")

    def run(self) -> Snapshot:
        """Run to the planned end, or until interrupted, and return the last picture.

        Raises:
            PreflightError: A worker found that the plan can never work on its machine.
            IllegalEventError: With `strict`, an event came that the lifecycle does not allow.
        """
        try:
            with collector.adapted(len(self._plans)):
                while not self._over():
                    self._turn()
                self._drain()
        except BaseException:
            self._close()  # what is under way is lost, and the books must say so
            self._send_out()
            raise
        snapshot = self.snapshot()
        self._send_out()
        self._outlets.close(snapshot)
        return snapshot

    def snapshot(self) -> Snapshot:
        """The run as it is now."""
        now_s = self._clock.monotonic_s()
        counting_since_s = self._counting_since_s if self._counting_since_s is not None else now_s
        elapsed_s = self._info.past.elapsed_s + now_s - counting_since_s
        return Snapshot(
            run_id=self._info.run_id,
            started_at=self._info.started_at_unix_s,
            now_unix_s=self._clock.unix_s(),
            elapsed_s=min(elapsed_s, self._info.duration_s),
            duration_s=self._info.duration_s,
            nodes_planned=tuple(self._config.nodes),
            nodes_seen=self._nodes.seen(),
            rows=SlotRows(self._plans, self._slots, self._meters, now_s),
            notices=(*self._nodes.notices(), *self._outlets.problems),
            restart_count=sum(slot.restarts for slot in self._slots.values()),
            steps_lost_upper_bound=sum(slot.steps_lost_upper_bound for slot in self._slots.values()),
        )

    def _over(self) -> bool:
        if self._interrupted():
            return True
        if all(slot.phase is Phase.QUARANTINED for slot in self._slots.values()):
            return True
        return self._ends_at_s is not None and self._clock.monotonic_s() >= self._ends_at_s

    def _turn(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._nodes_at_s >= _NODES_EVERY_S:
            self._nodes_at_s = now_s
            for node, event in self._nodes.look(self._fleet.nodes(), self._slots, now_s):
                for name in self._nodes.slots[node]:
                    self._feed(name, event)
            self._ask_why(now_s)
        self._hear()
        self._tick()
        self._quarantine_cards(now_s)
        self._begin_counting()
        if self._injector is not None:
            self._injector.shake_nodes(self._fleet, now_s)
        self._send_out()
        if not self._slots_busy():
            self._clock.sleep(_POLL_S)  # nothing is under way, so the next wait would come back at once
        self._show()

    def _hear(self) -> None:
        """Take in what the slices bring that have ended since the last turn."""
        rest_s = self._turn_at_s + self._turn_s - self._clock.monotonic_s()
        if rest_s > 0:
            self._clock.sleep(rest_s)
        self._turn_at_s = self._clock.monotonic_s()
        for ended in self._fleet.wait(_POLL_S):
            self._take(ended)

    def _tick(self) -> None:
        """Send a tick to slots whose timers are due, unless this process has just been suspended.

        After a suspension the workers were not late, and what they reported meanwhile must come in first. One reading
        of the clock serves for the gap and for the timers; with two, a stop between them would count against the
        workers.
        """
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_at_s > _SUSPENDED_S:
            self._ticks_from_s = now_s + _CATCH_UP_S
        self._looked_at_s = now_s
        if now_s >= self._ticks_from_s:
            for name in self._timers.due(now_s):
                self._feed(name, slots.Tick(), now_s)
                due_at_s = dispatch.due_at_s(self._slots[name], self._rules)
                if due_at_s is not None:
                    self._timers.set(name, due_at_s if due_at_s > now_s else now_s + _LOOK_AGAIN_S)

    def _send_out(self) -> None:
        """Write down what has changed, then perform what follows from it."""
        now_s = self._clock.monotonic_s()
        changed, self._changed = self._changed, {}
        self._recorder.take(changed, self._slots, now_s, self._clock.unix_s())
        for name, lease_bytes in self._broker.look(self._slots, now_s, changed).items():
            self._outlets.events.write("leased", slot=name, lease_bytes=lease_bytes)
        self._outlets.store.commit()
        outbox, self._outbox = self._outbox, []
        for name, command in outbox:
            self._perform(name, command)

    def _slots_busy(self) -> bool:
        return any(slot.in_flight for slot in self._slots.values())

    def _show(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._snapshot_at_s < _SNAPSHOT_EVERY_S:
            return
        self._snapshot_at_s = now_s
        self._outlets.show(self.snapshot())

    def _begin_counting(self) -> None:
        """The planned time begins when every worker whose node is there has answered, or has had its chance."""
        if self._ends_at_s is not None:
            return
        now_s = self._clock.monotonic_s()
        here = [slot for slot in self._slots.values() if slot.phase is not Phase.ABSENT]
        answered = [slot for slot in here if slot.ready or slot.phase is Phase.QUARANTINED]
        if not answered:
            return
        self._first_ready_s = self._first_ready_s if self._first_ready_s is not None else now_s
        if len(answered) == len(here) or now_s - self._first_ready_s > self._rules.start_timeout_s:
            self._counting_since_s = now_s
            remaining_s = self._info.remaining_s
            self._ends_at_s = now_s + remaining_s
            if self._injector is not None:
                self._injector.begin(now_s, self._ends_at_s)
            self._outlets.events.write("counting", duration_s=remaining_s, startup_s=now_s - self._began_s)

    def _ask_why(self, now_s: float) -> None:
        """Ask why processes have ended; the cluster finds out a little later than we do."""
        for name, until_s in list(self._unexplained.items()):
            cause = self._fleet.why_ended(name)
            if cause is not None:
                self._outlets.events.write("death_explained", slot=name, text=cause.text)
                self._feed(name, slots.DeathExplained(cause=cause))
            if cause is not None or now_s > until_s:
                del self._unexplained[name]

    def _quarantine_cards(self, now_s: float) -> None:
        """Quarantine a card on which every worker keeps dying, with one message."""
        if not self._cards_wait:
            return
        self._cards_wait = False
        cards = circuit_breaker.by_card(self._plans, self._slots)
        for card, reason in circuit_breaker.cards_to_quarantine(cards, now_s, self._rules).items():
            self._outlets.events.write("card_quarantined", card=card, reason=reason)
            for slot in cards[card]:
                self._feed(slot.slot, slots.CardQuarantined(reason=reason))

    def _take(self, ended: SliceEnded) -> None:
        match ended:
            case SliceReported(report=report):
                for happened in report.events:
                    self._outlets.events.write(
                        happened.name, slot=report.slot, worker_at_unix_s=happened.at_unix_s, **dict(happened.detail)
                    )
                if report.error is not None:
                    self._outlets.events.write("workload_error", slot=report.slot, traceback=report.error)
            case SliceFailed(failure=failure) if failure is not SliceFailure.UNSENT:
                self._outlets.events.write(
                    "slice_failed", slot=ended.slot, failure=failure.value, text=ended.text, sequence=ended.sequence
                )
        self._feed(ended.slot, ended)

    def _accept(self, name: str, report: Report) -> None:
        """Measure and learn from a report that counts."""
        meter, spec = self._meters[name], self._plans[name].spec
        meter.add(report)
        meter.remember(self._learned_limits.best_tflops(spec, report))
        self._learned_limits.take(spec, report, meter.best_tflops)

    def _feed(self, name: str, event: slots.Event, now_s: float | None = None) -> None:
        before, now_s = self._slots[name], self._clock.monotonic_s() if now_s is None else now_s
        try:
            after, commands = lifecycle.advance(before, event, now_s, self._rules, self._ends_at_s)
        except lifecycle.IllegalEventError as error:
            if self._strict:
                raise
            self._outlets.events.write("illegal_event", slot=name, phase=error.phase.value, refused=error.event)
            return
        if after is before and not commands:
            return
        if self._injector is not None:
            accepted = next((command.report for command in commands if isinstance(command, slots.Accept)), None)
            self._injector.watch(before, after, accepted, now_s)
        if after.restarts > before.restarts:
            self._unexplained[name] = now_s + _EXPLAIN_WITHIN_S
        self._slots[name] = after
        self._changed[name] = None
        # A report moves a deadline to later, which the timer finds out when it is due.
        if after.phase is not before.phase or after.ready is not before.ready or after.wake_at_s != before.wake_at_s:
            self._timers.set(name, dispatch.due_at_s(after, self._rules))
            self._cards_wait = True
        for command in commands:
            match command:
                case slots.Accept(report=report):
                    self._accept(name, report)
                case slots.Note():
                    self._outlets.events.write(command.name, slot=name, **dict(command.fields))
                case slots.EndRun(reason=reason):
                    raise PreflightError([reason])
                case _:
                    self._outbox.append((name, command))

    def _perform(self, name: str, command: slots.Command) -> None:
        match command:
            case slots.Place():
                self._fleet.place(self._plans[name].reservation, self._plans[name].spec)
            case slots.Submit():
                self._fleet.submit(
                    name,
                    Directive(
                        incarnation=command.incarnation,
                        sequence=command.sequence,
                        duration_s=command.duration_s,
                        resume=command.resume,
                        step_limit=command.step_limit,
                        process_fault=self._strike(name, command),
                        lease_bytes=self._broker.grant(self._slots[name], command.sequence),
                    ),
                )
            case slots.Forget():
                self._fleet.forget(name)
            case slots.Restart():
                self._fleet.restart(name)
            case slots.Abandon():
                self._fleet.abandon(name)

    def _strike(self, name: str, submit: slots.Submit) -> ProcessFault | None:
        return (
            None
            if self._injector is None
            else self._injector.process_fault(self._slots[name], submit, self._clock.monotonic_s())
        )

    def _drain(self) -> None:
        """Let slices under way end, send no more, and wait for a limited time."""
        for name in self._slots:
            self._feed(name, slots.Drain())
        self._send_out()
        # One slice may just have begun, with another behind it.
        deadline_s = self._clock.monotonic_s() + 2 * self._rules.slice_s + self._config.run.stop_grace_s
        while self._slots_busy() and self._clock.monotonic_s() < deadline_s:
            self._hear()
            self._send_out()
            self._show()
        self._close()

    def _close(self) -> None:
        self._learned_limits.save()
        for name in self._slots:
            self._feed(name, slots.Close())
        if self._injector is not None:
            self._injector.close(self._clock.monotonic_s())
