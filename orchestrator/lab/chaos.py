"""`run --chaos`: workers are killed, run out of memory and lose their nodes; the summary says
whether each came back.

A fleet around the run's fleet ends processes and nodes; out-of-memory is raised inside the worker
(`workers/workloads/chaos.py`). The supervisor does not know of either. Chance follows from the
seed: the same faults in the same course of a run. Starts nothing again but the nodes that it ended.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any, Final, cast

from orchestrator.config.duration import parse_duration
from orchestrator.core.fleet import Fleet, Heard
from orchestrator.core.slot import HeadState, SlotState, slot_state
from orchestrator.errors import UsageError, one_line
from orchestrator.record.events import EventLog
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.supervisor import Clock
from workers.messages import WorkerState
from workers.settings import WorkerSpec

#: No worker is killed in the last seconds of a run, or in this share of a short one, so that what
#: was struck can come back before the run is judged.
_CALM_S: Final = 60.0
_CALM_SHARE: Final = 0.2

#: How long a node stays down unless the user says: long enough for Ray to notice.
_NODE_PAUSE_S: Final = 15.0

_VALID: Final = "oom:rate=0.05 (of steps), kill:every=20s (at least 1s), node:NAME@30s+20s"
_TIME: Final = r"[\d.]{1,20}[a-z][\d.a-z]{0,20}"
_FORMS: Final = (
    r"oom:rate=(?P<rate>\d{0,9}\.?\d{1,12})",
    rf"kill:every=(?P<every>{_TIME})",
    rf"node:(?P<node>[^@=,]{{1,200}})@(?P<at>{_TIME})(\+(?P<pause>{_TIME}))?",
)


class FaultKind(StrEnum):
    """What `--chaos` does, in the order in which the summary counts it."""

    #: A step meets torch's out-of-memory error before it allocates.
    OOM = "oom"
    #: A worker's process is ended without warning.
    KILL = "kill"
    #: A node's raylet is ended with all its workers, and started again.
    NODE = "node"


class FaultOutcome(StrEnum):
    """What became of a fault."""

    #: The process continued.
    SURVIVED = "survived"
    #: A new process reports, or all workers of a node do.
    RECOVERED = "recovered"
    #: A slot was quarantined over it.
    GIVEN_UP = "given_up"
    #: The run, or the next fault of the node, came first.
    NOT_BACK = "not_back"
    #: It was planned, and the run ended first.
    MOOT = "moot"


#: A slot in these has no process, or will have none that works.
_OVER: Final = frozenset({HeadState.QUARANTINED, WorkerState.DONE, WorkerState.STOPPED})
_AT_WORK: Final = frozenset(WorkerState) - _OVER


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """A node is ended at a moment of the run, and started again."""

    node: str
    at_s: float
    """Since the run began to count."""
    pause_s: float = _NODE_PAUSE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """What `--chaos` asks for."""

    seed: int
    oom_rate: float = 0.0
    """Share of the steps that run out of memory, 0..1."""
    kill_every_s: float = math.inf
    """Between two kills of a random worker."""
    nodes: tuple[NodeFault, ...] = ()
    """In the order of their times."""

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        """The kinds of fault that it brings, in the order of `FaultKind`."""
        asked = (self.oom_rate > 0, self.kill_every_s < math.inf, bool(self.nodes))
        return tuple(kind for kind, is_asked in zip(FaultKind, asked, strict=True) if is_asked)


def parse_chaos(text: str, seed: int = 0) -> ChaosPlan:
    """Return the plan in a text such as `oom:rate=0.05;kill:every=20s;node:pc2@30s`.

    Raises:
        UsageError: It cannot be read; the error names the part, and what may be typed.
    """
    plan = ChaosPlan(seed=seed)
    for part in text.split(";"):
        piece = "".join(part.split())
        forms = (re.fullmatch(form, piece, re.ASCII) for form in _FORMS)
        asked = next((found.groupdict() for found in forms if found), None)
        if asked is None:
            if piece:
                raise _refusal(piece)
        elif "rate" in asked:
            plan = replace(plan, oom_rate=float(asked["rate"]))
        elif "every" in asked:
            plan = replace(plan, kill_every_s=_time(piece, asked["every"]))
        else:
            pause = asked["pause"]
            pause_s = _NODE_PAUSE_S if pause is None else _time(piece, pause)
            fault = NodeFault(node=asked["node"], at_s=_time(piece, asked["at"]), pause_s=pause_s)
            plan = replace(plan, nodes=(*plan.nodes, fault))
    if not plan.kinds or plan.oom_rate > 1 or plan.kill_every_s < 1:
        raise _refusal(text)
    return replace(plan, nodes=tuple(sorted(plan.nodes, key=lambda fault: fault.at_s)))


def _time(piece: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise _refusal(piece) from error


def _refusal(piece: str) -> UsageError:
    return UsageError(one_line(f"--chaos {piece[:100]}: no such fault; valid: {_VALID}"))


@dataclass(slots=True, kw_only=True)
class Fault:
    """One injected fault; those of steps are one entry for each slot.

    The fields are keys of summary.json.
    """

    number: int
    at_s: float
    """Since the run began to count; of faults of steps, when the first was reported."""
    kind: FaultKind
    target: str
    fate: FaultOutcome = FaultOutcome.NOT_BACK
    became: str = "not back at the end"
    """For the user: `reports again after 4.1 s`."""
    detail: str = ""
    """How the head saw it: the slot's reason, or which slots are missing."""
    recovered_s: float | None = None
    """From the fault to the first report after it; of a node, to its last slot's."""
    count: int = 1


