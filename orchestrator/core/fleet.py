"""The fleet protocol: what the supervisor asks of a cluster. Knows no Ray; `cluster.ray_fleet`
implements it on Ray.

Covers the messages and the protocol. Does not decide anything about slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from workers.host.facts import MachineFacts
from workers.messages import Orders, Status
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
    is_late: bool = False
    """Whether nothing came back in time: then nothing is known of it."""
    error: str | None = None
    unreachable: tuple[str, ...] = ()
    """Ports (`host:port`) of other nodes that it could not open."""

    @property
    def title(self) -> str:
        """How people call it."""
        return self.name or self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link of a node to the one whose member of a team leads first."""

    node: str
    to: str
    bytes_per_s: float | None = None
    """Each way at the same time; `None`: it could not be measured, see `error`."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An actor answered a poll."""

    status: Status

    @property
    def slot(self) -> str:
        """The slot that was asked."""
        return self.status.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A poll came to nothing: the actor's process is not there, or cannot be reached. Polls go on;
    what the next answer says of `Status.actor` tells whether the process has ended.
    """

    slot: str
    text: str
    is_unbuildable: bool = False
    """Whether the actor cannot even be made: its code is missing on the node, or of another
    version.
    """


Heard: TypeAlias = Told | Unreached


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

    def order(self, slot: str, orders: Orders) -> None:
        """Say what is wanted of the slot from now on. Its next poll takes that along: at once where
        none is under way, else within a second.
        """

    def wait(self, timeout_s: float) -> tuple[Heard, ...]:
        """Keep one poll under way for each placed slot that has orders; wait at most so long for
        the first that comes back, and take along all that have.
        """

    def kill(self, slot: str) -> None:
        """End the process of the slot's actor as SIGKILL does, and its program with it; the cluster
        starts the actor again. For faults that are injected (`lab/chaos.py`).
        """

    def abandon(self, slot: str) -> None:
        """End the slot's actor for good, and its program with it."""

    def end_node(self, node: str) -> None:
        """End a raylet with everything on it, as a power cut would.

        `UsageError` if it is none of this run's own.
        """

    def start_node(self, node: str) -> None:
        """Begin to start a node that `end_node` ended; it joins later. Raises as that does."""
