"""The fleet on Ray: actors, slices in flight, and Ray's errors as values of `core.fleet`.

Needs a connection (`connect.py`, `local_cluster.py`) and decides nothing: every method does one thing to
Ray.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from orchestrator.cluster import local_gpus
from orchestrator.cluster.actor import WorkerActor
from orchestrator.cluster.exit_cause import cause_of_death
from orchestrator.cluster.liveness import Pulse
from orchestrator.core.fleet import (
    DeathCause,
    NodeFact,
    NodePower,
    Reservation,
    SliceEnded,
    SliceFailed,
    SliceFailure,
    SliceReported,
)
from orchestrator.errors import PreflightError, UsageError
from workers.messages import Directive, Report
from workers.settings import WorkerSpec

#: The label that names a node. Set by `ray start --labels=node=pc1`.
NODE_LABEL = "node"

#: What Ray's one type for "the actor is temporarily unavailable" means, by its words (Ray 2.60): the connection broke
#: under the call, or there was none to send it over. "The actor was restarted" is neither: the call may have come just
#: after a death that is known already.
_UNAVAILABLE = {
    "Socket closed": SliceFailure.DIED,
    "Connection reset by peer": SliceFailure.DIED,
    "actor is restarting": SliceFailure.UNSENT,
    "Failed to connect to remote host": SliceFailure.UNSENT,
}

#: A process that only asks the driver starts in a second or two, on a busy PC in ten.
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Flight:
    slot: str
    incarnation: int
    sequence: int
    given_up: bool = False
    """Its failure is no longer returned. A report that still arrives is, to be refused and logged."""


class RayFleet:
    """See `orchestrator.core.fleet.Fleet`."""

    def __init__(self, address: str, power: NodePower | None) -> None:
        """Take over the connection of this process.

        Args:
            address: Of the head, as connected to.
            power: Ends and starts nodes; `None` where they do not belong to this run.
        """
        self._power = power
        self._address = address
        self._pulse = Pulse()
        self._last_nodes: tuple[NodeFact, ...] = ()
        self._actors: dict[str, Any] = {}
        self._flights: dict[Any, _Flight] = {}
        self._reservations: dict[str, Reservation] = {}
        self._pids: dict[str, int] = {}
        """Process of each slot, as of its last report."""

    def nodes(self) -> tuple[NodeFact, ...]:
        """See `Fleet.nodes`. While Ray's own store does not answer, what it last said still stands."""
        try:
            live = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # no types here
        except Exception:  # noqa: BLE001 - Ray raises many types when its store restarts
            return self._last_nodes
        doors = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in live}
        silent = self._pulse.silent(doors, time.monotonic())
        self._last_nodes = tuple(
            NodeFact(
                name=node.get("Labels", {}).get(NODE_LABEL),
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                # Ray adds this resource where it sees a card, whatever --num-gpus says.
                shows_card=any(name.startswith("accelerator_type:") for name in node["Resources"]),
                answers=node["NodeID"] not in silent,
                refuses=self._pulse.refuses(node["NodeID"]),
            )
            for node in live
        )
        return self._last_nodes

    def address(self) -> str:
        """See `Fleet.address`."""
        return self._address

    def count_cards(self, node: str) -> int:
        """See `Fleet.count_cards`."""
        count = ray.remote(_count_cards).options(num_cpus=0, label_selector={NODE_LABEL: node}).remote()
        try:
            return int(ray.get(count, timeout=_PROBE_TIMEOUT_S))
        except GetTimeoutError as error:
            raise PreflightError(
                [f"{node} started no process in {_PROBE_TIMEOUT_S:.0f} s; see what holds it: ray status"]
            ) from error

    def place(self, reservation: Reservation, spec: WorkerSpec) -> None:
        """See `Fleet.place`.

        Ray hands the constructor's arguments to each new process of the actor. It restarts without a limit and never
        repeats a call: counting and waiting are the head's.
        """
        self._reservations[reservation.slot] = reservation
        actor_class = ray.remote(WorkerActor)
        self._actors[reservation.slot] = actor_class.options(
            num_cpus=reservation.num_cpus,
            num_gpus=reservation.num_gpus,
            label_selector={NODE_LABEL: reservation.node},
            max_restarts=-1,
            max_task_retries=0,
        ).remote(spec)

    def submit(self, slot: str, directive: Directive) -> None:
        """See `Fleet.submit`."""
        ref = self._actors[slot].run_slice.remote(directive)
        self._flights[ref] = _Flight(slot, directive.incarnation, directive.sequence)

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        """See `Fleet.wait`."""
        if not self._flights:
            return ()
        # In order of submission, so that two reports of one slot are never swapped.
        refs = list(self._flights)
        first, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=True)
        if not first:
            return ()
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)
        done = set(ready)
        ended = [(flight := self._flights.pop(ref), self._ended(ref, flight)) for ref in refs if ref in done]
        return tuple(each for flight, each in ended if isinstance(each, SliceReported) or not flight.given_up)

    def forget(self, slot: str) -> None:
        """See `Fleet.forget`. Without `ray.cancel`: a queued slice would run nevertheless (seen with Ray 2.60)."""
        for ref, flight in self._flights.items():
            if flight.slot == slot:
                self._flights[ref] = replace(flight, given_up=True)

    def restart(self, slot: str) -> None:
        """See `Fleet.restart`."""
        ray.kill(self._actors[slot], no_restart=False)

    def abandon(self, slot: str) -> None:
        """See `Fleet.abandon`."""
        actor = self._actors.pop(slot, None)
        self.forget(slot)
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def why_ended(self, slot: str) -> DeathCause | None:
        """See `Fleet.why_ended`."""
        node = self._reservations[slot].node
        address = next((fact.address for fact in self._last_nodes if fact.name == node), None)
        if address is None or slot not in self._pids:
            return None
        cause = cause_of_death(self._pids[slot], address)
        if cause is not None:
            del self._pids[slot]  # told once: the next process to end is another one
        return cause

    def close(self) -> None:
        """Release what does not belong to Ray."""
        self._pulse.close()

    def end_node(self, node: str) -> None:
        """See `Fleet.end_node`."""
        self._switch(node).end(node)

    def start_node(self, node: str) -> None:
        """See `Fleet.start_node`."""
        self._switch(node).start_again(node)

    def _switch(self, node: str) -> NodePower:
        if self._power is None:
            raise UsageError(f"{node} belongs to the cluster; only a rehearsal can end and start its nodes")
        return self._power

    def _ended(self, ref: Any, flight: _Flight) -> SliceEnded:  # noqa: ANN401 - Ray's reference type has no name
        try:
            report: Report = ray.get(ref)
        except RayError as error:
            return SliceFailed(
                slot=flight.slot,
                incarnation=flight.incarnation,
                sequence=flight.sequence,
                failure=_failure(error),
                text=_first_line(str(error)),
            )
        if report.device is not None and not flight.given_up:
            self._pids[flight.slot] = report.device.pid
        return SliceReported(report=report)


def _count_cards() -> int:
    return len(local_gpus.cards())


def _failure(error: RayError) -> SliceFailure:
    if isinstance(error, ActorUnavailableError):
        text = str(error)
        return next((failure for words, failure in _UNAVAILABLE.items() if words in text), SliceFailure.UNAVAILABLE)
    if isinstance(error, ActorDiedError) and getattr(error, "actor_init_failed", False):
        return SliceFailure.UNBUILDABLE
    # RayTaskError is an exception out of `run_slice` itself: the engine lets none out, so it could not be loaded.
    unbuildable = (RayTaskError, RuntimeEnvSetupError, ActorUnschedulableError)
    return SliceFailure.UNBUILDABLE if isinstance(error, unbuildable) else SliceFailure.DIED


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines and lines[0].startswith(("ray::", "\x1b")) else (lines[0][:300] if lines else "")
