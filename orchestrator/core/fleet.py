"""The protocol by which the supervisor uses a cluster, and its messages.

Knows no Ray: `cluster/ray_fleet.py` implements the protocol on Ray. Decides nothing about slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from workers.host.facts import MachineFacts
from workers.messages import Orders, Status
from workers.settings import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    """One live node as the cluster reports it."""

    name: str | None
    """Value of its label `node`; `None`: it was started without one."""
    node_id: str
    address: str
    cpus: float
    gpus: float
    """Number declared with `ray start --num-gpus`, not verified."""
    shows_card: bool = True
    """Whether Ray itself detected a card there."""
    answers: bool = True
    """Whether it answered the head's own health check, which is faster than Ray's."""
    refuses: bool = False
    """Whether its machine refused the connection, so that no raylet runs there. If it is silent,
    there may be other reasons.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """One live node with the facts that it reported for `doctor` (`cluster/node_tasks.py`)."""

    name: str | None
    """Value of its label `node`; `None`: it was started without one."""
    address: str
    facts: MachineFacts | None = None
    """`None`: it did not answer, see `error`."""
    is_late: bool = False
    """Whether the answer did not arrive in time, so that nothing is known about the node."""
    error: str | None = None
    unreachable: tuple[str, ...] = ()
    """Ports (`host:port`) of other nodes that it could not open."""

    @property
    def title(self) -> str:
        """The name of the node for people."""
        return self.name or self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The network link from a node to the node of a team's first leader."""

    node: str
    to: str
    bytes_per_s: float | None = None
    """Rate in each direction at the same time; `None`: not measured, see `error`."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReceived:
    """An actor answered a poll with a status."""

    status: Status

    @property
    def slot(self) -> str:
        """The slot of the actor."""
        return self.status.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorUnreachable:
    """A poll failed: the actor's process does not exist, or cannot be reached. Polls continue, and
    `Status.actor` of the next answer shows whether the process is still the same.
    """

    slot: str
    text: str
    is_unbuildable: bool = False
    """Whether the actor can never be created: its code is missing on the node, or is of another
    version.
    """


PollResult: TypeAlias = StatusReceived | ActorUnreachable


class Fleet(Protocol):
    """The actors of a run, and the nodes on which they run."""

    def nodes(self) -> tuple[NodeFact, ...]:
        """The live nodes; `NoClusterError` if the cluster has ended during the run."""

    def address(self) -> str:
        """`host:port` of the cluster's head."""

    def count_cards(self, node: str) -> int:
        """Count the cards of a node by a short process that asks its driver; takes 1 to 2 s.

        `PreflightError` if the process does not start.
        """

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        """Create the slot's actor; it starts once its node has these CPUs and GPUs to reserve.

        The reservation is for admission only and limits no use. Each process of the actor receives
        `spec` once.
        """

    def order(self, slot: str, orders: Orders) -> None:
        """Set the orders for the slot. Its next poll delivers them: at once if no poll is under
        way, else within 1 s.
        """

    def wait(self, timeout_s: float) -> tuple[PollResult, ...]:
        """Wait at most `timeout_s` for the first poll to return, and return all that have.

        One poll is always under way for each placed slot that has orders.
        """

    def kill(self, slot: str) -> None:
        """End the process of the slot's actor, and its program, as SIGKILL does; the cluster starts
        the actor again. For injected faults (`lab/chaos.py`).
        """

    def abandon(self, slot: str) -> None:
        """End the slot's actor and its program; nothing restarts them."""

    def end_node(self, node: str) -> None:
        """End a raylet and everything on it, as a power cut would.

        `UsageError` if this run has not started it.
        """

    def start_node(self, node: str) -> None:
        """Begin to start a node that `end_node` ended; it joins later. Raises the same error."""
