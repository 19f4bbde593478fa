"""What a node of a running cluster answers to the doctor: values. Does not ask (`cluster.inventory` does)."""

from __future__ import annotations

from dataclasses import dataclass

from workers.host.facts import MachineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """One live node, and what it said of itself."""

    name: str | None
    """Its label `node`, or `None` if it was started without one."""
    address: str
    facts: MachineFacts | None = None
    """`None`: it did not answer, see `error`."""
    error: str | None = None
    clock_offset_s: float | None = None
    """How much its clock is ahead of this machine's."""
    clock_error_s: float | None = None
    """How far off that may be: half of the fastest round trip."""
    unreachable: tuple[str, ...] = ()
    """Ports (`host:port`) of other nodes that it could not open."""

    @property
    def title(self) -> str:
        """How people call it."""
        return self.name or self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """The port on which a head of this machine would listen."""

    port: int
    taken: bool
    holder: str | None = None
    """The program that listens there, if this user may see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """The user's Ray token, without the token."""

    path: str
    exists: bool
    from_environment: bool
    mode: int | None = None
    """Permission bits of the file."""
