"""The protocols of a policy, which decides how large the parts of a step are.

Covers the request to the loop (`Run`), the memory needs of a workload (`Needs`), and the protocols
`Sizes` and `Policy`. Does not cover decisions (each policy has its own module), how parts run or
memory is released (the loop and the engine), nor what a size means in tensors (the workload). Pure:
no device, clock, randomness or logging. The caller passes a clock, so that the same calls at the
same times give the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from workers.settings import Learned, PolicyState

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The levels of a workload that can save memory in other ways than by a smaller batch.

    A policy tries all batches of a level, down to the smallest, before the next level.
    """

    batches: tuple[int, ...]
    """All allowed batches, ascending; at each level memory grows linearly with the batch."""
    keeps: tuple[float, ...] = (1.0,)
    """For each level, the share of the memory between two parts that remains at this level. Each
    level saves more memory than the previous one and is slower. A level that was never measured is
    not tried with less memory than that share.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A part of a step of this size and batch."""

    size: int
    batch: int
    level: int = 0
    """Index into `Stages.keeps`; 0 for a workload without stages."""
    is_largest: bool = field(default=False, compare=False)
    """Whether this is the largest step of a workload with stages."""
    is_probe: bool = field(default=False, compare=False)
    """Whether it is larger than every size known to fit, so that a failure is part of the search.
    The part itself runs in the same way.
    """
    releases_first: bool = field(default=False, compare=False)
    """Whether the engine releases the allocator's unused memory before the part."""


class Needs(Protocol):
    """What a workload states about its memory; see `workers.workloads.base.Workload`."""

    size_power: float
    batch_power: float
    needs_are_exact: bool
    claim_bytes: int | None

    def needed_bytes(self, size: int, batch: int, /) -> int | None:
        """Return the least bytes that a size and batch need; a pure function of the two."""

    def stages(self) -> Stages | None:
        """Return the allowed batches and levels; `None`: any size and batch."""


class Sizes(Protocol[S]):
    """Decides how large the parts of a `workers.elastic.loop.Loop` are."""

    @property
    def reason(self) -> str:
        """Why `next` returned `None` last, in words."""

    def next(self, allowed_bytes: int | None, /) -> S | None:
        """Return the size of the next part; `None` if nothing fits now.

        `allowed_bytes` is all that the process may hold during the part: what it holds plus what is
        free, bounded by the cap, less what must stay free for others. `None`: not measured since
        the last call.
        """

    def succeeded(self, size: S, peak_bytes: int | None, is_partial: bool, /) -> None:
        """Record that a part of this size succeeded, and its peak if it was measured.

        `is_partial`: the part had less to do than its size allows; do not learn from its peak.
        """

    def failed(self, size: S, at_least_bytes: int | None, /) -> None:
        """Record that a part of this size ran out of memory, and the least bytes that it would have
        held, as the failure shows. The memory of the part was released before.
        """


class Policy(Sizes[Run], Protocol):
    """Decides size, batch and level of a worker's parts."""

    @property
    def learned(self) -> Learned | None:
        """Where a later run under the same conditions can start; `None` if nothing is known."""

    @property
    def state(self) -> PolicyState:
        """What the slot's next process needs to continue."""

    def resume(self, state: PolicyState, /) -> None:
        """Continue with the `state` of an earlier process.

        Raises:
            ValueError: It belongs to other settings; the policy is unchanged.
        """
