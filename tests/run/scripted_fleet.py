"""A fleet in virtual time: nodes, actors and programs, with scripted faults.

Nothing sleeps. `wait` moves the clock to the next event. The fleet counts the work that was really
done, so that a scenario can compare these counts with the supervisor's.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.core.fleet import ActorUnreachable, NodeFact, PollResult, StatusReceived
from orchestrator.run.supervisor import Clock
from tests.factories import CPU, MEMORY, status_of
from workers.messages import (
    Begin,
    Cause,
    Ending,
    Orders,
    Progress,
    Quiet,
    Status,
    StepCounts,
    Verdict,
    WorkerEvent,
    WorkerState,
)
from workers.settings import PolicyState, WorkerSpec

#: Steps of each worker in 1 s.
STEPS_PER_S = 20

#: Steps between two checkpoints of a training.
SAVED_EVERY = 50

#: Time from the start of a process to its first step.
START_S = 2.0

#: Time until the answer to a poll without news, and to a poll with news.
POLL_S = 1.0
AT_ONCE_S = 0.05

#: Time from the end of an actor's process to its next process.
UNREACHABLE_S = 0.3

#: Time from the restart of a node to its joining.
JOIN_S = 4.0

#: Time for which a lost node is still listed, although it no longer answers.
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
class Process:
    """The program of a slot."""

    incarnation: int
    up_at_s: float
    at_s: float
    """The time up to which its steps are done."""
    done: int = 0
    counted: int = 0
    """Steps in the last answer that reached the head."""
    is_alive: bool = True
    hangs_since_s: float | None = None
    corrupted: str | None = None
    holds: bool = False
    saves: int = 0
    train_step: int = 0
    state: str | None = None
    """The state of its training, after it has begun."""
    extra: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    told: Status | None = None
    """Its last status."""


@dataclass(eq=False)
class _Actor:
    node: str
    name: str | None = None
    """The name of the actor's process; `None`: there is none."""
    reachable_at_s: float = 0.0
    orders: Orders | None = None
    poll: object | None = None
    """The current poll."""
    process: Process | None = None
    """The last program that the actor started."""
    news: list[WorkerEvent] = field(default_factory=list)
    heard: int = 0
    """The number of events before `news`."""


