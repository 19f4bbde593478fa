"""A simulated card with one pool of memory, tenants who come and go on it, and workers who share it.

A worker asks its `AdaptiveSize` before each step. What the step took it holds until it gives it back: after a failure,
before a smaller step, when its lease is below what it holds, or after every step where it keeps no pool. A step that
does not fit takes all there is before it fails, as real ones do, and so may take others down with it; its cap and its
lease are enforced. Tenants take what is free and wait for the rest. No fragmentation, and allocating takes no time.
Seconds are virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from workers.resilience.adaptive_size import AdaptiveSize, Learned
from workers.units import GIB, MIB

CARD_BYTES = 24 * GIB
WOBBLE = 0.01
LARGEST = 16_000

#: What workers leave free for everybody, as shipped (`memory.leave_free_mib`).
LEAVE_FREE_BYTES = 128 * MIB
#: A step that is smaller by this share gives back what is held.
SMALLER = 0.01

#: What a failure costs beside half of its step: the cleanup.
FAILURE_S = 0.05
SLICE_S = 1.0
#: The slice of a worker that may hold nothing: a look at the card.
GLANCE_S = 0.1


@dataclass(slots=True, kw_only=True)
class Tenant:
    """Somebody else on the card."""

    wishes: Sequence[tuple[float, int]]
    """(second, bytes it wants from then on), the first at 0."""
    taken_bytes: int = 0
    _place: int = 0

    def wants_bytes(self, now_s: float) -> int:
        """Return what it wants; the clock only goes forward."""
        while self._place + 1 < len(self.wishes) and self.wishes[self._place + 1][0] <= now_s:
            self._place += 1
        return self.wishes[self._place][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What steps take: fixed + item x size bytes, give or take 1 %, and (half_items + size) / rate seconds."""

    fixed_bytes: int
    item_bytes: int
    half_items: int
    rate_per_s: float
    largest: int = LARGEST

    def need_bytes(self, size: int) -> float:
        """Return the bytes of a step, without its wobble."""
        return self.fixed_bytes + self.item_bytes * size

    def step_s(self, size: int) -> float:
        """Return how long a step takes that fits."""
        return (self.half_items + size) / self.rate_per_s

    def best_per_s(self, limit_bytes: float) -> float:
        """Return the items per second of the largest size whose steps all fit."""
        size = int((limit_bytes / (1 + WOBBLE) - self.fixed_bytes) / self.item_bytes)
        size = max(0, min(self.largest, size))
        return size / self.step_s(size)


