"""What a policy is: it decides how large the parts of a step are.

Covers what a policy asks the loop for (`Run`), what it asks a workload (`Needs`), the protocols of
both (`Sizes`, `Policy`). Does not cover what a policy decides (each has its own module), how a part
is run or memory released (the loop and the engine do), nor what a size means in tensors (the
workload says). Pure: no device, clock, randomness or logging. A clock is
handed in, so that the same calls at the same times give the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from workers.settings import Learned, PolicyState

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What a workload offers that can do more to save memory than to take a smaller batch.

    At each level all batches are tried down to the smallest before the next level is.
    """

    batches: tuple[int, ...]
    """The only batches there are, ascending; at each level memory grows in a straight line with
    them.
    """
    keeps: tuple[float, ...] = (1.0,)
    """One for each level, each of which saves more memory than the one before and is slower: the
    share that stays of what the workload holds between two parts. A level that was never measured
    is not tried in less memory than that.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A part of a step of this size and batch."""

    size: int
    batch: int
    level: int = 0
    """See `Stages.keeps`; 0 of a workload that offers none."""
    is_largest: bool = field(default=False, compare=False)
    """Whether no step of a workload with stages is larger."""
    is_probe: bool = field(default=False, compare=False)
    """Whether it is larger than all that is known to fit, so that its failure is a part of the
    search. The part itself is the same."""
    releases_first: bool = field(default=False, compare=False)
    """Whether memory that the allocator keeps unused is given back before it."""


class Needs(Protocol):
    """What a workload says of its memory; see `workers.workloads.base.Workload`."""

    size_power: float
    batch_power: float
    needs_are_exact: bool
    claim_bytes: int | None

    def needed_bytes(self, size: int, batch: int, /) -> int | None:
        """Return the least bytes for a size and batch, always the same for the same numbers."""

    def stages(self) -> Stages | None:
        """Return the only steps there are; `None`: any size and batch."""


class Sizes(Protocol[S]):
    """Decides how large the parts of a `workers.elastic.loop.Loop` are."""

    @property
    def reason(self) -> str:
        """Why `next` returned `None` last, in words."""

    def next(self, allowed_bytes: int | None, /) -> S | None:
        """Return the size of the next part; `None`: nothing fits now.

        `allowed_bytes` is all that the part may hold: own memory counted back, bounded by a cap,
        less what has to stay free for others. `None`: that was not measured since the last time.
        """

    def succeeded(self, size: S, peak_bytes: int | None, is_partial: bool, /) -> None:
        """Take note that a part of this size ended well, and of the most that it held, if that was
        measured.

        `is_partial`: it had less to do than its size allows, so that what it took tells nothing.
        """

    def failed(self, size: S, at_least_bytes: int | None, /) -> None:
        """Take note that a part of this size ran out of memory, and of what it would have held at
        least, as the failure itself shows. What could be released was released.
        """


class Policy(Sizes[Run], Protocol):
    """The sizes of a worker's parts."""

    @property
    def learned(self) -> Learned | None:
        """What a later run under the same circumstances could start from; `None` if nothing."""

    @property
    def state(self) -> PolicyState:
        """What the next process of the slot needs to go on."""

    def resume(self, state: PolicyState, /) -> None:
        """Go on with the `state` of an earlier process.

        Raises:
            ValueError: It was told under other settings; nothing was changed.
        """
