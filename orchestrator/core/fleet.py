"""The fleet protocol: what the supervisor asks of a cluster. Knows no Ray; `cluster.ray_fleet`
implements it on Ray.

Covers the messages and the protocol. Does not decide anything about slots.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from workers.host.facts import MachineFacts
from workers.messages import Activity, Directive, Report
from workers.settings import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    """One live node as the cluster shows it."""

    name: str | None
    """Its label `node`, or `None` if it was started without one."""
    node_id: str
    address: str
    cpus: float
    gpus: float
    """As declared with `ray start --num-gpus`, which is not verified."""
    shows_card: bool = True
    """Whether Ray itself found a card there."""
    answers: bool = True
    """Whether it can be reached by our own clock, which is faster than Ray's."""
    refuses: bool = False
    """Whether its machine refused the connection, so that no raylet runs there. Silence may have
    other reasons.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """One live node, and what it said of itself to the doctor (`cluster/node_tasks.py` asks)."""

    name: str | None
    """Its label `node`, or `None` if it was started without one."""
    address: str
    facts: MachineFacts | None = None
    """`None`: it did not answer, see `error`."""
    error: str | None = None
    unreachable: tuple[str, ...] = ()
    """Ports (`host:port`) of other nodes that it could not open."""

    @property
    def title(self) -> str:
        """How people call it."""
        return self.name or self.address


class SliceFailure(StrEnum):
    """Why a slice gave no report."""

    #: The process died with the slice, or its node did; the actor comes back if it can.
    DIED = "died"
    #: The actor cannot be reached right now; the slice may have run.
    UNAVAILABLE = "unavailable"
    #: The slice never left: the actor's process is not there, or not there yet.
    UNSENT = "unsent"
    #: The actor cannot even be made: its code is missing on the node, or of another version.
    UNBUILDABLE = "unbuildable"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReported:
    """A slice ended with a report, which names its slot, incarnation and sequence."""

    report: Report

    @property
    def slot(self) -> str:
        """The slot that was asked."""
        return self.report.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFailed:
    """A slice ended without a report."""

    slot: str
    incarnation: int
    sequence: int
    failure: SliceFailure
    text: str

    @classmethod
    def of(cls, slot: str, sent: Directive, failure: SliceFailure, text: str) -> SliceFailed:
        """Return the failure of a slice that was sent."""
        return cls(
            slot=slot,
            incarnation=sent.incarnation,
            sequence=sent.sequence,
            failure=failure,
            text=text,
        )


SliceEnded: TypeAlias = SliceReported | SliceFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathCause:
    """What the cluster wrote down about the end of a process."""

    host_memory: bool
    """It was killed because its machine was running out of RAM."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What an actor is admitted with."""

    node: str
    num_cpus: float
    num_gpus: float


class Fleet(Protocol):
    """The actors of a run, and the nodes they live on."""

    def nodes(self) -> tuple[NodeFact, ...]:
        """The live nodes; `NoClusterError` once the cluster has ended under the run."""

    def address(self) -> str:
        """`host:port` of the cluster's head."""

    def count_cards(self, node: str) -> int:
        """Ask the driver on a node for its cards, by a process: a second or two.

        `PreflightError` if none comes up.
        """

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        """Create the slot's actor; it starts when its node has so many CPUs and GPUs to reserve.

        Admission only: nothing here limits use. Each of its processes is told `spec` once.
        """

    def submit(self, slot: str, directive: Directive) -> None:
        """Queue a slice behind those the slot's actor has."""

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        """Wait for the first slice that ends, then take along all that have."""

    def forget(self, slot: str) -> None:
        """Give up the slot's slices under way: their failures are not returned, only reports that
        still arrive.
        """

    def restart(self, slot: str) -> None:
        """End the slot's process; the cluster starts a fresh one for the same actor."""

    def abandon(self, slot: str) -> None:
        """End the slot's actor for good."""

    def why_ended(self, slot: str) -> DeathCause | None:
        """Return why the slot's last process ended.

        `None` if the cluster does not know it (yet).
        """

    def watch(self, silent: Collection[str]) -> Mapping[str, Activity | None]:
        """Ask what the processes of these slots do, and return what is known by now; never waits.

        `None`: its node was asked and has not answered yet. A slot whose process has not come up,
        or cannot be seen, is left out.
        """

    def end_node(self, node: str) -> None:
        """End a raylet with everything on it, as a power cut would.

        `UsageError` if it is none of this run's own.
        """

    def start_node(self, node: str) -> None:
        """Begin to start a node that `end_node` ended; it joins later. Raises as that does."""
