"""A simulated card with one pool of memory, tenants who come and go on it, and workers who share it.

A worker asks its `AdaptiveSize` before each step and holds afterwards what the step took, as torch's allocator does,
until it gives the pool back: after a failure, or when its lease is below what it holds. A step that does not fit takes
all there is before it fails, as real ones do, and so takes others down with it. Tenants take what is free and no more,
and wait for the rest. Does not imitate fragmentation, and takes no time to allocate. Times are virtual.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workers.sizing import AdaptiveSize, Learned

GIB = 2**30
MIB = 2**20
CARD_BYTES = 24 * GIB
WOBBLE = 0.01
LARGEST = 16_000

#: What a failure costs beside half of its step: the cleanup.
FAILURE_S = 0.05
SLICE_S = 1.0
#: A worker without a lease yet, and one that can run nothing, look again after this.
GLANCE_S = 0.1


@dataclass(slots=True, kw_only=True)
class Tenant:
    """Somebody else on the card."""

    wishes: Sequence[tuple[float, int]]
    """(second, bytes it wants from then on)."""
    taken_bytes: int = 0
    _place: int = 0

    def wants_bytes(self, now_s: float) -> int:
        """Return what it wants; the clock only goes forward."""
        while self._place + 1 < len(self.wishes) and self.wishes[self._place + 1][0] <= now_s:
            self._place += 1
        at_s, wish = self.wishes[self._place]
        return wish if at_s <= now_s else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker's steps take: `fixed + item x size` bytes give or take 1 %, `(half_items + size) / rate` seconds."""

    fixed_bytes: int
    item_bytes: int
    half_items: int
    rate_per_s: float
    largest: int = LARGEST

    def need_bytes(self, size: int) -> float:
        """Return the bytes of a step, without its wobble."""
        return self.fixed_bytes + self.item_bytes * size

    def largest_in(self, limit_bytes: float) -> int:
        """Return the size whose steps all fit."""
        return max(0, min(self.largest, int((limit_bytes / (1 + WOBBLE) - self.fixed_bytes) / self.item_bytes)))

    def items_per_s(self, size: int) -> float:
        """Return the throughput at a size."""
        return size * self.rate_per_s / (self.half_items + size)


@dataclass(slots=True, kw_only=True)
class Card:
    """The card's memory."""

    total_bytes: int
    tenants: Sequence[Tenant]
    workers: list[Worker] = field(default_factory=list)

    @property
    def outside_bytes(self) -> int:
        """What tenants have."""
        return sum(tenant.taken_bytes for tenant in self.tenants)

    @property
    def held_bytes(self) -> int:
        """What workers have, contexts included."""
        return sum(worker.held_bytes + worker.open_bytes for worker in self.workers)

    @property
    def free_bytes(self) -> int:
        """What anybody may take."""
        return self.total_bytes - self.outside_bytes - self.held_bytes

    def serve_tenants(self, now_s: float) -> None:
        """Let tenants give back, and take of what is free."""
        for tenant in self.tenants:
            more_bytes = tenant.wants_bytes(now_s) - tenant.taken_bytes
            tenant.taken_bytes += min(more_bytes, max(0, self.free_bytes))


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process, from step to step. Whoever drives it calls `go_on` at the time that it returned."""

    slot: str
    job: Job
    budget_bytes: int
    context_bytes: int
    draw: random.Random
    clock: Callable[[], float]
    looks_every_step: bool = True
    """Whether it asks the card what is free before each step, or once a slice and after a failure."""
    failures_per_minute: int = 6
    incarnation: int = 0
    sequence: int = 0
    open_bytes: int = 0
    held_bytes: int = 0
    ready: bool = False
    """Whether it has a process that works, or would if the card had room for its context."""
    starving: bool = False
    leases: list[int | None] = field(default_factory=list)
    """Of the slice that runs, and of those queued behind it."""
    items: float = 0.0
    failed_at_s: list[float] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Every size it ran, and when."""
    _sizes: AdaptiveSize | None = None
    _learned: Learned | None = None
    _slice_ends_s: float | None = None
    _look_due: bool = True
    _step: tuple[int, int, bool, float] | None = None
    """Under way: size, bytes, whether it will end well, and when."""

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
        self._sizes = AdaptiveSize(
            self.job.largest,
            failures_per_minute=self.failures_per_minute,
            learned=self._learned,
            clock=self.clock,
        )
        return True

    def die(self) -> None:
        """End the process; another one will know what this one learned."""
        self._learned = None if self._sizes is None else self._sizes.learned
        self._sizes = self._step = self._slice_ends_s = None
        self.open_bytes = self.held_bytes = 0
        self.ready = False
        self.leases.clear()
        self.incarnation += 1

    def go_on(self, card: Card, now_s: float) -> tuple[float, bool]:
        """End what is under way and begin what comes next; return when to call again, and whether a slice ended.

        With no directive left it must not be called before it has one.
        """
        assert self._sizes is not None, "only a process that has opened the card works"
        if self._step is not None:
            size, need_bytes, good, _ = self._step
            self._step = None
            if good:
                self._sizes.succeeded(size, need_bytes)
                self.items += size
            else:
                self.held_bytes = 0
                self.failed_at_s.append(now_s)
                self._look_due = True
                self._sizes.failed(size)
        if self._slice_ends_s is None:
            self._slice_ends_s = now_s + SLICE_S
            self._look_due = True
            self.starving = False
            if self.leases[0] == 0:
                self.held_bytes = 0
                self._slice_ends_s = now_s + GLANCE_S
                return self._slice_ends_s, False
        elif now_s >= self._slice_ends_s - 1e-9:
            self._slice_ends_s = None
            self.leases.pop(0)
            self.sequence += 1
            return now_s, True
        return self._begin_step(card, now_s), False

    def _begin_step(self, card: Card, now_s: float) -> float:
        assert self._sizes is not None
        assert self._slice_ends_s is not None
        lease_bytes = self.leases[0]
        limit_bytes = self.cap_bytes if lease_bytes is None else min(self.cap_bytes, lease_bytes)
        if self.held_bytes > limit_bytes:
            self.held_bytes = 0  # the step's tensors are gone, and the pool is given back
        size = self._sizes.next(max(0, min(limit_bytes, self.held_bytes + card.free_bytes)) if self._look_due else None)
        self._look_due = self.looks_every_step
        if size is None:
            self.held_bytes = 0
            self.starving = True
            return self._slice_ends_s
        self.starving = False
        self.sizes.append((now_s, size))
        need_bytes = int(self.job.need_bytes(size) * (1 + self.draw.uniform(-WOBBLE, WOBBLE)))
        there_bytes = min(self.cap_bytes, self.held_bytes + max(0, card.free_bytes))
        step_s = (self.job.half_items + size) / self.job.rate_per_s
        if need_bytes <= there_bytes:
            self.held_bytes = max(self.held_bytes, need_bytes)
            self._step = (size, need_bytes, True, now_s + step_s)
        else:
            self.held_bytes = there_bytes
            self._step = (size, need_bytes, False, now_s + step_s / 2 + FAILURE_S)
        return self._step[3]