@dataclass(slots=True, kw_only=True)
class Card:
    """The card's memory."""

    total_bytes: int
    tenants: Sequence[Tenant]
    workers: Sequence[Worker]

    @property
    def outside_bytes(self) -> int:
        """What tenants have."""
        return sum(tenant.taken_bytes for tenant in self.tenants)

    @property
    def context_bytes(self) -> int:
        """What the workers' contexts take."""
        return sum(worker.open_bytes for worker in self.workers)

    @property
    def free_bytes(self) -> int:
        """What anybody may take."""
        held_bytes = sum(worker.held_bytes for worker in self.workers)
        return self.total_bytes - self.outside_bytes - self.context_bytes - held_bytes

    def serve_tenants(self, now_s: float) -> int:
        """Let tenants give back, and take of what is free; return the most that one of them lacks then."""
        lacks_bytes = 0
        for tenant in self.tenants:
            wants_bytes = tenant.wants_bytes(now_s)
            tenant.taken_bytes += min(wants_bytes - tenant.taken_bytes, self.free_bytes)
            lacks_bytes = max(lacks_bytes, wants_bytes - tenant.taken_bytes)
        return lacks_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How workers treat the card's memory."""

    keeps_pool: bool = True
    """Whether what a step took is held till the next, as torch's allocator does it."""
    looks_every_step: bool = True
    """Whether a worker asks the card what is free before each step, or once in a slice and after a failure."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """A slot and the process in it. Whoever drives it calls `go_on` again at the time that it returned."""

    slot: str
    job: Job
    budget_bytes: int
    context_bytes: int
    habits: Habits
    draw: Random
    clock: Callable[[], float]
    incarnation: int = 0
    sequence: int = 0
    leases: list[int | None] = field(default_factory=list)
    """Of the slice that runs, and of those queued behind it."""
    ready: bool = False
    """Whether its process works, or would if the card had room for its context."""
    open_bytes: int = 0
    """Its context, once it is open."""
    held_bytes: int = 0
    peak_bytes: int = 0
    """The most it held in this slice."""
    starving: bool = False
    """Whether it could run nothing in this slice."""
    items: float = 0.0
    failed_at_s: list[float] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Every step: when it began, and its size."""
    _sizes: AdaptiveSize = field(init=False)
    _learned: Learned | None = None
    _slice_ends_s: float | None = None
    _look_is_due: bool = True
    _step: tuple[int, int, bool] | None = None
    """Under way: size, bytes, and whether it will end well."""

    @property
    def cap_bytes(self) -> int:
        """What its allocator may hold."""
        return self.budget_bytes - self.context_bytes

    @property
    def wants_bytes(self) -> int:
        """The most that its steps could ever use; 0 while it has no process."""
        return int(min(self.cap_bytes, self.job.need_bytes(self.job.largest))) if self.ready else 0

    def open(self, card: Card) -> bool:
        """Open the card; return whether there was room."""
        self.ready = True
        if card.free_bytes < self.context_bytes:
            return False
        self.open_bytes = self.context_bytes
        self._sizes = AdaptiveSize(self.job.largest, learned=self._learned, clock=self.clock)
        return True

    def die(self) -> None:
        """End the process; the next one will know what this one has learned."""
        self._learned = self._sizes.learned if self.open_bytes else self._learned
        self._step = self._slice_ends_s = None
        self.open_bytes = self.held_bytes = self.peak_bytes = 0
        self.ready = self.starving = False
        self.leases.clear()
        self.incarnation += 1

    def go_on(self, card: Card, now_s: float) -> tuple[float, bool]:
        """End what is under way and begin what comes next. It must have a directive.

        Returns:
            When to call again, and whether a slice has ended: then it has begun nothing yet.
        """
        if self._step is not None:
            self._end_step(*self._step, now_s)
        if self._slice_ends_s is None:
            self.peak_bytes, self.starving, self._look_is_due = self.held_bytes, False, True
            self._slice_ends_s = now_s + (GLANCE_S if self.leases[0] == 0 else SLICE_S)
        elif now_s >= self._slice_ends_s:
            self._slice_ends_s = None
            self.leases.pop(0)
            self.sequence += 1
            return now_s, True
        return self._begin_step(card, now_s, self._slice_ends_s), False

    def _begin_step(self, card: Card, now_s: float, slice_ends_s: float) -> float:
        lease_bytes = self.leases[0]
        limit_bytes = self.cap_bytes if lease_bytes is None else min(self.cap_bytes, lease_bytes)
        if self.held_bytes > limit_bytes:
            self.held_bytes = 0
        usable_bytes = max(0, min(limit_bytes, self.held_bytes + card.free_bytes - LEAVE_FREE_BYTES))
        size = self._sizes.next(usable_bytes if self._look_is_due else None) if limit_bytes else None
        self._look_is_due = self.habits.looks_every_step
        if size is None:
            self.held_bytes = 0
            self.starving = limit_bytes > 0
            return slice_ends_s
        self.starving = False
        if self.sizes and size < (1.0 - SMALLER) * self.sizes[-1][1]:
            self.held_bytes = 0
        self.sizes.append((now_s, size))
        need_bytes = int(self.job.need_bytes(size) * (1 + self.draw.uniform(-WOBBLE, WOBBLE)))
        there_bytes = min(limit_bytes, self.held_bytes + card.free_bytes)
        good = need_bytes <= there_bytes
        self.held_bytes = max(self.held_bytes, need_bytes) if good else there_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._step = (size, need_bytes, good)
        return now_s + (self.job.step_s(size) if good else self.job.step_s(size) / 2 + FAILURE_S)

    def _end_step(self, size: int, need_bytes: int, good: bool, now_s: float) -> None:
        self._step = None
        if good:
            self.items += size
            self._sizes.succeeded(size, need_bytes)
        else:
            self.failed_at_s.append(now_s)
            self._look_is_due = True
            self._sizes.failed(size)
        if not good or not self.habits.keeps_pool:
            self.held_bytes = 0
