"""What the supervisor asks of a cluster, in the project's words. Knows no Ray; `fleet.py` speaks it.

Covers the messages and the protocol. Does not decide anything about slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from workers.messages import Directive, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    """One live node as the cluster shows it."""

    name: str | None
    """Its label `node`, or `None` if it was started without one."""
    node_id: str
    address: str
    cpus: float
    gpus: float
    """As declared with `ray start --num-gpus`, which nobody checks."""
    shows_card: bool = True
    """Whether Ray itself found a card there."""


class SliceFailure(StrEnum):
    """Why a slice gave no report."""

    #: The process died, or its node; the actor comes back if it can.
    DIED = "died"
    #: The actor cannot be reached right now; the slice may have run.
    UNAVAILABLE = "unavailable"
    #: The actor cannot even be made: its code is missing on the node, or of another version.
    UNBUILDABLE = "unbuildable"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOutcome:
    """What became of one submitted slice: a report, or a failure and its text."""

    slot: str
    incarnation: int
    sequence: int
    report: Report | None = None
    failure: SliceFailure | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a slot's actor is placed and what it reserves there. Admission only: nothing here limits use."""

    slot: str
    node: str
    num_cpus: float
    num_gpus: float


class Fleet(Protocol):
    """The actors of a run."""

    def nodes(self) -> tuple[NodeFact, ...]:
        """The live nodes."""
        ...

    def address(self) -> str:
        """`host:port` of the cluster's head."""
        ...

    def count_cards(self, node: str) -> int:
        """Ask the driver of a node's PC how many cards it has. Starts a process there; takes a second or two.

        Raises:
            PreflightError: No process came up there.
        """
        ...

    def place(self, seat: Seat) -> None:
        """Create the slot's actor; it starts when its node can take it."""
        ...

    def submit(self, directive: Directive) -> None:
        """Queue a slice behind those the slot's actor has."""
        ...

    def wait(self, timeout_s: float) -> tuple[SliceOutcome, ...]:
        """Wait for the first slice that ends, then take along all that have."""
        ...

    def forget(self, slot: str) -> None:
        """Cancel what is queued for the slot, and never tell what became of any of its slices."""
        ...

    def cancel(self, slot: str, sequence: int) -> None:
        """Cancel one slice that has not begun, and never tell what became of it."""
        ...

    def restart(self, slot: str) -> None:
        """End the slot's process; the cluster starts a fresh one for the same actor."""
        ...

    def abandon(self, slot: str) -> None:
        """End the slot's actor for good."""
        ...
