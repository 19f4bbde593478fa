"""Events and decisions of policies, the `Policy` protocol between them, and checks of a dumped
state.

The engine sends events, and the policy returns decisions. Does not cover what a policy decides
(each has its own module), how a step is run or memory released (the engine does), nor what a size
means in tensors (the workload says). Pure: no device, clock, randomness or logging, so that the
same events give the same decisions. Time comes in with the events.

The sequence of one turn of the engine::

    Pressure ──> Run ──> step ──> StepOk  ──> Run | Release
                              └─> StepOom ──> Run | Emergency
    Release   ──> (memory is given back) ──> Pressure ──> …
    Emergency ──> (the prepared product, then the turn ends)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from workers.settings import Learned, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOk:
    """A step ended well."""

    at_s: float
    """Monotonic seconds."""
    peak_bytes: int
    """The most bytes that the step needed: in live tensors, and on a card in gaps between them."""
    allowed_bytes: int | None
    """What the next step may hold in all, see `Pressure.allowed_bytes`; `None` if not measured
    after this step.
    """
    held_bytes: int = 0
    """What is held after it; told by workloads with stages."""
    partial: bool = False
    """Whether it had less to do than a step of this size and batch usually has, so that its peak
    says nothing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOom:
    """A step ran out of memory, and the engine has already released what it could.

    Policies are never asked about a corrupted context or an error of the workload: these are no
    reason to shrink.
    """

    at_s: float
    needed_bytes: int | None
    """What the workload says a step of this size needs at least; `None` if it does not say."""
    at_least_bytes: int
    """What the step would have held, as the failure itself shows: what it held, and what was
    refused on top of that.
    """
    free_bytes: int
    """What the worker can obtain now, after the release."""
    allowed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How much memory there is; sent about once a second and after every `Release`."""

    at_s: float
    free_bytes: int
    """What the worker can obtain now."""
    allowed_bytes: int
    """What a step may hold in all: the worker's own memory counted back, bounded by its cap and its
    lease, less what has to stay free for others."""
    needed_at_floor_bytes: int | None
    """What a step at the policy's `floor` needs at least; `None` if the workload does not say."""


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
    """Run a step of this size and batch, then report how it went."""

    size: int
    batch: int
    level: int = 0
    """See `Stages.keeps`; 0 of a workload that offers none."""
    is_largest: bool = field(default=False, compare=False)
    """Whether no step of a workload with stages is larger."""
    is_probe: bool = field(default=False, compare=False)
    """Whether it is larger than all that is known to fit, so that its failure is a part of the
    search. The step itself is the same."""
    hold_bytes: int | None = None
    """What a workload that fills its claim should hold; `None` leaves that as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give the allocator's unused memory back, then send `Pressure` and ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emergency:
    """Nothing fits: run only the prepared product until the next look."""

    reason: str
    """In words, for the health table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a workload's memory grows with the two numbers, as far as it says so."""

    size_power: float
    """Memory grows with size^size_power; 0: not at all."""
    batch_power: float
    fills_claim: bool
    """Whether it holds all of its claim whatever the size is."""
    needed_bytes: Callable[[int, int], int | None]
    """Least bytes for a size and batch; a pure function."""
    most_bytes: int
    """No step can ever hold more: the cap, less what the device keeps free of it."""
    stages: Stages | None = None
    """The only steps there are; `None`: any size and batch."""


Event: TypeAlias = StepOk | StepOom | Pressure
Decision: TypeAlias = Run | Release | Emergency

S = TypeVar("S")


class Policy(Protocol[S]):
    """A pure reducer over events.

    `S` is its state, an immutable value that only the policy understands.
    """

    @property
    def name(self) -> str:
        """The name a user writes in `memory.policy`."""

    @property
    def floor(self) -> Run:
        """The smallest step this policy ever asks for.

        What `Pressure.needed_at_floor_bytes` is about.
        """

    def initial(self, claim_bytes: int, learned: Learned | None) -> S:
        """Return the state of a worker that has run no step, from what it obtained and what earlier
        runs learned.
        """

    def decide(self, state: S, event: Event) -> tuple[S, Decision]:
        """Return the state after `event` and what to do next.

        Equal arguments give equal results.
        """

    def learned(self, state: S) -> Learned | None:
        """Return what a later run under the same circumstances could start from.

        `None` if nothing.
        """

    def dump(self, state: S) -> dict[str, Scalar]:
        """Return `state` in a form that JSON and any store can keep; `load` reads it back."""

    def load(self, data: Mapping[str, Scalar]) -> S:
        """Return the state that `dump` wrote.

        Raises:
            ValueError: `data` was written by another policy, under other settings, or is damaged.
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
