"""A fleet around the fleet that strikes workers and nodes as a plan says, and keeps what became of
each fault.

It sees what the supervisor asks of the fleet, what comes back, and the run's event log. The
supervisor does not know of it. Rules:

1. A slot has at most one strike under way, and none while its node is down or on its way back.
2. A process is not struck before its first report, nor before the run counts.
3. Same plan, same seed, same course of the run: same faults. Chance is a hash of the seed.
4. A fault gets one outcome, and keeps it. If it is unknown whether it struck, the outcome is MOOT.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, cast

from orchestrator.core.fleet import (
    Fleet,
    SliceEnded,
    SliceReported,
)
from orchestrator.core.slot import HeadState
from orchestrator.errors import UsageError
from orchestrator.lab.chaos.plan import STEP_FAULTS, ChaosPlan, FaultRule, check_nodes
from orchestrator.record.events import EventLog
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.runner import Experiment
from orchestrator.run.supervisor import Clock
from workers.messages import Directive, FaultKind, Report, StruckDirective, Verdict
from workers.settings import WorkerSpec

#: The last seconds of a run that are left alone, and how much of a short run at most. A process
#: that was killed is back after some seconds, a node after half a minute.
_CALM_S: Final = 60.0
_CALM_SHARE: Final = 0.2

#: Faults that are told one by one; older ones are only counted.
TOLD_MOST = 10_000

#: Faults that end a process wherever it is.
_DEADLY: Final = frozenset({FaultKind.KILL, FaultKind.SEGV, FaultKind.EXIT})

_RUN_ENDED_FIRST: Final = "never struck: the run ended first"
_NOT_BACK: Final = "not back when the run ended"


class FaultOutcome(StrEnum):
    """How a fault ended, as far as that is known."""

    PENDING = "pending"
    #: The process continued.
    SURVIVED = "survived"
    #: A fresh process reports, or all workers of a node do.
    RECOVERED = "recovered"
    #: A slot was quarantined over it.
    GIVEN_UP = "given_up"
    #: The run, or the node's next fault, came before it was back.
    NOT_BACK = "not_back"
    #: Something else came first, so it struck nothing, or that is unknown.
    MOOT = "moot"


@dataclass(slots=True, kw_only=True)
class Fault:
    """One injected fault. Those of single steps are one entry for each slot and outcome.

    The fields are keys of summary.json.
    """

    number: int
    at_s: float
    """When it was sent, since the run began to count; of a group, when the first was reported."""
    kind: FaultKind
    target: str
    fate: FaultOutcome = FaultOutcome.PENDING
    became: str = "under way"
    """For the user: `RUNNING again after 4.1 s`."""
    detail: str = ""
    """How the head saw it: the slot's reason."""
    recovered_s: float | None = None
    """From the last report before it (of a node: its end) to the first, or last slot's, after."""
    count: int = 1


