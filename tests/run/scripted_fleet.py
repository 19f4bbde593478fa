"""A fleet in virtual time: processes, nodes and slices as Ray treats them, with faults when a script says so.

Nothing sleeps. `wait` moves the clock to the next thing that happens. The fleet keeps its own books
of what was really done, so that a scenario can compare them with those of the supervisor.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.core.fleet import (
    DeathCause,
    NodeFact,
    SliceEnded,
    SliceFailed,
    SliceFailure,
    SliceReported,
)
from orchestrator.run.supervisor import Clock
from tests.factories import CPU, MEMORY, report_of
from workers.messages import (
    Activity,
    Directive,
    Progress,
    Verdict,
    WorkerState,
)
from workers.settings import WorkerSpec

#: Steps of every worker in a second.
STEPS_PER_S = 20

#: Steps between two checkpoints of what trains.
SAVED_EVERY = 50

#: A process needs so long before it takes its first step.
START_S = 2.0

#: For so long after the end of a process its actor cannot be reached.
UNREACHABLE_S = 0.3

#: A node that is started again joins so much later.
JOIN_S = 4.0

#: For so long a lost node is still listed, although it no longer answers.
LISTED_S = 15.0


class VirtualClock(Clock):
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return 1.75e9 + self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@dataclass(eq=False)
class _Slice:
    directive: Directive
    forgotten: bool = False
    began_s: float | None = None
    """When its first step began; `None` while it is queued."""

    @property
    def steps(self) -> int:
        """Good steps that it does if nothing happens."""
        wanted = max(1, int(self.directive.duration_s * STEPS_PER_S))
        limit = self.directive.step_limit
        return wanted if limit is None else min(wanted, limit)


@dataclass(eq=False)
class _Process:
    up_at_s: float
    queue: list[_Slice] = field(default_factory=list)
    hangs: bool = False
    corrupted: str | None = None
    train_step: int = 0
    state: str | None = None
    """Of what it trains, once it has been given work."""


@dataclass(eq=False)
class _Actor:
    node: str
    process: _Process | None
    reachable_at_s: float = 0.0


class ScriptedFleet:
    """See `orchestrator.core.fleet.Fleet`."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.began_s = clock.now_s
        self.placed: list[str] = []
        self.directives: dict[str, list[Directive]] = {}
        """Each slot's, in the order in which they were submitted."""
        self.really_done: Counter[str] = Counter()
        """Good steps of each slot, told of or not."""
        self.told: Counter[str] = Counter()
        """Good steps of each slot in reports that came out of `wait`."""
        self.cause: DeathCause | None = None
        """What `why_ended` answers."""
        self.activity: dict[str, Activity | None] = {}
        """What `watch` answers for a slot whose process does not report."""
        self.says: dict[str, Mapping[str, Any]] = {}
        """Slot -> what every report of it says, beside the usual."""
        self.finished_after: dict[str, int] = {}
        """Slot -> the steps after which its work is done."""
        self.trains: set[str] = set()
        """Slots that tell their progress, an optimiser step for each step, with a checkpoint of every 50th."""
        self.saved: Counter[str] = Counter()
        """Of each slot the step of its last checkpoint."""
        self.redone: Counter[str] = Counter()
        """Steps that a slot had told of and had to do again."""
        self.start_s: dict[str, float] = {}
        """Slot -> how long its processes take to start, if not `START_S`."""
        self.dies_at_once: set[str] = set()
        """Slots whose processes die in their first step."""
        self.unbuildable: set[str] = set()
        self.on_submit: Callable[[str, Directive], None] | None = None
        self.restarts: list[str] = []
        self.abandoned: list[str] = []
        self._nodes: dict[str, NodeFact] = {}
        self._node_count = 0
        self._without_power: set[str] = set()
        """The ids of nodes that were lost; some are still listed."""
        self._actors: dict[str, _Actor] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now_s = clock.now_s
        self._ended: list[SliceEnded] = []

    # The script

    def at(self, after_s: float, action: Callable[[], object]) -> None:
        """Let something happen so long after the beginning."""
        self._schedule(self.began_s + after_s, action)

    def join(self, name: str, *, cpus: float = 64.0) -> None:
        """Let a node join, or join again as another raylet."""
        self._node_count += 1
        node_id = f"{name}#{self._node_count}"
        self._nodes[node_id] = NodeFact(
            name=name, node_id=node_id, address="10.0.0.1", cpus=cpus, gpus=1.0
        )
        for slot, actor in self._actors.items():
            if actor.node == name and actor.process is None:
                actor.process = self._new_process(slot)

    def leave(self, name: str) -> None:
        """Let a node go as one that was stopped does: it is listed no more, and its processes end."""
        self._nodes = {node_id: fact for node_id, fact in self._nodes.items() if fact.name != name}
        self._end_processes_of(name)

    def lose(self, name: str) -> None:
        """Cut a node's power: it no longer answers, its processes are gone, and Ray lists it for a while."""
        for node_id, fact in list(self._nodes.items()):
            if fact.name == name:
                self.silence(name)
                self._without_power.add(node_id)
                self._schedule(
                    self._now_s + LISTED_S, lambda gone=node_id: self._nodes.pop(gone, None)
                )
        self._end_processes_of(name)

    def silence(self, name: str, *, silent: bool = True, refuses: bool = False) -> None:
        """Let a node not answer, whatever its workers do.

        Or say itself that nothing of Ray runs there any more.
        """
        for node_id, fact in self._nodes.items():
            if fact.name == name and node_id not in self._without_power:
                self._nodes[node_id] = replace(fact, answers=not silent, refuses=refuses)

    def kill(self, slot: str) -> None:
        """End a slot's process by SIGKILL; Ray starts another."""
        self._end_process(slot, SliceFailure.DIED)
        self._actors[slot].process = self._new_process(slot)

    def hang(self, slot: str) -> None:
        """Let the slot's process not end the step it is in."""
        self._process(slot).hangs = True

    def corrupt(self, slot: str) -> None:
        """Let the device of the slot's process stop answering."""
        self._process(slot).corrupted = "CUDA error: an illegal memory access was encountered"

    def has_process(self, slot: str) -> bool:
        """Whether the slot has a process that can be ended."""
        return slot in self._actors and self._actors[slot].process is not None

    def has_node(self, name: str) -> bool:
        """Whether a node of this name is listed."""
        return any(fact.name == name for fact in self._nodes.values())

    def head_stands_still(self, seconds: float) -> None:
        """Suspend the head, and only the head."""
        self.clock.now_s += seconds

    def machine_stands_still(self, seconds: float) -> None:
        """Suspend everything, as a virtual machine is: what was to happen happens so much later."""
        self.clock.now_s += seconds
        self._agenda = [(at_s + seconds, number, action) for at_s, number, action in self._agenda]

    # The protocol

    def nodes(self) -> tuple[NodeFact, ...]:
        return tuple(self._nodes.values())

    def address(self) -> str:
        return "10.0.0.1:6379"

    def count_cards(self, node: str) -> int:
        del node
        return 1

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        assert spec.slot not in self._actors, "a slot has one actor at a time"
        self._now_s = self.clock.now_s
        self.placed.append(spec.slot)
        # On a node that went just now the actor waits until there is one of that name again.
        process = self._new_process(spec.slot) if self._has(spec.node) else None
        self._actors[spec.slot] = _Actor(spec.node, process)

    def submit(self, slot: str, directive: Directive) -> None:
        assert slot in self._actors, "nothing is sent to an actor that was ended"
        if self.on_submit is not None:
            self.on_submit(slot, directive)
        self.directives.setdefault(slot, []).append(directive)
        self._now_s = self.clock.now_s
        actor, work = self._actors[slot], _Slice(directive)
        if slot in self.unbuildable:
            self._fail(slot, work, SliceFailure.UNBUILDABLE)
        elif actor.process is None or self._now_s < actor.reachable_at_s:
            self._fail(slot, work, SliceFailure.UNAVAILABLE)
        else:
            self._reaches(slot, actor.process, directive)
            actor.process.queue.append(work)
            if len(actor.process.queue) == 1:
                self._begin(slot, actor.process)

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        until_s = self.clock.now_s + (timeout_s if self._is_busy() else 0.0)
        while self._agenda and self._agenda[0][0] <= (
            self.clock.now_s if self._ended else max(until_s, self.clock.now_s)
        ):
            self._now_s, _, action = heapq.heappop(self._agenda)
            self.clock.now_s = max(self.clock.now_s, self._now_s)
            action()
        ended, self._ended = self._ended, []
        if not ended:
            self.clock.now_s = max(self.clock.now_s, until_s)
        self._now_s = self.clock.now_s
        for each in ended:
            if isinstance(each, SliceReported):
                self.told[each.slot] += each.report.counts.steps_ok
        return tuple(ended)

    def forget(self, slot: str) -> None:
        actor = self._actors.get(slot)
        if actor is not None and actor.process is not None:
            for work in actor.process.queue:
                work.forgotten = True
        self._ended = [
            ended for ended in self._ended if ended.slot != slot or isinstance(ended, SliceReported)
        ]

    def restart(self, slot: str) -> None:
        self._now_s = self.clock.now_s
        self.restarts.append(slot)
        self._end_process(slot, SliceFailure.DIED)
        actor = self._actors[slot]
        actor.process = self._new_process(slot) if self._has(actor.node) else None

    def abandon(self, slot: str) -> None:
        self._now_s = self.clock.now_s
        assert slot in self._actors, "an actor is ended once"
        self.abandoned.append(slot)
        self.forget(slot)
        self._end_process(slot, SliceFailure.DIED)
        del self._actors[slot]

    def why_ended(self, slot: str) -> DeathCause | None:
        del slot
        return self.cause

    def watch(self, silent: Collection[str]) -> Mapping[str, Activity | None]:
        return {slot: self.activity[slot] for slot in silent if slot in self.activity}

    def end_node(self, node: str) -> None:
        self._now_s = self.clock.now_s
        self.lose(node)

    def start_node(self, node: str) -> None:
        self._schedule(self.clock.now_s + JOIN_S, lambda: self.join(node))

    # How it works

    def _schedule(self, at_s: float, action: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (at_s, self._number, action))

    def _has(self, node: str) -> bool:
        return any(
            fact.name == node and id_ not in self._without_power
            for id_, fact in self._nodes.items()
        )

    def _is_busy(self) -> bool:
        processes = (actor.process for actor in self._actors.values() if actor.process is not None)
        return bool(self._ended) or any(
            not work.forgotten for process in processes for work in process.queue
        )

    def _process(self, slot: str) -> _Process:
        process = self._actors[slot].process
        assert process is not None, f"{slot} has no process"
        return process

    def _new_process(self, slot: str) -> _Process:
        return _Process(
            up_at_s=self._now_s + self.start_s.get(slot, START_S), train_step=self.saved[slot]
        )

    def _begin(self, slot: str, process: _Process) -> None:
        """Let the first slice of the queue run to its end, whatever that will be."""
        work = process.queue[0]
        work.began_s = began_s = max(self._now_s, process.up_at_s)
        if slot in self.dies_at_once:
            self._schedule(began_s, lambda: self._if_alive(slot, process, lambda: self.kill(slot)))
        ends_at_s = began_s + work.steps / STEPS_PER_S
        self._schedule(
            ends_at_s, lambda: self._if_alive(slot, process, lambda: self._end(slot, process, work))
        )

    def _if_alive(self, slot: str, process: _Process, action: Callable[[], None]) -> None:
        actor = self._actors.get(slot)
        if actor is not None and actor.process is process and not process.hangs:
            action()

    def _end(self, slot: str, process: _Process, work: _Slice) -> None:
        process.queue.remove(work)
        left = self._left(slot, process, work)
        done = min(work.steps, left) if process.corrupted is None else 0
        self.really_done[slot] += done
        assert work.began_s is not None
        report: dict[str, Any] = {
            "steps_ok": done,
            "wall_s": self._now_s - work.began_s,
            "device": CPU,
            "memory": MEMORY,
            "resume": {"done": self.really_done[slot]},
        }
        if slot in self.finished_after and done == left:
            report |= {
                "verdict": Verdict.DONE,
                "state": WorkerState.DONE,
                "reason": "all its work is done",
            }
        if process.corrupted is not None:
            report |= {"verdict": Verdict.CONTEXT_CORRUPTED, "reason": process.corrupted}
        if slot in self.trains:
            process.train_step += done
            self.saved[slot] = process.train_step // SAVED_EVERY * SAVED_EVERY
            loss = 10.0 / (1 + process.train_step)
            report["progress"] = Progress(
                train_step=process.train_step, saved_step=self.saved[slot], loss=loss
            )
        directive = work.directive
        report |= self._more(slot, process, directive, done)
        report |= self.says.get(slot, {})
        told = report_of(slot, directive.incarnation, directive.sequence, **report)
        self._ended.append(SliceReported(report=told))
        if process.queue:
            self._begin(slot, process)

    def _reaches(self, slot: str, process: _Process, directive: Directive) -> None:
        """Do what a process does with a directive when that comes."""

    def _left(self, slot: str, process: _Process, work: _Slice) -> int:
        """Return how many steps of its work a slot has before it, or as many as the slice has."""
        del process
        done = self.really_done[slot]
        return self.finished_after.get(slot, done + work.steps) - done

    def _more(
        self, slot: str, process: _Process, directive: Directive, done: int
    ) -> dict[str, Any]:
        """Return what else the report of a slice of so many steps says."""
        del slot, process, directive, done
        return {}

    def _end_processes_of(self, node: str) -> None:
        for slot, actor in self._actors.items():
            if actor.node == node:
                self._end_process(slot, SliceFailure.UNAVAILABLE)

    def _end_process(self, slot: str, failure: SliceFailure) -> None:
        actor = self._actors[slot]
        process, actor.process = actor.process, None
        actor.reachable_at_s = self._now_s + UNREACHABLE_S
        if process is not None:
            self.redone[slot] += max(0, process.train_step - self.saved[slot])
        for work in process.queue if process is not None else ():
            if work.began_s is not None:
                self.really_done[slot] += min(
                    work.steps, int(max(0.0, self._now_s - work.began_s) * STEPS_PER_S)
                )
            self._fail(slot, work, failure)

    def _fail(self, slot: str, work: _Slice, failure: SliceFailure) -> None:
        if not work.forgotten:
            text = "The actor died unexpectedly before finishing this task."
            self._ended.append(SliceFailed.of(slot, work.directive, failure, text))
