"""The shell around the lifecycle: owns the clock, polls the fleet, feeds events, performs commands, tells watchers.

Decides nothing about a slot (`lifecycle.py`) and nothing about where slots go (`placement.py`). The one decision that
is its own is when a run begins to count and when it ends. One thread, no callbacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator import lifecycle, slots
from orchestrator.cluster.base import Fleet, NodeFact, SliceOutcome
from orchestrator.config import Config
from orchestrator.errors import PreflightError
from orchestrator.placement import SlotPlan, refusals
from orchestrator.rows import Meter, row
from orchestrator.slots import Phase, Rules, Slot
from orchestrator.watch.events import EventLog
from orchestrator.watch.live import Watcher
from orchestrator.watch.model import Snapshot
from workers.messages import Directive

#: How long one wait for a report may last: the patience of Ctrl-C and of every timer.
_POLL_S = 0.1
_NODES_EVERY_S = 1.0
_SNAPSHOT_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What identifies a run."""

    run_id: str
    started_at_unix_s: float
    duration_s: float


class Supervisor:
    """Runs one run from the first actor to the last report."""

    def __init__(
        self,
        *,
        info: RunInfo,
        config: Config,
        plans: Sequence[SlotPlan],
        fleet: Fleet,
        watchers: Sequence[Watcher],
        events: EventLog,
        interrupted: Callable[[], bool],
        problems: Callable[[], Sequence[str]],
    ) -> None:
        """Prepare; nothing is placed before `run`.

        Args:
            info: Identity and planned length.
            config: Of this run, scaled if it was.
            plans: Every slot.
            fleet: Connected.
            watchers: Told of every snapshot.
            events: Told of every event.
            interrupted: Asked at every turn whether the user wants to stop.
            problems: Asked for one-line warnings to show, such as a full disk.
        """
        self._info = info
        self._config = config
        self._plans = {plan.seat.slot: plan for plan in plans}
        self._fleet = fleet
        self._watchers = watchers
        self._events = events
        self._interrupted = interrupted
        self._problems = problems
        self._rules = _rules(config)
        self._slots = {name: Slot(slot=name) for name in self._plans}
        self._meters = {name: Meter() for name in self._plans}
        self._present: dict[str, str] = {}
        self._known: set[str] = set()
        self._began_s = time.monotonic()
        self._first_proven_s: float | None = None
        self._counting_since_s: float | None = None
        self._ends_at_s: float | None = None
        self._nodes_at_s = self._snapshot_at_s = float("-inf")

    def run(self) -> Snapshot:
        """Run to the planned end, or until interrupted, and return the last picture.

        Raises:
            PreflightError: A worker found that the plan can never work on its machine.
        """
        while not self._over():
            self._turn()
        self._drain()
        snapshot = self.snapshot()
        for watcher in self._watchers:
            watcher.close(snapshot)
        return snapshot

    def snapshot(self) -> Snapshot:
        """The run as it is now."""
        now_s = time.monotonic()
        counting_since_s = self._counting_since_s if self._counting_since_s is not None else now_s
        return Snapshot(
            run_id=self._info.run_id,
            started_at=self._info.started_at_unix_s,
            now_unix_s=time.time(),
            elapsed_s=min(now_s - counting_since_s, self._info.duration_s) if self._ends_at_s else 0.0,
            duration_s=self._info.duration_s,
            nodes_planned=tuple(self._config.nodes),
            nodes_seen=tuple(name for name in self._config.nodes if name in self._present),
            rows=tuple(row(plan, self._slots[name], self._meters[name], now_s) for name, plan in self._plans.items()),
            notices=(*self._missing_nodes(), *self._problems()),
            restart_count=sum(slot.counters.restarts for slot in self._slots.values()),
        )

    def _over(self) -> bool:
        if self._interrupted():
            return True
        if all(slot.phase is Phase.QUARANTINED for slot in self._slots.values()):
            return True
        return self._ends_at_s is not None and time.monotonic() >= self._ends_at_s

    def _turn(self) -> None:
        now_s = time.monotonic()
        if now_s - self._nodes_at_s >= _NODES_EVERY_S:
            self._nodes_at_s = now_s
            self._watch_nodes(self._fleet.nodes())
        # Reports before timers: after this process was suspended, what waits here shows that nobody hangs.
        for outcome in self._fleet.wait(_POLL_S):
            self._take(outcome)
        for name in self._slots:
            self._feed(name, slots.Tick())
        if not self._slots_busy():
            time.sleep(_POLL_S)  # nothing is under way, so the wait came back at once
        self._begin_counting()
        self._show()

    def _slots_busy(self) -> bool:
        return any(slot.in_flight for slot in self._slots.values())

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._snapshot_at_s < _SNAPSHOT_EVERY_S:
            return
        self._snapshot_at_s = now_s
        snapshot = self.snapshot()
        for watcher in self._watchers:
            watcher.update(snapshot)

    def _begin_counting(self) -> None:
        """The planned time begins when every worker whose node is there has answered, or has had its chance."""
        if self._ends_at_s is not None:
            return
        now_s = time.monotonic()
        here = [slot for slot in self._slots.values() if slot.phase is not Phase.ABSENT]
        answered = [slot for slot in here if slot.proven or slot.phase is Phase.QUARANTINED]
        if not answered:
            return
        self._first_proven_s = self._first_proven_s if self._first_proven_s is not None else now_s
        if len(answered) == len(here) or now_s - self._first_proven_s > self._rules.start_timeout_s:
            self._counting_since_s = now_s
            self._ends_at_s = now_s + self._info.duration_s
            self._events.write("counting", duration_s=self._info.duration_s, startup_s=now_s - self._began_s)

    def _watch_nodes(self, facts: Sequence[NodeFact]) -> None:
        refused = {refusal.node for refusal in refusals(self._config, facts)}
        live = {fact.name: fact.node_id for fact in facts if fact.name in self._config.nodes}
        usable = {name: node_id for name, node_id in live.items() if name is not None and name not in refused}
        alive = {fact.node_id for fact in facts}
        for name, node_id in list(self._present.items()):
            if node_id not in alive:
                del self._present[name]
                self._events.write("node_left", node=name)
                self._feed_node(name, slots.NodeLeft())
        for name, node_id in usable.items():
            if name not in self._present:
                self._present[name] = node_id
                self._known.add(name)
                self._events.write("node_joined", node=name, node_id=node_id)
                self._feed_node(name, slots.NodeJoined())

    def _feed_node(self, node: str, event: slots.Event) -> None:
        for name, plan in self._plans.items():
            if plan.spec.node == node:
                self._feed(name, event)

    def _take(self, outcome: SliceOutcome) -> None:
        if outcome.report is None:
            failure = outcome.failure
            assert failure is not None, "an outcome has a report or a failure"  # noqa: S101 - internal invariant
            self._events.write(
                "slice_failed", slot=outcome.slot, failure=failure.value, text=outcome.text, sequence=outcome.sequence
            )
            event = slots.SliceFailed(
                incarnation=outcome.incarnation, sequence=outcome.sequence, failure=failure, text=outcome.text
            )
            self._feed(outcome.slot, event)
            return
        report = outcome.report
        for happened in report.events:
            self._events.write(
                happened.name, slot=report.slot, worker_at_unix_s=happened.at_unix_s, **dict(happened.detail)
            )
        if report.error is not None:
            self._events.write("workload_error", slot=report.slot, traceback=report.error)
        self._feed(outcome.slot, slots.SliceReported(report=report))
        if self._slots[outcome.slot].report is report:
            self._meters[outcome.slot].add(report)

    def _feed(self, name: str, event: slots.Event) -> None:
        after, commands = lifecycle.advance(self._slots[name], event, time.monotonic(), self._rules, self._ends_at_s)
        self._slots[name] = after
        for command in commands:
            self._perform(name, command)

    def _perform(self, name: str, command: slots.Command) -> None:
        match command:
            case slots.Place():
                self._fleet.place(self._plans[name].seat)
            case slots.Submit():
                self._fleet.submit(
                    Directive(
                        spec=self._plans[name].spec,
                        incarnation=command.incarnation,
                        sequence=command.sequence,
                        duration_s=command.duration_s,
                        resume=command.resume,
                    )
                )
            case slots.Forget():
                self._fleet.forget(name)
            case slots.Cancel(sequence=sequence):
                self._fleet.cancel(name, sequence)
            case slots.Restart():
                self._fleet.restart(name)
            case slots.Abandon():
                self._fleet.abandon(name)
            case slots.Note():
                self._events.write(command.name, slot=name, **dict(command.fields))
            case slots.EndRun(reason=reason):
                raise PreflightError([reason])

    def _drain(self) -> None:
        """Let what runs end, begin nothing, and do not wait for ever."""
        for name in self._slots:
            self._feed(name, slots.Drain())
        deadline_s = time.monotonic() + self._rules.slice_s + self._config.run.stop_grace_s
        while self._slots_busy() and time.monotonic() < deadline_s:
            for outcome in self._fleet.wait(_POLL_S):
                self._take(outcome)
            self._show()

    def _missing_nodes(self) -> list[str]:
        missing = [name for name in self._config.nodes if name not in self._present]
        return [f"{name} has left" if name in self._known else f"{name} has not joined" for name in missing]


def _rules(config: Config) -> Rules:
    run = config.run
    return Rules(
        slice_s=run.slice_s,
        hang_timeout_s=run.hang_timeout_s,
        stale_after_s=run.stale_after_s,
        start_timeout_s=run.start_timeout_s,
        restart_backoff_s=run.restart_backoff_s,
        restart_backoff_max_s=run.restart_backoff_max_s,
        max_deaths=run.max_deaths,
        death_window_s=run.death_window_s,
        max_workload_errors=run.max_workload_errors,
    )