class FaultLog:
    """Every fault of a run, in the order of injection."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def enter(self, kind: FaultKind, target: str, at_s: float) -> Fault:
        """Return a new fault that is under way from now on."""
        fault = Fault(number=len(self._faults) + 1, at_s=at_s, kind=kind, target=target)
        self._faults.append(fault)
        return fault

    def close(
        self, fault: Fault, fate: FaultOutcome, became: str, recovered_s: float | None = None
    ) -> None:
        """Give a fault its one outcome."""
        fault.fate, fault.became, fault.recovered_s = fate, became, recovered_s

    def faults(self) -> list[Fault]:
        """Return the last `TOLD_MOST`."""
        return self._faults[-TOLD_MOST:]

    def tally(self, kind: FaultKind) -> dict[str, Any]:
        """Count the faults of a kind, those included that are not told one by one.

        `injected` is the sum of `recovered` (or survived in the same slice), `given_up` and
        `pending` (under way, or not back when the run ended). `moot` were planned or sent, and
        overtaken by something else.
        """
        counts = dict.fromkeys(FaultOutcome, 0)
        for fault in self._faults:
            if fault.kind is kind:
                counts[fault.fate] += fault.count
        moot = counts.pop(FaultOutcome.MOOT)
        return {
            "kind": kind,
            "injected": sum(counts.values()),
            "recovered": counts[FaultOutcome.SURVIVED] + counts[FaultOutcome.RECOVERED],
            "given_up": counts[FaultOutcome.GIVEN_UP],
            "pending": counts[FaultOutcome.PENDING] + counts[FaultOutcome.NOT_BACK],
            "moot": moot,
        }


@dataclass(slots=True)
class _Timer:
    """The next fault of a kind that happens every so often."""

    rule: FaultRule
    every_s: float
    at_s: float
    count: int = 0

    def draw(self, targets: Sequence[str], seed: int) -> str:
        """Return the target that the chance of this time falls on."""
        return targets[int(chance(seed, self.rule.kind, self.count) * len(targets))]

    def wind(self, now_s: float) -> None:
        """Set it to its next time; of several that were missed, one is made up for."""
        self.at_s = max(self.at_s + self.every_s, now_s)
        self.count += 1


@dataclass(slots=True)
class _Strike:
    """A fault under way in a slot."""

    fault: Fault
    sequence: int
    """It strikes in this slice or, if no step of that one met it, in a later one."""
    last_report_s: float | None = None
    """The time of the last report before it struck; `None`: it has not been seen to strike."""


@dataclass(slots=True)
class _Worker:
    """A slot, as far as the traffic shows it."""

    node: str
    in_flight: list[int] = field(default_factory=list)
    """Sequences of the slices under way, the running one first."""
    at_work: bool = False
    """Whether its present process has reported, and is sent slices."""
    report: Report | None = None
    report_s: float | None = None
    is_over: bool = False
    """It gets no process any more: quarantined, or done."""
    has_reported: bool = False
    """In the last wait, that all is well."""
    has_failed: bool = False
    """The same of a slice."""


@dataclass(slots=True)
class _DownNode:
    fault: Fault
    ended_at_s: float
    start_at_s: float | None
    """`None` once it was started again."""
    waiting: set[str]
    given_up: list[str]


class ChaosFleet:
    """Another fleet, struck by the faults of a plan; what it does not override it hands on."""

    def __init__(
        self,
        fleet: Fleet,
        plan: ChaosPlan,
        homes: Mapping[str, str],
        head_node: str,
        events: EventLog,
        clock: Clock,
    ) -> None:
        """Wrap `fleet`; nothing is struck before the run counts.

        `homes` has the node of each slot. The raylet of `head_node` carries the head and is left
        alone. `events` gets each fault of a process or node.
        """
        self.log = FaultLog()
        self._inner = fleet
        self._plan = plan
        self._head_node = head_node
        self._events = events
        self._clock = clock
        # The slots of jobs come later, and may move.
        self._workers: defaultdict[str, _Worker] = defaultdict(lambda: _Worker(head_node))
        self._workers |= {slot: _Worker(node) for slot, node in homes.items()}
        self._began_s: float | None = None
        self._began_unix_s = clock.unix_s()
        self._calm_from_s = self._ends_at_s = math.inf
        self._is_over = False
        self._timers: list[_Timer] = []
        self._strikes: dict[str, _Strike] = {}
        self._down: dict[str, _DownNode] = {}
        self._planned = list(plan.node_faults)
        self._step_faults: dict[tuple[FaultKind, str, str], Fault] = {}
        """Of each kind, slot and outcome the one entry."""
        self._uncounted: list[tuple[str, Report, float]] = []
        """Reports of the last wait: whether their slot was given up over them is known later."""
        self._given_up: dict[str, str] = {}
        """Slots that were quarantined since the last wait, with the reason."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a fleet has
        return getattr(self._inner, name)

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        """Place a worker whose workload has faults in it, if the plan strikes workers."""
        self._workers[spec.slot].node = spec.node
        faults = self._plan.step_faults()
        if faults is not None:
            settings = {**spec.workload.settings, "chaos": json.dumps(faults)}
            name = f"workers.workloads.chaos:{spec.workload.name}"
            spec = replace(spec, workload=replace(spec.workload, name=name, settings=settings))
        self._inner.place(spec, num_cpus, num_gpus)

    def submit(self, slot: str, directive: Directive) -> None:
        """Send a slice, with a strike if one falls on it."""
        now_s = self._clock.monotonic_s()
        kind = self._draw(slot, directive, now_s)
        self._workers[slot].in_flight.append(directive.sequence)
        if kind is not None:
            self._strikes[slot] = _Strike(self._enter(kind, slot, now_s), directive.sequence)
            self._events.write(
                "chaos_strike", slot=slot, kind=kind.value, sequence=directive.sequence
            )
            share = chance(self._plan.seed, "share", slot, directive.sequence)
            directive = struck(directive, kind, share)
        self._inner.submit(slot, directive)

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        """End and start the nodes whose time has come, then wait for slices."""
        self._count_step_faults()
        self._shake_nodes(self._clock.monotonic_s())
        for worker in self._workers.values():
            worker.has_reported = worker.has_failed = False
        ended = self._inner.wait(timeout_s)
        now_s = self._clock.monotonic_s()
        for one in ended:
            if isinstance(one, SliceReported):
                self._take_report(one.report, now_s)
            else:
                self._workers[one.slot].has_failed = True
        return ended

    def forget(self, slot: str) -> None:
        """Give up the slot's slices; a strike in one of them has struck."""
        if self._may_have_struck(slot):
            self._note_struck(slot, "no report when the run ended")
        self._workers[slot].in_flight.clear()
        self._inner.forget(slot)

    def restart(self, slot: str) -> None:
        """End the slot's process."""
        self._workers[slot].at_work = False
        self._inner.restart(slot)

    def abandon(self, slot: str) -> None:
        """End the slot's actor."""
        worker = self._workers[slot]
        worker.at_work = False
        worker.in_flight.clear()
        self._inner.abandon(slot)

    def on_event(self, entry: Mapping[str, Any]) -> None:
        """Take in what the run wrote into its event log: when it counts, and how slots change."""
        slot = entry["slot"]
        if entry["event"] == "counting":
            self._begin(self._clock.monotonic_s(), float(entry["duration_s"]))
        elif entry["event"] == "state" and slot in self._workers and not self._is_over:
            self._on_state(slot, entry["to_state"], str(entry["cause"]))

    def end(self) -> None:
        """The run is over: give every fault that is under way its outcome."""
        if self._is_over:
            return
        self._count_step_faults()
        self._is_over = True
        for strike in self._strikes.values():
            if strike.last_report_s is not None:
                self.log.close(strike.fault, FaultOutcome.NOT_BACK, _NOT_BACK)
            else:
                self.log.close(strike.fault, FaultOutcome.MOOT, _RUN_ENDED_FIRST)
        for down in self._down.values():
            missing = ", ".join(sorted(down.waiting))
            down.fault.detail = f"waiting for {missing}" if missing else "still down"
            self.log.close(down.fault, FaultOutcome.NOT_BACK, _NOT_BACK)
        for planned in self._planned:
            fault = self.log.enter(FaultKind.NODE, planned.node, planned.at_s)
            self.log.close(fault, FaultOutcome.MOOT, _RUN_ENDED_FIRST)

    def faults(self) -> list[dict[str, Any]]:
        """Every fault with what became of it, as JSON knows it."""
        return [
            {**asdict(fault), "at_unix_s": self._began_unix_s + fault.at_s}
            for fault in self.log.faults()
        ]

    def counts(self) -> list[dict[str, Any]]:
        """How many faults of each kind there were, and what became of them."""
        return [self.log.tally(kind) for kind in self._plan.kinds()]

    def _begin(self, now_s: float, duration_s: float) -> None:
        """The run begins to count: all times of the plan are from here.

        Shortly before its end nothing is struck by the clock or by chance any more, so that what
        was struck can come back and the outcome of the run says something. A node that the plan
        names is ended when the plan says so.
        """
        self._began_s, self._began_unix_s = now_s, self._clock.unix_s()
        self._ends_at_s = now_s + duration_s
        self._calm_from_s = self._ends_at_s - min(_CALM_S, _CALM_SHARE * duration_s)
        self._timers = [
            _Timer(rule, rule.every_s, now_s + rule.every_s)
            for rule in self._plan.rules
            if rule.every_s is not None
        ]

    def _enter(self, kind: FaultKind, target: str, now_s: float) -> Fault:
        began_s = now_s if self._began_s is None else self._began_s
        return self.log.enter(kind, target, now_s - began_s)

    # What is struck

    def _draw(self, slot: str, directive: Directive, now_s: float) -> FaultKind | None:
        """Return which strike falls on a slice, if any."""
        if self._began_s is None or now_s >= self._calm_from_s:
            return None
        targets = sorted(
            name
            for name, worker in self._workers.items()
            if worker.at_work and name not in self._strikes and worker.node not in self._down
        )
        if slot not in targets:
            return None
        for timer in self._timers:  # drawn again when the targets change, so none is lost
            is_due = timer.rule.kind is not FaultKind.NODE and now_s >= timer.at_s
            if is_due and timer.draw(targets, self._plan.seed) == slot:
                timer.wind(now_s)
                return timer.rule.kind
        return self._draw_by_chance(slot, directive)

    def _draw_by_chance(self, slot: str, directive: Directive) -> FaultKind | None:
        """Draw for each kind with a rate, as often as the slice is expected to have steps."""
        report, steps = self._workers[slot].report, 1.0
        if report is not None and report.wall_s > 0:
            steps = max(1.0, report.counts.steps / report.wall_s * directive.duration_s)
        for rule in self._plan.rules:
            if rule.rate is not None and rule.kind not in STEP_FAULTS:
                share = 1.0 if rule.rate >= 1.0 else -math.expm1(steps * math.log1p(-rule.rate))
                if chance(self._plan.seed, rule.kind, slot, directive.sequence) < share:
                    return rule.kind
        return None

    def _shake_nodes(self, now_s: float) -> None:
        """End and start nodes that are due; a node is down for its whole pause."""
        if self._began_s is None or now_s >= self._ends_at_s:
            return
        for planned in list(self._planned):
            down = self._down.get(planned.node)
            is_up = down is None or down.start_at_s is None
            if is_up and now_s - self._began_s >= planned.at_s:
                self._planned.remove(planned)
                self._end_node(planned.node, planned.pause_s, now_s)
        for timer in self._timers if now_s < self._calm_from_s else ():
            if timer.rule.kind is FaultKind.NODE and now_s >= timer.at_s:
                at_work = {worker.node for worker in self._workers.values() if worker.at_work}
                if nodes := sorted(at_work - {self._head_node, *self._down}):
                    node = timer.draw(nodes, self._plan.seed)
                    timer.wind(now_s)
                    self._end_node(node, timer.rule.pause_s, now_s)
        for node, down in list(self._down.items()):
            if down.start_at_s is not None and now_s >= down.start_at_s:
                down.start_at_s = None
                self._close_if_back(node, now_s)
                self._events.write("chaos_node_started", node=node)
                self._inner.start_node(node)

    def _end_node(self, node: str, pause_s: float, now_s: float) -> None:
        if (before := self._down.pop(node, None)) is not None:
            became = "not back before it was ended again"
            self.log.close(before.fault, FaultOutcome.NOT_BACK, became)
        waiting = {
            slot
            for slot, worker in self._workers.items()
            if worker.node == node and not worker.is_over
        }
        self._down[node] = _DownNode(
            fault=self._enter(FaultKind.NODE, node, now_s),
            ended_at_s=now_s,
            start_at_s=now_s + pause_s,
            waiting=waiting,
            given_up=[],
        )
        self._events.write("chaos_node_ended", node=node)
        self._inner.end_node(node)

    # What becomes of it

    def _take_report(self, report: Report, now_s: float) -> None:
        slot, worker = report.slot, self._workers[report.slot]
        if report.sequence not in worker.in_flight:
            return  # given up before, so the head refuses it
        self._uncounted.append((slot, report, now_s))
        if report.verdict is Verdict.CONTEXT_CORRUPTED and self._may_have_struck(slot):
            self._note_struck(slot, report.reason)
        worker.in_flight.remove(report.sequence)
        worker.has_reported = report.verdict is Verdict.OK
        if report.verdict in {Verdict.OK, Verdict.DONE} and not worker.at_work:
            self._slot_back(slot, report, now_s)
        worker.at_work = report.verdict is Verdict.OK
        worker.is_over |= report.verdict is Verdict.DONE
        worker.report, worker.report_s = report, now_s

    def _on_state(self, slot: str, state: str, reason: str) -> None:
        worker = self._workers[slot]
        if state == HeadState.QUARANTINED:
            worker.is_over, worker.at_work = True, False
            self._given_up[slot] = reason
            if worker.has_failed or not worker.has_reported:
                self._process_gone(slot, reason)
            self._slot_given_up(slot, reason)
        elif state in {HeadState.LOST, HeadState.RESTARTING}:
            worker.at_work = False
            self._process_gone(slot, reason, is_node_gone=state == HeadState.LOST)
        elif state == HeadState.HELD:
            worker.at_work = False

    def _may_have_struck(self, slot: str) -> bool:
        """Whether the running slice is the one that the strike was sent with, or came after it."""
        strike, in_flight = self._strikes.get(slot), self._workers[slot].in_flight
        if strike is None or strike.last_report_s is not None:
            return False
        return bool(in_flight) and in_flight[0] >= strike.sequence

    def _note_struck(self, slot: str, how: str) -> None:
        strike, report_s = self._strikes[slot], self._workers[slot].report_s
        strike.last_report_s = self._clock.monotonic_s() if report_s is None else report_s
        strike.fault.detail = how

    def _process_gone(self, slot: str, reason: str, *, is_node_gone: bool = False) -> None:
        """The slot's process is gone: by the injected fault, or by something else."""
        worker, strike = self._workers[slot], self._strikes.get(slot)
        down = self._down.get(worker.node)
        if down is not None:
            down.waiting.add(slot)
        if strike is None or strike.last_report_s is not None:
            return
        if is_node_gone or down is not None:
            first = "its node was lost"
        elif worker.has_reported and not worker.has_failed:
            first = "its process was replaced"
        elif not self._may_have_struck(slot):
            first = "its process ended in an earlier slice"
        else:
            self._note_struck(slot, reason)
            return
        self._close_strike(slot, FaultOutcome.MOOT, f"overtaken: {first} first")

    def _close_strike(
        self, slot: str, fate: FaultOutcome, became: str, recovered_s: float | None = None
    ) -> None:
        self.log.close(self._strikes.pop(slot).fault, fate, became, recovered_s)

    def _slot_back(self, slot: str, report: Report, now_s: float) -> None:
        strike, node = self._strikes.get(slot), self._workers[slot].node
        if strike is not None and strike.last_report_s is not None:
            took_s = now_s - strike.last_report_s
            became = f"{report.state} again after {took_s:.1f} s"
            self._close_strike(slot, FaultOutcome.RECOVERED, became, took_s)
        if node in self._down:
            self._down[node].waiting.discard(slot)
            self._close_if_back(node, now_s)

    def _slot_given_up(self, slot: str, reason: str) -> None:
        down = self._down.get(self._workers[slot].node)
        if slot in self._strikes:
            if self._strikes[slot].last_report_s is not None:
                self._close_strike(slot, FaultOutcome.GIVEN_UP, f"given up: {reason}")
            else:
                first = "overtaken: its slot was given up first"
                self._close_strike(slot, FaultOutcome.MOOT, first)
        if down is not None and slot in down.waiting:
            down.waiting.discard(slot)
            down.given_up.append(slot)
            self._close_if_back(self._workers[slot].node, self._clock.monotonic_s())

    def _close_if_back(self, node: str, now_s: float) -> None:
        down = self._down[node]
        if down.start_at_s is not None or down.waiting:
            return
        del self._down[node]
        took_s = now_s - down.ended_at_s
        fate, became = FaultOutcome.RECOVERED, f"all its workers report again after {took_s:.1f} s"
        if down.given_up:
            fate = FaultOutcome.GIVEN_UP
            became = f"back after {took_s:.1f} s without {', '.join(down.given_up)}"
        self.log.close(down.fault, fate, became, took_s)

    def _count_step_faults(self) -> None:
        """Enter the faults of single steps that reports tell of."""
        for slot, report, at_s in self._uncounted:
            fate, became = FaultOutcome.SURVIVED, "survived in the same slice"
            if slot in self._given_up:
                fate, became = FaultOutcome.GIVEN_UP, f"given up: {self._given_up[slot]}"
            elif report.error is not None:
                became = "ended its slice; the process continued"
            for event in report.events:
                kind, count = event.detail.get("kind"), event.detail.get("count")
                if event.name != "chaos" or kind not in STEP_FAULTS or not isinstance(count, int):
                    continue
                words = became
                if kind == FaultKind.FLIP:
                    is_found = report.counts.verify_errors >= count
                    words = "found by the check" if is_found else "not all found by the checks"
                key = (FaultKind(str(kind)), slot, words)
                if key in self._step_faults:
                    self._step_faults[key].count += count
                else:
                    self._step_faults[key] = fault = self._enter(key[0], slot, at_s)
                    fault.fate, fault.became, fault.count = fate, words, count
        self._uncounted, self._given_up = [], {}


