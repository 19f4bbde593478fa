"""`run --chaos`: kills workers, makes them run out of memory, and ends nodes, as a seed says.

A fleet that wraps the run's fleet ends processes and nodes; the worker itself raises out-of-memory
errors (`workers/engine/chaos.py`). The supervisor knows of neither. Starts nothing again but the
nodes that it ended, and does not judge the run: states and counters do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, cast

from orchestrator.config.duration import parse_duration
from orchestrator.core.fleet import Fleet, PollResult
from orchestrator.core.slot import HeadState, slot_state
from orchestrator.errors import UsageError, one_line
from orchestrator.record.events import EventLog
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.supervisor import Clock
from workers.messages import WorkerState
from workers.settings import WorkerSpec

#: No worker is killed in the last seconds of a run, or in the last share of a short one, so that
#: its slot can recover before the run is judged.
_CALM_S: Final = 60.0
_CALM_SHARE: Final = 0.2

#: Time for which a node stays down: long enough for Ray to notice.
_NODE_PAUSE_S: Final = 15.0

_VALID: Final = "oom:rate=0.05 (of steps), kill:every=20s (at least 1s), node:NAME@30s"
_TIME: Final = r"[\d.]{1,20}[a-z][\d.a-z]{0,20}"
_FORM: Final = re.compile(
    r"oom:rate=(?P<rate>\d{0,9}\.?\d{1,12})"
    rf"|kill:every=(?P<every>{_TIME})"
    rf"|node:(?P<node>[^@=,]{{1,200}})@(?P<at>{_TIME})",
    re.ASCII,
)

#: A slot in one of these states has a process that may be killed.
_AT_WORK: Final = frozenset(WorkerState) - {WorkerState.DONE, WorkerState.STOPPED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The faults that `--chaos` asks for."""

    oom_rate: float = 0.0
    """Share of the steps that run out of memory, 0..1."""
    kill_every_s: float = math.inf
    """Time between two kills of a random worker."""
    nodes: Mapping[str, float] = field(default_factory=dict)
    """Node -> when it is ended, in seconds since the run began to count."""


def parse_chaos(text: str) -> ChaosPlan:
    """Parse a text such as `oom:rate=0.05;kill:every=20s;node:pc2@30s`.

    `UsageError`: the text is not valid; the error names the wrong part and the valid forms.
    """
    plan, wrong = ChaosPlan(), text
    for piece in filter(None, ("".join(part.split()) for part in text.split(";"))):
        found = _FORM.fullmatch(piece)
        try:
            if found is None:
                raise ValueError  # noqa: TRY301 - handled like an invalid duration
            if found["rate"]:
                plan = replace(plan, oom_rate=float(found["rate"]))
            elif found["every"]:
                plan = replace(plan, kill_every_s=parse_duration(found["every"]))
            else:
                at_s = parse_duration(found["at"])
                plan = replace(plan, nodes={**plan.nodes, found["node"]: at_s})
        except ValueError:
            plan, wrong = ChaosPlan(), piece
            break
    if plan == ChaosPlan() or plan.oom_rate > 1 or plan.kill_every_s < 1:
        raise UsageError(one_line(f"--chaos {wrong[:100]}: no such fault; valid: {_VALID}"))
    return plan


@dataclass(slots=True, kw_only=True)
class Fault:
    """A process or a node that was ended."""

    kind: str
    """`kill` or `node`."""
    target: str
    at_s: float
    """Seconds since the run began to count."""
    waiting: dict[str, bool]
    """Slot whose new process has not reported yet -> whether the old process is gone."""
    fate: str = "not_back"
    """Later `recovered`, or `given_up` if one of its slots was quarantined."""
    recovered_s: float | None = None
    """Time from the fault to the first report of the new process; for a node, of the last slot."""


