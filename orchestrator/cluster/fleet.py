"""The fleet on Ray: actors, slices in flight, and Ray's errors in the project's words.

Takes a connection for granted (`connect.py`, `rehearse.py`) and decides nothing: every method does one thing to Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    TaskCancelledError,
)

from orchestrator import hardware
from orchestrator.cluster.actor import WorkerActor
from orchestrator.cluster.base import NodeFact, Seat, SliceFailure, SliceOutcome
from orchestrator.errors import PreflightError
from workers.messages import Directive, Report

#: The label that names a node. Set by `ray start --labels=node=pc1`.
NODE_LABEL = "node"

#: A process that only asks the driver starts in a second or two, on a busy PC in ten.
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Flight:
    slot: str
    incarnation: int
    sequence: int


class RayFleet:
    """See `orchestrator.cluster.base.Fleet`."""

    def __init__(self, address: str) -> None:
        """Take over the connection of this process.

        Args:
            address: Of the head, as connected to.
        """
        self._address = address
        self._last_nodes: tuple[NodeFact, ...] = ()
        self._actors: dict[str, Any] = {}
        self._flights: dict[Any, _Flight] = {}

    def nodes(self) -> tuple[NodeFact, ...]:
        """See `Fleet.nodes`. While Ray's own store does not answer, what it last said still stands."""
        try:
            live = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
        except Exception:  # noqa: BLE001 - Ray raises many types when its store restarts
            return self._last_nodes
        self._last_nodes = tuple(
            NodeFact(
                name=node.get("Labels", {}).get(NODE_LABEL),
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                # Ray adds this resource where it sees a card, whatever --num-gpus says.
                shows_card=any(name.startswith("accelerator_type:") for name in node["Resources"]),
            )
            for node in live
            if node["Alive"]
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

    def place(self, seat: Seat) -> None:
        """See `Fleet.place`. Restarts for ever, never repeats a call: counting and patience are the head's."""
        actor_class = ray.remote(WorkerActor)
        self._actors[seat.slot] = actor_class.options(
            num_cpus=seat.num_cpus,
            num_gpus=seat.num_gpus,
            label_selector={NODE_LABEL: seat.node},
            max_restarts=-1,
            max_task_retries=0,
        ).remote()

    def submit(self, directive: Directive) -> None:
        """See `Fleet.submit`."""
        ref = self._actors[directive.spec.slot].run_slice.remote(directive)
        self._flights[ref] = _Flight(directive.spec.slot, directive.incarnation, directive.sequence)

    def wait(self, timeout_s: float) -> tuple[SliceOutcome, ...]:
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
        outcomes = [_outcome(ref, self._flights.pop(ref)) for ref in refs if ref in done]
        return tuple(outcome for outcome in outcomes if outcome is not None)

    def forget(self, slot: str) -> None:
        """See `Fleet.forget`."""
        for ref in [ref for ref, flight in self._flights.items() if flight.slot == slot]:
            self._drop(ref)

    def cancel(self, slot: str, sequence: int) -> None:
        """See `Fleet.cancel`."""
        for ref in [r for r, f in self._flights.items() if (f.slot, f.sequence) == (slot, sequence)]:
            self._drop(ref)

    def restart(self, slot: str) -> None:
        """See `Fleet.restart`."""
        ray.kill(self._actors[slot], no_restart=False)

    def abandon(self, slot: str) -> None:
        """See `Fleet.abandon`."""
        actor = self._actors.pop(slot, None)
        self.forget(slot)
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def _drop(self, ref: Any) -> None:  # noqa: ANN401 - Ray's reference type is generic over the result
        del self._flights[ref]
        ray.cancel(ref)


def _count_cards() -> int:
    return len(hardware.cards())


def _outcome(ref: Any, flight: _Flight) -> SliceOutcome | None:  # noqa: ANN401 - as above
    try:
        report: Report = ray.get(ref)
    except TaskCancelledError:
        return None
    except RayError as error:
        return SliceOutcome(
            slot=flight.slot,
            incarnation=flight.incarnation,
            sequence=flight.sequence,
            failure=_failure(error),
            text=_first_line(str(error)),
        )
    return SliceOutcome(slot=flight.slot, incarnation=flight.incarnation, sequence=flight.sequence, report=report)


def _failure(error: RayError) -> SliceFailure:
    if isinstance(error, ActorUnavailableError):
        return SliceFailure.UNAVAILABLE
    if isinstance(error, ActorDiedError) and getattr(error, "actor_init_failed", False):
        return SliceFailure.UNBUILDABLE
    # RayTaskError is an exception out of `run_slice` itself: the engine lets none out, so it could not be loaded.
    unbuildable = (RayTaskError, RuntimeEnvSetupError, ActorUnschedulableError)
    return SliceFailure.UNBUILDABLE if isinstance(error, unbuildable) else SliceFailure.DIED


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines and lines[0].startswith(("ray::", "\x1b")) else (lines[0][:300] if lines else "")
