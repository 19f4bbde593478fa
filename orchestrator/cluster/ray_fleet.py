"""The fleet on Ray: actors, one poll of each under way, and Ray's errors as values of `core.fleet`.

Needs a connection (`connect.py`, `local_cluster.py`) and decides nothing: every method does one
thing to Ray.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from orchestrator.cluster.actor import WorkerActor
from orchestrator.cluster.command_actor import CommandActor
from orchestrator.cluster.liveness import SILENT_AFTER_S, Pulse
from orchestrator.cluster.node_tasks import (
    ANSWER_S,
    NODE_LABEL,
    answer_of,
    in_a_line,
    live_nodes,
    on_node,
    send_folder,
)
from orchestrator.cluster.raylets import Raylets
from orchestrator.core.fleet import ActorUnreachable, NodeFact, PollResult, StatusReceived
from orchestrator.errors import NoClusterError, PreflightError, UsageError
from workers.host.machine import visible_cards
from workers.messages import Orders, Verdict
from workers.settings import WorkerSpec

#: An actor without news answers a poll after this time, and is polled again.
_POLL_S = 1.0

#: Answers within this time after the first are one turn of the head, unless one of them calls for
#: orders. A turn costs nearly as much for one answer as for ten.
_GATHER_S = 0.1

#: An actor that cannot be reached is polled again after this time. Ray starts its process in 1 to 2
#: s, and a poll costs next to nothing.
_POLL_AGAIN_S = 0.2

#: The key of the head among addresses; nodes have their ids.
_HEAD = "head"

_HEAD_GONE = (
    "the Ray head at {address} has ended, and the cluster with it; what was reported until then "
    "is in the run folder; start the cluster again (`python -m orchestrator up` shows how), then "
    "`python -m orchestrator run --resume`"
)


@dataclass(slots=True)
class _PolledActor:
    """An actor, its orders, and its poll."""

    actor: Any
    orders: Orders | None = None
    poll: Any = None
    """The reference of the answer that is awaited; `None`: no poll is under way."""
    poll_at_s: float = 0.0
    """The earliest time of the next poll (monotonic seconds)."""


class RayFleet:
    """See `orchestrator.core.fleet.Fleet`."""

    def __init__(self, address: str, raylets: Raylets | None) -> None:
        """Take over the connection of this process to the head at `address`.

        `raylets` are this run's own nodes.
        """
        self._raylets = raylets
        self._address = address
        host, _, port = address.rpartition(":")
        self._addresses = {_HEAD: (host.strip("[]"), int(port))}
        """The addresses of the head, and of the raylets that were last listed, by node id."""
        self._pulse = Pulse()
        self._last_nodes: tuple[NodeFact, ...] = ()
        self._actors: dict[str, _PolledActor] = {}

    def nodes(self) -> tuple[NodeFact, ...]:
        """Return the live nodes. If Ray's store does not answer, return its last answer, for some
        seconds.

        Raises:
            NoClusterError: The cluster's head has ended. Ray would say so after 60 s, and end this
                process.
        """
        if self._raylets is not None:
            self._raylets.reap()
        now_s = time.monotonic()
        self._pulse.probe(self._addresses, now_s)
        if (away_s := self._pulse.unanswered_s(_HEAD, now_s)) > 0:
            # A head with an external store (Redis) that is started again is back by then; any other
            # does not come back.
            if away_s > SILENT_AFTER_S:
                raise NoClusterError(_HEAD_GONE.format(address=self._address))
            return self._last_nodes  # Ray would not return before the head answers
        try:
            live = live_nodes()
        except Exception:  # noqa: BLE001 - Ray raises many types when its store restarts
            return self._last_nodes
        self._addresses = {_HEAD: self._addresses[_HEAD]} | {
            node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in live
        }
        self._last_nodes = tuple(
            NodeFact(
                name=node.get("Labels", {}).get(NODE_LABEL),
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                # Ray adds this resource if it finds a card, whatever --num-gpus says.
                shows_card=any(name.startswith("accelerator_type:") for name in node["Resources"]),
                answers=not self._pulse.is_silent(node["NodeID"], now_s),
                refuses=self._pulse.refuses(node["NodeID"]),
            )
            for node in live
        )
        return self._last_nodes

    def address(self) -> str:
        return self._address

    def count_cards(self, node: str) -> int:
        until_s = time.monotonic() + ANSWER_S
        cards, why_not = answer_of(on_node(node, visible_cards).remote(), until_s)
        if why_not is not None:
            raise PreflightError([f"{node} cannot count its cards: {why_not}"])
        return len(cards)

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        # Ray passes the arguments to each new process of the actor, restarts it without limit, and
        # never repeats a call: the head counts and waits.
        kind: Any = WorkerActor if spec.command is None else CommandActor
        given = (spec,) if spec.command is None else (spec, self._folder(spec))
        reserved = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        actor = on_node(spec.node, kind, max_restarts=-1, max_task_retries=0, **reserved)
        self._actors[spec.slot] = _PolledActor(actor.remote(*given))

    def _folder(self, spec: WorkerSpec) -> Any:  # noqa: ANN401 - Ray's reference type has no name
        """Return the reference of a command's folder on its node; `None` if that is this PC, or if
        the command has no folder.
        """
        assert spec.command is not None  # noqa: S101 - the caller checks it
        if spec.command.cwd is None:
            return None
        addresses = {fact.name: fact.address for fact in self._last_nodes}
        if addresses.get(spec.node) == self._own_address():
            return None
        return send_folder(spec)

    def _own_address(self) -> str | None:
        own_id = ray.get_runtime_context().get_node_id()
        return next((fact.address for fact in self._last_nodes if fact.node_id == own_id), None)

    def order(self, slot: str, orders: Orders) -> None:
        self._actors[slot].orders = orders

    def wait(self, timeout_s: float) -> tuple[PollResult, ...]:
        until_s = time.monotonic() + timeout_s
        while True:
            wait_s = min(self._poll_all(), until_s) - time.monotonic()
            heard = self._heard(max(0.0, wait_s))
            if heard or time.monotonic() >= until_s:
                return heard

    def _poll_all(self) -> float:
        """Poll every actor without a poll; return when the next one may be polled."""
        now_s, next_s = time.monotonic(), math.inf
        for polled in self._actors.values():
            if polled.poll is not None or polled.orders is None:
                continue
            if now_s < polled.poll_at_s:
                next_s = min(next_s, polled.poll_at_s)
            else:
                polled.poll = polled.actor.poll.remote(polled.orders, _POLL_S)
        return next_s

    def _heard(self, wait_s: float) -> tuple[PollResult, ...]:
        slots = {each.poll: slot for slot, each in self._actors.items() if each.poll is not None}
        if not slots:
            time.sleep(wait_s)
            return ()
        heard, until_s = list[PollResult](), time.monotonic() + wait_s
        while slots:
            left_s = max(0.0, until_s - time.monotonic())
            ready, _ = ray.wait(list(slots), num_returns=1, timeout=left_s)
            if not ready:
                break
            answer = self._answer(slots.pop(ready[0]), ready[0])
            if not _is_routine(answer):
                until_s = 0.0  # return it with what else is there
            elif not heard:
                until_s = time.monotonic() + _GATHER_S
            heard.append(answer)
        return tuple(heard)

    def kill(self, slot: str) -> None:
        ray.kill(self._actors[slot].actor, no_restart=False)

    def abandon(self, slot: str) -> None:
        polled = self._actors.pop(slot, None)
        if polled is not None:
            ray.kill(polled.actor, no_restart=True)

    def end_node(self, node: str) -> None:
        self._own_raylets(node).end(node)

    def start_node(self, node: str) -> None:
        self._own_raylets(node).start_again(node)

    def _own_raylets(self, node: str) -> Raylets:
        if self._raylets is None:
            raise UsageError(
                f"{node} belongs to the cluster; only a rehearsal can end and start its nodes"
            )
        return self._raylets

    # Ray's reference type has no name.
    def _answer(self, slot: str, ref: Any) -> PollResult:  # noqa: ANN401
        polled = self._actors[slot]
        polled.poll = None
        try:
            return StatusReceived(status=ray.get(ref))
        except RayError as error:
            polled.poll_at_s = time.monotonic() + _POLL_AGAIN_S
            return ActorUnreachable(
                slot=slot, text=in_a_line(error), is_unbuildable=_is_unbuildable(error)
            )


def _is_routine(heard: PollResult) -> bool:
    """Say whether an answer only reports the progress of a process that works."""
    if isinstance(heard, ActorUnreachable):
        return False
    status = heard.status
    has_more = status.died or status.checkpoint or status.events
    return status.is_up and status.verdict is Verdict.OK and not has_more


def _is_unbuildable(error: RayError) -> bool:
    """Say whether no actor of the slot can be created. Other failures pass, or come with the end of
    a process or a node.
    """
    if isinstance(error, ActorDiedError):
        return bool(getattr(error, "actor_init_failed", False))
    # RayTaskError is an exception in `poll` itself, such as a missing module.
    return isinstance(error, RayTaskError | RuntimeEnvSetupError | ActorUnschedulableError)