@dataclass(slots=True, kw_only=True)
class _Open:
    """A fault that is under way."""

    fault: Fault
    struck_s: float
    waiting: dict[str, bool]
    """Slots whose new process has not reported, each with whether the old one is gone."""
    start_s: float | None = None
    """When its node is to be started again; `None`: it was, or only a process was ended."""
    lost: list[str] = field(default_factory=list)
    """Slots that were quarantined meanwhile."""


class Chaos:
    """The faults of a run (`runner.Faults`), and a fleet around its fleet.

    What it does not override of the fleet it hands on.
    """

    _inner: Fleet
    _events: EventLog
    _clock: Clock

    def __init__(self, text: str, seed: int, *, yes_really: bool = False) -> None:
        """Read what the user typed; `UsageError` where that is no plan."""
        self._plan = parse_chaos(text, seed)
        self._yes_really = yes_really
        self.description = one_line(f"{text} (seed {seed})")
        self._faults: list[Fault] = []
        self._open: list[_Open] = []
        self._of_steps: dict[str, Fault] = {}
        self._planned = list(self._plan.nodes)
        self._nodes: dict[str, str] = {}
        self._states: dict[str, SlotState] = {}
        self._chance = Random(seed)  # noqa: S311 - repeatable is what is wanted
        self._began_s = self._calm_s = self._ends_s = self._kill_s = math.inf
        self._began_unix_s = 0.0

    def check(self, environment: Environment) -> None:
        """Refuse, as a `UsageError`, faults that this environment cannot have."""
        is_own, config = environment.mode is not Mode.CLUSTER, environment.config
        if not is_own and not self._yes_really:
            raise UsageError(
                "--chaos kills workers of a real cluster; try it with --rehearse, or say that you "
                "mean it: --yes-really"
            )
        if config.workers.mps and FaultKind.KILL in self._plan.kinds and not is_own:
            raise UsageError(
                "--chaos kill: under MPS that can end every other worker of the card; valid: "
                "--set workers.mps=false"
            )
        if self._plan.nodes and not is_own:
            raise UsageError("--chaos node: only a rehearsal owns the raylets that it could end")
        others = [node for node in config.nodes if node != config.head_node]
        for fault in self._plan.nodes:
            if fault.node not in others:
                why = "carries the head" if fault.node == config.head_node else "is no node here"
                valid = ", ".join(others) or "none, the head's node is the only one"
                raise UsageError(one_line(f"--chaos node:{fault.node} {why}; valid: {valid}"))

    def around(self, fleet: Fleet, events: EventLog, clock: Clock) -> Fleet:
        """Return the fleet with the faults; nothing is struck before the run counts."""
        self._inner, self._events, self._clock = fleet, events, clock
        return cast("Fleet", self)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a fleet has
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        """Place a worker, whose steps run out of memory if the plan says so."""
        self._nodes[spec.slot] = spec.node
        if self._plan.oom_rate > 0:
            faults = {"seed": self._plan.seed, "oom_rate": self._plan.oom_rate}
            settings = {**spec.workload.settings, "chaos": json.dumps(faults)}
            name = f"workers.workloads.chaos:{spec.workload.name}"
            spec = replace(spec, workload=replace(spec.workload, name=name, settings=settings))
        self._inner.place(spec, num_cpus, num_gpus)

    def abandon(self, slot: str) -> None:
        """End the slot's actor."""
        self._nodes.pop(slot, None)
        self._inner.abandon(slot)

    def wait(self, timeout_s: float) -> tuple[Heard, ...]:
        """Strike what is due, then wait for statuses."""
        now_s = self._clock.monotonic_s()
        if self._began_s <= now_s < self._ends_s:
            self._strike(now_s)
        heard = self._inner.wait(timeout_s)
        self._close_what_is_back(self._clock.monotonic_s())
        return heard

    def on_event(self, entry: Mapping[str, Any]) -> None:
        """Take in what the run writes into its event log: when it counts, how slots change, and
        which steps ran out of memory.
        """
        if entry["event"] == "counting":
            self._began_s, duration_s = self._clock.monotonic_s(), float(entry["duration_s"])
            self._began_unix_s = self._clock.unix_s()
            self._ends_s = self._began_s + duration_s
            self._calm_s = self._ends_s - min(_CALM_S, _CALM_SHARE * duration_s)
            self._kill_s = self._began_s + self._plan.kill_every_s
        elif entry["event"] == "state" and entry["slot"]:
            slot, state = entry["slot"], slot_state(entry["to_state"])
            self._states[slot] = state
            for each in self._open:
                if slot in each.waiting:
                    _note(each, slot, state, str(entry["cause"]))
        elif entry["event"] == "chaos" and isinstance(count := entry.get("count"), int):
            slot = entry["slot"]
            if slot not in self._of_steps:
                at_s = max(0.0, self._clock.monotonic_s() - self._began_s)
                fault = self._of_steps[slot] = self._enter(FaultKind.OOM, slot, at_s)
                fault.fate, fault.became = FaultOutcome.SURVIVED, "survived in the same process"
                fault.count = 0
            self._of_steps[slot].count += count

    def told(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return every fault of a run that is over with its outcome, and their counts.

        Of a kind, `injected` is the sum of `recovered` (or survived), `given_up` and `pending` (not
        back when the run ended). `moot` were planned, and the run ended first.
        """
        for each in self._open:
            each.fault.detail = f"waiting for {', '.join(sorted(each.waiting)) or 'its node'}"
        for planned in self._planned:
            fault = self._enter(FaultKind.NODE, planned.node, planned.at_s)
            fault.fate, fault.became = FaultOutcome.MOOT, "never struck: the run ended first"
        self._open, self._planned = [], []
        counts: defaultdict[FaultKind, Counter[str]] = defaultdict(Counter)
        for fault in self._faults:
            counts[fault.kind][fault.fate] += fault.count
        told = [
            {**asdict(fault), "at_unix_s": self._began_unix_s + fault.at_s}
            for fault in self._faults
        ]
        return told, [
            {
                "kind": kind,
                "injected": counts[kind].total() - counts[kind]["moot"],
                "recovered": counts[kind]["survived"] + counts[kind]["recovered"],
                "given_up": counts[kind]["given_up"],
                "pending": counts[kind]["not_back"],
                "moot": counts[kind]["moot"],
            }
            for kind in self._plan.kinds
        ]

    def _enter(self, kind: FaultKind, target: str, at_s: float) -> Fault:
        number = len(self._faults) + 1
        self._faults.append(Fault(number=number, at_s=at_s, kind=kind, target=target))
        return self._faults[-1]

    def _strike(self, now_s: float) -> None:
        """Kill a worker and end nodes if that is due; start nodes whose time has come."""
        struck = {slot for each in self._open for slot in each.waiting}
        at_work = {slot for slot in self._nodes if self._states.get(slot) in _AT_WORK}
        if self._kill_s <= now_s < self._calm_s and (targets := sorted(at_work - struck)):
            self._kill_s = max(self._kill_s + self._plan.kill_every_s, now_s)
            slot = self._chance.choice(targets)
            fault = self._enter(FaultKind.KILL, slot, now_s - self._began_s)
            self._open.append(_Open(fault=fault, struck_s=now_s, waiting={slot: False}))
            self._events.write("chaos_strike", slot=slot, kind=fault.kind.value)
            self._inner.kill(slot)
        for each in self._open:
            if each.start_s is not None and now_s >= each.start_s:
                each.start_s = None
                self._events.write("chaos_node_started", node=each.fault.target)
                self._inner.start_node(each.fault.target)
        down = {each.fault.target for each in self._open if each.start_s is not None}
        for planned in self._planned[:]:
            if now_s - self._began_s >= planned.at_s and planned.node not in down:
                self._planned.remove(planned)
                down.add(planned.node)
                self._end_node(planned, now_s)

    def _end_node(self, planned: NodeFault, now_s: float) -> None:
        for before in [each for each in self._open if each.fault.target == planned.node]:
            before.fault.became = "not back before it was ended again"
            self._open.remove(before)
        slots = [slot for slot, node in self._nodes.items() if node == planned.node]
        waiting = {slot: False for slot in slots if self._states.get(slot) not in _OVER}
        fault = self._enter(FaultKind.NODE, planned.node, now_s - self._began_s)
        start_s = now_s + planned.pause_s
        self._open.append(_Open(fault=fault, struck_s=now_s, waiting=waiting, start_s=start_s))
        self._events.write("chaos_node_ended", node=planned.node)
        self._inner.end_node(planned.node)

    def _close_what_is_back(self, now_s: float) -> None:
        for each in self._open[:]:
            fault, is_node = each.fault, each.fault.kind is FaultKind.NODE
            # A slot that finished, or whose job went to another place, is not waited for.
            if each.start_s is not None or any(slot in self._nodes for slot in each.waiting):
                continue
            self._open.remove(each)
            after = f"after {now_s - each.struck_s:.1f} s"
            fault.fate, fault.recovered_s = FaultOutcome.RECOVERED, now_s - each.struck_s
            fault.became = f"{'all its workers report' if is_node else 'reports'} again {after}"
            if each.lost:
                without = f"back {after} without {', '.join(each.lost)}"
                fault.fate, fault.recovered_s = FaultOutcome.GIVEN_UP, None
                fault.became = without if is_node else f"given up: {fault.detail}"


def _note(each: _Open, slot: str, state: SlotState, cause: str) -> None:
    """Take in that a slot which a fault has struck is in another state now."""
    if state in {HeadState.LOST, HeadState.RESTARTING}:
        each.waiting[slot], each.fault.detail = True, cause
    elif state is HeadState.QUARANTINED:
        del each.waiting[slot]
        each.lost.append(slot)
        each.fault.detail = cause
    elif each.waiting[slot] and isinstance(state, WorkerState):
        del each.waiting[slot]  # a report of the new process
