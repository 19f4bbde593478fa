"""The vocabulary every policy speaks: events in, decisions out.

Covers the events an engine sends, the decisions it gets back and the `Policy` protocol between them. Does not
cover what any policy decides (each has its own module), how a step is run or memory released (the engine's), nor
what a size means in tensors (the workload's). Pure: no device, clock, randomness or logging, so that the same
events always give the same decisions and a run replays from its log.

The conversation of one slice::

    Pressure ──> Run ──> step ──> StepOk  ──> Run | Release
                              └─> StepOom ──> Run | Emergency
    Release   ──> (memory is given back) ──> Pressure ──> …
    Emergency ──> (the prepared product, then the slice ends)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from workers.messages import FailureKind, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOk:
    """A step ended well."""

    size: int
    batch: int
    peak_bytes: int
    """Highest number of bytes in live tensors during the step."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOom:
    """A step ran out of memory, and the engine has already released what it could.

    Raises:
        ValueError: `kind` is not an out-of-memory. A poisoned device or a bug of the workload is no reason to
            shrink, so no policy may ever be asked about one.
    """

    size: int
    batch: int
    kind: FailureKind
    needed_bytes: int | None
    """What the workload says a step of this size needs at least; `None` if it does not say."""
    free_bytes: int
    """What the worker can obtain now, after the release."""

    def __post_init__(self) -> None:
        if self.kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
            raise ValueError(f"a {self.kind} failure is not an out-of-memory; a policy cannot decide about it")

    @property
    def memory_came_back(self) -> bool:
        """Whether the release alone may have cured it; without a known need nobody can tell, so no."""
        return self.needed_bytes is not None and self.free_bytes >= self.needed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How much memory there is; sent at the start of every slice and after every `Release`."""

    free_bytes: int
    """What the worker can obtain now."""
    needed_at_floor_bytes: int | None
    """What a step at the policy's `floor` needs at least; `None` if the workload does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a step of this size and batch, then report how it went."""

    size: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give the allocator's unused memory back, then send `Pressure` and ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emergency:
    """Nothing fits: run only the prepared product this slice."""

    reason: str
    """In words, for the health table."""


Event: TypeAlias = StepOk | StepOom | Pressure
Decision: TypeAlias = Run | Release | Emergency

S = TypeVar("S")


class Policy(Protocol[S]):
    """A pure reducer over events; `S` is its state, an immutable value that only the policy understands."""

    @property
    def name(self) -> str:
        """The name a user writes in `memory.policy`."""

    @property
    def floor(self) -> Run:
        """The smallest step this policy ever asks for; what `Pressure.needed_at_floor_bytes` is about."""

    def initial(self) -> S:
        """Return the state of a worker that has seen nothing yet."""

    def decide(self, state: S, event: Event) -> tuple[S, Decision]:
        """Return the state after `event` and what to do next; equal arguments give equal results."""

    def dump(self, state: S) -> dict[str, Scalar]:
        """Return `state` in a form that JSON and any store can keep; `load` reads it back."""

    def load(self, data: Mapping[str, Scalar]) -> S:
        """Return the state that `dump` wrote.

        Raises:
            ValueError: `data` was written by another policy, under other settings, or is damaged.
        """
