"""What a policy is: it decides how large the parts of a step are.

Covers what a policy asks the loop for (`Run`), what it asks a workload (`Needs`), the `Policy`
protocol, and checks of a dumped state. Does not cover what a policy decides (each has its own
module), how a part is run or memory released (the loop and the engine do), nor what a size means in
tensors (the workload says). Pure: no device, clock, randomness or logging. A clock is handed in, so
that the same calls at the same times give the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from workers.settings import Learned, Scalar


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


class Policy(Protocol):
    """Chooses the parts of a loop (`workers.elastic.loop.Sizes`). It only understands its own
    dumped state.
    """

    @property
    def name(self) -> str:
        """The name a user writes in `memory.policy`."""

    @property
    def reason(self) -> str:
        """Why `next` returned `None` last, in words, for the health table."""

    def next(self, allowed_bytes: int | None, /) -> Run | None:
        """Return the next part; `None`: nothing fits now.

        `allowed_bytes` is all that it may hold: the worker's own memory counted back, bounded by
        its cap and its lease, less what has to stay free for others. `None`: that was not measured
        since the last time.
        """

    def succeeded(self, run: Run, peak_bytes: int | None, is_partial: bool, /) -> None:
        """Take note that a part ended well, and of the most that it held, if that was measured.

        `is_partial`: it had less to do than its size and batch allow, so that it tells nothing.
        """

    def failed(self, run: Run, at_least_bytes: int | None, /) -> None:
        """Take note that a part ran out of memory, and of what it would have held at least, as the
        failure itself shows. What could be released was released.
        """

    @property
    def learned(self) -> Learned | None:
        """What a later run under the same circumstances could start from; `None` if nothing."""

    def dump(self) -> dict[str, Scalar]:
        """Return the state in a form that JSON and any store can keep; `load` reads it back."""

    def load(self, data: Mapping[str, Scalar], /) -> None:
        """Go on with the state that `dump` returned.

        Raises:
            ValueError: `data` was written by another policy, under other settings, or is damaged;
                nothing was changed.
        """


def check_keys(data: Mapping[str, Scalar], name: str, keys: Iterable[str]) -> None:
    """Check that a policy called `name` has written these keys.

    Raises:
        ValueError: It was another policy, or there are other keys.
    """
    if data.get("policy") != name:
        raise ValueError(
            f"this state was written by policy {data.get('policy')!r}, not by {name!r}"
        )
    if differing := data.keys() ^ {"policy", *keys}:
        raise ValueError(
            f"the state of policy {name!r} has missing or unknown keys: {sorted(differing)}"
        )


def whole(data: Mapping[str, Scalar], key: str, lowest: int, highest: int) -> int:
    """Return a whole number.

    Raises:
        ValueError: It is none, or out of its bounds.
    """
    value = data[key]
    if type(value) is not int or not lowest <= value <= highest:
        raise ValueError(f"{key} must be a whole number from {lowest} to {highest}, not {value!r}")
    return value