class Chaos:
    """The faults of a run (`runner.Faults`), and a fleet that wraps the run's fleet.

    Methods of the fleet that this class does not define are passed to the wrapped fleet.
    """

    _inner: Fleet
    _events: EventLog
    _clock: Clock

    def __init__(self, text: str, seed: int, *, yes_really: bool = False) -> None:
        """Parse the text of `--chaos`; `UsageError` if it is not valid."""
        self._plan, self._seed, self._yes_really = parse_chaos(text), seed, yes_really
        self.description = one_line(f"{text} (seed {seed})")
        self._faults: list[Fault] = []
        self._due = [(at_s, node, True) for node, at_s in self._plan.nodes.items()]
        self._nodes: dict[str, str] = {}
        self._at_work: set[str] = set()
        self._chance = Random(seed)  # noqa: S311 - must be repeatable
        self._began_s = self._duration_s = self._kill_s = math.inf

    def check(self, environment: Environment) -> None:
        """Raise `UsageError` if the environment does not allow the faults."""
        is_own, config = environment.mode is not Mode.CLUSTER, environment.config
        if not is_own and not self._yes_really:
            raise UsageError(
                "--chaos kills workers of a real cluster; try it with --rehearse, or say that you "
                "mean it: --yes-really"
            )
        if self._plan.nodes and not is_own:
            raise UsageError("--chaos node: only a rehearsal owns the raylets that it could end")
        others = [node for node in config.nodes if node != config.head_node]
        for node in self._plan.nodes:
            if node not in others:
                valid = ", ".join(others) or "none, the head's node is the only one"
                raise UsageError(one_line(f"--chaos node:{node} cannot be; valid: {valid}"))

    def around(self, fleet: Fleet, events: EventLog, clock: Clock) -> Fleet:
        """Wrap a fleet and return the wrapper. No fault occurs before the run begins to count."""
        self._inner, self._events, self._clock = fleet, events, clock
        return cast("Fleet", self)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a fleet
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        """Place a worker, with the rate of out-of-memory errors of the plan."""
        self._nodes[spec.slot] = spec.node
        memory = replace(spec.memory, remember=False)  # limits of this run are not valid in others
        spec = replace(spec, memory=memory, oom_rate=self._plan.oom_rate, chaos_seed=self._seed)
        self._inner.place(spec, num_cpus, num_gpus)

    def abandon(self, slot: str) -> None:
        """End the slot's actor."""
        self._nodes.pop(slot, None)
        self._inner.abandon(slot)

    def wait(self, timeout_s: float) -> tuple[PollResult, ...]:
        """Cause the faults that are due, then wait for statuses."""
        elapsed_s = self._clock.monotonic_s() - self._began_s
        if 0 <= elapsed_s < self._duration_s:
            self._end_and_start_nodes(elapsed_s)
            self._kill(elapsed_s)
        heard = self._inner.wait(timeout_s)
        self._close_recovered(self._clock.monotonic_s() - self._began_s)
        return heard

    def on_event(self, entry: Mapping[str, Any]) -> None:
        """Follow the run's event log: when the run begins to count, and how slots change state."""
        if entry["event"] == "counting":
            self._began_s = self._clock.monotonic_s()
            self._duration_s = float(entry["duration_s"])
            self._kill_s = self._plan.kill_every_s
        elif entry["event"] == "state" and entry["slot"]:
            slot, state = entry["slot"], slot_state(entry["to_state"])
            (self._at_work.add if state in _AT_WORK else self._at_work.discard)(slot)
            for fault in (fault for fault in self._faults if slot in fault.waiting):
                if state is HeadState.QUARANTINED:
                    fault.fate = "given_up"
                elif state in {HeadState.LOST, HeadState.RESTARTING}:
                    fault.waiting[slot] = True
                elif fault.waiting[slot] and isinstance(state, WorkerState):
                    del fault.waiting[slot]  # the new process has reported

    def injected(self) -> list[dict[str, Any]]:
        """Return every process and node that was ended, and whether it recovered."""
        keys = ("kind", "target", "at_s", "fate", "recovered_s")
        return [{key: getattr(fault, key) for key in keys} for fault in self._faults]

    def _strike(self, kind: str, target: str, at_s: float, slots: Iterable[str]) -> None:
        waiting = dict.fromkeys(slots, False)
        self._faults.append(Fault(kind=kind, target=target, at_s=at_s, waiting=waiting))

    def _kill(self, elapsed_s: float) -> None:
        calm_s = min(_CALM_S, _CALM_SHARE * self._duration_s)
        waiting = {slot for fault in self._faults for slot in fault.waiting}
        targets = sorted(self._at_work & self._nodes.keys() - waiting)
        if targets and self._kill_s <= elapsed_s < self._duration_s - calm_s:
            self._kill_s = max(self._kill_s + self._plan.kill_every_s, elapsed_s)
            slot = self._chance.choice(targets)
            self._strike("kill", slot, elapsed_s, [slot])
            self._events.write("chaos_strike", slot=slot, kind="kill")
            self._inner.kill(slot)

    def _end_and_start_nodes(self, elapsed_s: float) -> None:
        for due in sorted(due for due in self._due if due[0] <= elapsed_s):
            self._due.remove(due)
            _, node, ends = due
            self._events.write(f"chaos_node_{'ended' if ends else 'started'}", node=node)
            if ends:
                self._due.append((elapsed_s + _NODE_PAUSE_S, node, False))
                slots = [slot for slot, its_node in self._nodes.items() if its_node == node]
                self._strike("node", node, elapsed_s, slots)
                self._inner.end_node(node)
            else:
                self._inner.start_node(node)

    def _close_recovered(self, elapsed_s: float) -> None:
        for fault in self._faults:
            # A slot that has finished, or whose job has moved to another place, is not awaited.
            is_awaited = any(slot in self._nodes for slot in fault.waiting)
            if fault.fate == "not_back" and not is_awaited:
                fault.fate, fault.recovered_s = "recovered", elapsed_s - fault.at_s