class Chaos(Experiment):
    """`run --chaos` as an addition to a run."""

    def __init__(self, plan: ChaosPlan, *, yes_really: bool) -> None:
        self._plan = plan
        self._yes_really = yes_really
        self._fleet: ChaosFleet | None = None
        self.description = plan.describe()
        self.line = f"Chaos: {self.description}"

    def check(self, environment: Environment) -> None:
        """Refuse faults that this environment cannot bear, or cannot have."""
        is_rehearsal = environment.mode is not Mode.CLUSTER
        if not is_rehearsal and not self._yes_really:
            raise UsageError(
                "--chaos kills workers of a real cluster; try it with --rehearse, or say that you "
                "mean it: --yes-really"
            )
        config = environment.config
        is_mps = config.workers.mps and environment.target.device != "cpu"
        if is_mps and environment.mode is not Mode.REHEARSE and _DEADLY & set(self._plan.kinds()):
            raise UsageError(
                "--chaos ends processes in the middle of a step, and under MPS that can end every "
                "other worker of the card; valid: faults other than kill, segv and exit, or --set "
                "workers.mps=false"
            )
        check_nodes(self._plan, config.nodes, config.head_node, is_rehearsal=is_rehearsal)

    def around(
        self, fleet: Fleet, environment: Environment, events: EventLog, clock: Clock
    ) -> Fleet:
        """Return the fleet with the faults."""
        homes = {plan.spec.slot: plan.spec.node for plan in environment.plans}
        head = environment.config.head_node
        self._fleet = ChaosFleet(fleet, self._plan, homes, head, events, clock)
        return cast("Fleet", self._fleet)

    def on_event(self, entry: Mapping[str, Any]) -> None:
        """Hand it to the fleet."""
        if self._fleet is not None:
            self._fleet.on_event(entry)

    def faults(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Close the books, and return all faults and how many there were of each kind."""
        if self._fleet is None:
            return [], []
        self._fleet.end()
        return self._fleet.faults(), self._fleet.counts()


def struck(directive: Directive, kind: FaultKind, at_share: float) -> StruckDirective:
    """Return a directive with a strike."""
    own = {one.name: getattr(directive, one.name) for one in fields(directive)}
    return StruckDirective(**own, kind=kind, at_share=at_share)


def chance(seed: int, *words: object) -> float:
    """Return a number in [0, 1) that looks random and follows from the seed and the words."""
    text = "\x1f".join(str(word) for word in (seed, *words))
    drawn = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(drawn, "big") >> 11) / 2**53