class ScriptedFleet:
    """See `orchestrator.core.fleet.Fleet`."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.began_s = clock.now_s
        self.placed: list[str] = []
        self.begun: dict[str, list[Orders]] = {}
        """The first orders of each process of a slot."""
        self.processes: dict[str, list[Process]] = {}
        self.really_done: Counter[str] = Counter()
        """Good steps of each slot, reported or not."""
        self.lost_answers = 0.0
        """Share of the answers that are lost."""
        self.says: dict[str, Mapping[str, Any]] = {}
        """Changed fields of every status, keyed by slot."""
        self.finished_after: dict[str, int] = {}
        """Number of steps after which a slot's work is done, keyed by slot."""
        self.trains: set[str] = set()
        """Slots that report one optimiser step for each step, with a checkpoint at every 50th."""
        self.saved: Counter[str] = Counter()
        """The step of the last checkpoint, keyed by slot."""
        self.redone: Counter[str] = Counter()
        """Reported steps that a slot had to repeat, keyed by slot."""
        self.start_s: dict[str, float] = {}
        """Start times of processes other than `START_S`, keyed by slot."""
        self.dies_at_once: set[str] = set()
        """Slots whose processes die in their first step."""
        self.unbuildable: set[str] = set()
        self.on_order: Callable[[str, Orders], None] | None = None
        self.abandoned: list[str] = []
        self._chance = random.Random(7)  # noqa: S311 - must be repeatable
        self._nodes: dict[str, NodeFact] = {}
        self._node_count = 0
        self._actor_count = 0
        self._without_power: set[str] = set()
        """The ids of lost nodes; some are still listed."""
        self._actors: dict[str, _Actor] = {}
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0
        self._now_s = clock.now_s
        self._heard: list[PollResult] = []

    # The script

    def at(self, after_s: float, action: Callable[[], object]) -> None:
        """Call `action` `after_s` seconds after the beginning."""
        self._schedule(self.began_s + after_s, action)

    def join(self, name: str) -> None:
        """Let a node join, or join again as another raylet."""
        self._node_count += 1
        node_id = f"{name}#{self._node_count}"
        self._nodes[node_id] = NodeFact(
            name=name, node_id=node_id, address="10.0.0.1", cpus=64.0, gpus=1.0
        )
        for actor in self._actors.values():
            if actor.node == name and actor.name is None:
                self._start_actor(actor)

    def leave(self, name: str) -> None:
        """Remove a node as a stop does: it is no longer listed, and its processes end."""
        self._nodes = {node_id: fact for node_id, fact in self._nodes.items() if fact.name != name}
        self._end_actors_of(name)

    def lose(self, name: str) -> None:
        """Cut a node's power: it is silent, its processes end, and Ray lists it for a while."""
        for node_id, fact in list(self._nodes.items()):
            if fact.name == name:
                self.silence(name)
                self._without_power.add(node_id)
                self._schedule(
                    self._now_s + LISTED_S, lambda gone=node_id: self._nodes.pop(gone, None)
                )
        self._end_actors_of(name)

    def silence(self, name: str, *, silent: bool = True, refuses: bool = False) -> None:
        """Make a node silent, whatever its workers do.

        With `refuses`, the node itself reports that Ray no longer runs there.
        """
        for node_id, fact in self._nodes.items():
            if fact.name == name and node_id not in self._without_power:
                self._nodes[node_id] = replace(fact, answers=not silent, refuses=refuses)

    def end_program(self, slot: str, text: str = "killed by signal 9") -> None:
        """End the slot's program, which its actor notices."""
        process = self._process(slot)
        self._end(slot, process)
        assert process.told is not None or process.at_s <= process.up_at_s
        died = Ending(cause=Cause.KILLED, text=text)
        told = process.told or status_of(slot, process.incarnation, is_up=False)
        process.told = replace(told, died=died)
        self._answer_soon(slot)

    def hang(self, slot: str) -> None:
        """Make the current step of the slot's process never end."""
        process = self._process(slot)
        self._work(slot, process)
        process.hangs_since_s = self._now_s

    def corrupt(self, slot: str) -> None:
        """Make the device of the slot's process fail."""
        process = self._process(slot)
        self._work(slot, process)
        process.corrupted = "CUDA error: an illegal memory access was encountered"

    def tell(self, slot: str, *events: WorkerEvent) -> None:
        """Add events of the slot's process."""
        self._actors[slot].news.extend(events)

    def has_process(self, slot: str) -> bool:
        """Return whether the slot has a live process."""
        actor = self._actors.get(slot)
        return actor is not None and actor.process is not None and actor.process.is_alive

    def has_node(self, name: str) -> bool:
        """Return whether a node with this name is listed."""
        return any(fact.name == name for fact in self._nodes.values())

    def head_stands_still(self, seconds: float) -> None:
        """Suspend the head, and only the head."""
        self.clock.now_s += seconds

    def machine_stands_still(self, seconds: float) -> None:
        """Suspend everything, like a virtual machine: all scheduled events are delayed."""
        self.clock.now_s += seconds
        self._now_s += seconds
        self._agenda = [(at_s + seconds, number, action) for at_s, number, action in self._agenda]
        for processes in self.processes.values():
            for process in processes:
                process.at_s += seconds
                process.up_at_s += seconds

    def unseen(self, slot: str) -> int:
        """Return the number of good steps that no answer has reported to the head."""
        return sum(process.done - process.counted for process in self.processes.get(slot, []))

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
        actor = self._actors[spec.slot] = _Actor(spec.node)
        # If the node has just left, the actor waits for another node with this name.
        if self._has(spec.node):
            self._start_actor(actor)

    def order(self, slot: str, orders: Orders) -> None:
        assert slot in self._actors, "nothing is ordered of an actor that was ended"
        if self.on_order is not None:
            self.on_order(slot, orders)
        self._actors[slot].orders = orders

    def wait(self, timeout_s: float) -> tuple[PollResult, ...]:
        self._now_s = self.clock.now_s
        for slot, actor in self._actors.items():
            if actor.orders is not None and actor.poll is None:
                self._poll(slot, actor)
        until_s = self.clock.now_s + timeout_s
        while self._agenda and self._agenda[0][0] <= (
            self.clock.now_s if self._heard else max(until_s, self.clock.now_s)
        ):
            at_s, _, action = heapq.heappop(self._agenda)
            self._now_s = max(self._now_s, at_s)
            self.clock.now_s = max(self.clock.now_s, at_s)
            action()
        heard, self._heard = self._heard, []
        if not heard:
            self.clock.now_s = max(self.clock.now_s, until_s)
        self._now_s = self.clock.now_s
        return tuple(heard)

    def kill(self, slot: str) -> None:
        """End the slot's actor by SIGKILL; Ray starts another process for the actor."""
        self._end_actor(slot)
        actor = self._actors[slot]
        if self._has(actor.node):
            self._start_actor(actor)

    def abandon(self, slot: str) -> None:
        self._now_s = self.clock.now_s
        assert slot in self._actors, "an actor is ended once"
        self.abandoned.append(slot)
        self._end_actor(slot)
        del self._actors[slot]
        self._heard = [heard for heard in self._heard if heard.slot != slot]

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

    def _process(self, slot: str) -> Process:
        process = self._actors[slot].process
        assert process is not None, f"{slot} has no process"
        assert process.is_alive, f"the process of {slot} has ended"
        return process

    def _start_actor(self, actor: _Actor) -> None:
        self._actor_count += 1
        actor.name = f"actor {self._actor_count}"
        actor.process, actor.news, actor.heard = None, [], 0
        actor.reachable_at_s = max(actor.reachable_at_s, self._now_s)

    def _end_actors_of(self, node: str) -> None:
        for slot, actor in self._actors.items():
            if actor.node == node:
                self._end_actor(slot)

    def _end_actor(self, slot: str) -> None:
        actor = self._actors[slot]
        actor.name, actor.reachable_at_s = None, self._now_s + UNREACHABLE_S
        if actor.process is not None and actor.process.is_alive:
            self._end(slot, actor.process)
        if actor.poll is not None:
            actor.poll = None
            self._heard.append(ActorUnreachable(slot=slot, text="The actor died."))

    def _end(self, slot: str, process: Process) -> None:
        self._work(slot, process)
        process.is_alive = False
        progress = None if process.told is None else process.told.progress
        told_step = 0 if progress is None else progress.train_step or 0
        self.redone[slot] += max(0, told_step - self.saved[slot])

    def _poll(self, slot: str, actor: _Actor) -> None:
        """Begin a poll with the current orders, and schedule its end."""
        assert actor.orders is not None
        actor.poll = poll = object()
        if slot in self.unbuildable:
            self._comes_to_nothing(slot, actor, poll, is_unbuildable=True)
        elif actor.name is None or self._now_s < actor.reachable_at_s:
            self._comes_to_nothing(slot, actor, poll, is_unbuildable=False)
        else:
            is_news = self._obey(slot, actor, actor.orders)
            at_s = self._now_s + (AT_ONCE_S if is_news else POLL_S)
            self._schedule(at_s, lambda: self._answer(slot, actor, poll))

    def _comes_to_nothing(
        self, slot: str, actor: _Actor, poll: object, *, is_unbuildable: bool
    ) -> None:
        def end() -> None:
            if actor.poll is poll:
                actor.poll = None
                text = "The actor died unexpectedly before finishing this task."
                self._heard.append(
                    ActorUnreachable(slot=slot, text=text, is_unbuildable=is_unbuildable)
                )

        self._schedule(self._now_s + UNREACHABLE_S, end)

    def _obey(self, slot: str, actor: _Actor, orders: Orders) -> bool:
        """Follow orders as an actor does; return whether the result must be reported at once."""
        del actor.news[: max(0, orders.heard - actor.heard)]
        actor.heard = max(actor.heard, orders.heard)
        if orders.actor != actor.name:
            return True
        process = actor.process
        if process is not None and process.is_alive:
            if not orders.runs or orders.incarnation > process.incarnation:
                self._end(slot, process)
            else:
                return self._heed(slot, process, orders)
        if not orders.runs or (process is not None and orders.incarnation <= process.incarnation):
            return False
        assert orders.begin is not None, "a process is told how to begin"
        up_at_s = self._now_s + self.start_s.get(slot, START_S)
        actor.process = process = Process(orders.incarnation, up_at_s, up_at_s)
        process.train_step = self.saved[slot]
        self.processes.setdefault(slot, []).append(process)
        self.begun.setdefault(slot, []).append(orders)
        sent = None if orders.copy is None else orders.copy.data
        self._begins(slot, process, replace(orders.begin, checkpoint=sent))
        self._heed(slot, process, orders)
        self._schedule(up_at_s, lambda: self._comes_up(slot, actor, process))
        return True

    def _comes_up(self, slot: str, actor: _Actor, process: Process) -> None:
        if process.is_alive:
            actor.news.append(WorkerEvent(name="device_opened", at_unix_s=self.clock.unix_s()))
            if slot in self.dies_at_once:
                self.end_program(slot)
            self._answer_soon(slot)

    def _heed(self, slot: str, process: Process, orders: Orders) -> bool:
        self._work(slot, process)
        is_news = process.holds != orders.holds or process.saves != orders.saves
        if orders.saves > process.saves and slot in self.trains:
            self.saved[slot] = process.train_step
        process.holds, process.saves = orders.holds, orders.saves
        return is_news and self._now_s >= process.up_at_s

    def _answer_soon(self, slot: str) -> None:
        actor = self._actors[slot]
        if actor.poll is not None:
            poll = actor.poll
            self._schedule(self._now_s, lambda: self._answer(slot, actor, poll))

    def _answer(self, slot: str, actor: _Actor, poll: object) -> None:
        if actor.poll is not poll:
            return
        actor.poll, process = None, actor.process
        status = status_of(slot, None, is_up=False)
        if process is not None:
            status = self._told(slot, process)
        if self._chance.random() < self.lost_answers:
            return
        if process is not None:
            process.counted = status.counts.steps_ok
        news = actor.heard + len(actor.news)
        status = replace(status, actor=actor.name or "", news=news, events=tuple(actor.news))
        self._heard.append(StatusReceived(status=status))

    def _told(self, slot: str, process: Process) -> Status:
        """Return the current status of a process, or the last one if it has ended."""
        if not process.is_alive:
            return process.told or status_of(slot, process.incarnation, is_up=False)
        if self._now_s < process.up_at_s:
            return status_of(slot, process.incarnation, is_up=False)
        if process.hangs_since_s is not None:
            told = process.told or status_of(slot, process.incarnation, is_up=False)
            seconds = self._now_s - process.hangs_since_s
            return replace(told, quiet=Quiet(seconds=seconds, idle_s=seconds))
        self._work(slot, process)
        process.told = self._status(slot, process)
        return process.told

    def _work(self, slot: str, process: Process) -> None:
        """Do the steps of the process up to now."""
        stands = process.holds or process.corrupted is not None or not process.is_alive
        if process.hangs_since_s is not None or self._now_s <= process.at_s:
            return
        steps = 0 if stands else int((self._now_s - process.at_s) * STEPS_PER_S + 1e-9)
        done = min(steps, self._left(slot, process, steps))
        process.at_s = self._now_s if stands or done < steps else process.at_s + steps / STEPS_PER_S
        process.done += done
        self.really_done[slot] += done
        self._did(slot, process, done)

    def _status(self, slot: str, process: Process) -> Status:
        says = dict(self.says.get(slot, {}))
        process.extra.update(
            {name: says.pop(name) for name in list(says) if name in StepCounts.__slots__}
        )
        process.errors = process.errors + 1 if "error" in says else 0
        status: dict[str, Any] = {
            **process.extra,
            "steps_ok": process.done,
            "errors_in_a_row": process.errors,
            "wall_s": process.at_s - process.up_at_s,
            "device": CPU,
            "memory": MEMORY,
            "resume": PolicyState(failures=self.really_done[slot]),
            "is_held": process.holds,
            "saves": process.saves,
        }
        if self._left(slot, process, 1) == 0:
            status |= {
                "verdict": Verdict.DONE,
                "state": WorkerState.DONE,
                "reason": "all its work is done",
            }
        if process.corrupted is not None:
            status |= {"verdict": Verdict.CONTEXT_CORRUPTED, "reason": process.corrupted}
        if slot in self.trains:
            loss = 10.0 / (1 + process.train_step)
            status["progress"] = Progress(
                train_step=process.train_step, saved_step=self.saved[slot], loss=loss
            )
        return status_of(
            slot, process.incarnation, **{**status, **self._more(slot, process), **says}
        )

    # What others change

    def _begins(self, slot: str, process: Process, begin: Begin) -> None:
        """Handle the first orders of a process."""

    def _left(self, slot: str, process: Process, steps: int) -> int:
        """Return how many of `steps` steps a slot still has to do."""
        del process
        if slot not in self.finished_after:
            return steps
        return min(steps, self.finished_after[slot] - self.really_done[slot])

    def _did(self, slot: str, process: Process, steps: int) -> None:
        """Record that a process has done `steps` more steps."""
        if slot in self.trains:
            process.train_step += steps
            saved = process.train_step // SAVED_EVERY * SAVED_EVERY
            self.saved[slot] = max(self.saved[slot], saved)

    def _more(self, slot: str, process: Process) -> dict[str, Any]:
        """Return additional fields of a status."""
        del slot, process
        return {}
