"""A simulated card with one pool of memory, workers who share it, and scenes of tenants who come
and go on it.

A worker asks its `AdaptiveSize` before each step. What the step took it holds until it gives it
back: after a failure, before a smaller step, when its lease is below what it holds, or after every
step where it keeps no pool. A step that does not fit takes all there is before it fails; its cap
and its lease are enforced. Tenants take what is free and wait for the rest. No fragmentation, and
allocating takes no time. Seconds are virtual, and all is drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benches.simulator import FAILURE_S, WOBBLE, Job, moments
from workers.resilience.adaptive_size import AdaptiveSize, Learned
from workers.units import GIB, MIB

CARD_BYTES = 24 * GIB
LARGEST = 16_000
#: What workers leave free for others, as shipped (`memory.leave_free_mib`).
LEAVE_FREE_BYTES = 128 * MIB
#: A step that is smaller by this share gives back what is held.
SMALLER = 0.01
SLICE_S = 1.0
#: The slice of a worker that may hold nothing: a look at the card.
GLANCE_S = 0.1

Wishes = Sequence[tuple[float, int]]
"""(second, bytes that a tenant wants from then on), the first at 0."""


class Card:
    """The card's memory."""

    def __init__(self, *, wishes: Sequence[Wishes], workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._wishes = [list(reversed(tenant)) for tenant in wishes]
        self._taken_bytes = [0] * len(wishes)

    @property
    def taken_bytes(self) -> int:
        """What tenants have, and the workers' contexts."""
        return sum(self._taken_bytes) + sum(worker.open_bytes for worker in self._workers)

    @property
    def free_bytes(self) -> int:
        return CARD_BYTES - self.taken_bytes - sum(worker.held_bytes for worker in self._workers)

    def serve_tenants(self, now_s: float) -> int:
        """Let tenants give back, and take of what is free.

        Return the most that one of them lacks then.
        """
        lacks_bytes = 0
        for tenant, ahead in enumerate(self._wishes):
            while len(ahead) > 1 and ahead[-2][0] <= now_s:
                ahead.pop()
            wants_bytes = ahead[-1][1]
            self._taken_bytes[tenant] += min(
                wants_bytes - self._taken_bytes[tenant], self.free_bytes
            )
            lacks_bytes = max(lacks_bytes, wants_bytes - self._taken_bytes[tenant])
        return lacks_bytes


@dataclass(slots=True, kw_only=True)
class Worker:
    """A slot and the process in it."""

    slot: str
    job: Job
    budget_bytes: int
    context_bytes: int
    keeps_pool: bool = (
        True  # whether what a step took is held till the next, as torch's allocator does it
    )
    looks_every_step: bool = True
    """Whether it asks the card what is free before each step, or once in a slice and after a
    failure.
    """
    draw: Random
    clock: Callable[[], float]
    incarnation: int = 0
    sequence: int = 0
    leases: list[int | None] = field(default_factory=list)
    """Of the slice that runs, and of those queued behind it."""
    ready: bool = False  # whether its process works, or would if the card had room for its context
    open_bytes: int = 0  # its context, once it is open
    held_bytes: int = 0
    peak_bytes: int = 0  # the most it held in this slice
    starving: bool = False  # whether it could run nothing in this slice
    items: float = 0.0
    failures: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Every step: when it began, and its size."""
    _sizes: AdaptiveSize = field(init=False)
    _learned: Learned | None = None

    @property
    def cap_bytes(self) -> int:
        return self.budget_bytes - self.context_bytes

    @property
    def wants_bytes(self) -> int:
        """The most that its steps could ever use; 0 while it has no process."""
        return int(min(self.cap_bytes, self.job.need_bytes(self.job.largest))) if self.ready else 0

    def open(self, card: Card) -> bool:
        self.ready = True
        if card.free_bytes < self.context_bytes:
            return False
        self.open_bytes = self.context_bytes
        self._sizes = AdaptiveSize(
            self.job.largest, exact_samples=True, learned=self._learned, clock=self.clock
        )
        return True

    def die(self) -> None:
        """End the process; the next one will know what this one has learned."""
        self._learned = self._sizes.learned if self.open_bytes else self._learned
        self.open_bytes = self.held_bytes = self.peak_bytes = 0
        self.ready = self.starving = False
        self.leases.clear()
        self.incarnation += 1

    def work(self, card: Card) -> Iterator[float]:
        """Work for one slice under the first lease.

        Yield each time until which a step, or a wait, lasts.
        """
        lease_bytes = self.leases[0]
        limit_bytes = self.cap_bytes if lease_bytes is None else min(self.cap_bytes, lease_bytes)
        ends_s = self.clock() + (GLANCE_S if lease_bytes == 0 else SLICE_S)
        self.peak_bytes, self.starving, look_is_due = self.held_bytes, False, True
        while self.clock() < ends_s:
            if self.held_bytes > limit_bytes:
                self.held_bytes = 0
            usable_bytes = max(
                0, min(limit_bytes, self.held_bytes + card.free_bytes - LEAVE_FREE_BYTES)
            )
            size = self._sizes.next(usable_bytes if look_is_due else None) if limit_bytes else None
            self.starving = size is None and limit_bytes > 0
            if size is None:
                self.held_bytes = 0
                yield ends_s
                continue
            if self.sizes and size < (1.0 - SMALLER) * self.sizes[-1][1]:
                self.held_bytes = 0
            self.sizes.append((self.clock(), size))
            need_bytes = int(self.job.need_bytes(size) * (1 + self.draw.uniform(-WOBBLE, WOBBLE)))
            there_bytes = min(limit_bytes, self.held_bytes + card.free_bytes)
            good = need_bytes <= there_bytes
            self.held_bytes = max(self.held_bytes, need_bytes) if good else there_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            yield self.clock() + (
                self.job.step_s(size) if good else self.job.step_s(size) / 2 + FAILURE_S
            )
            look_is_due = self.looks_every_step or not good
            if good:
                self.items += size
                self._sizes.succeeded(size, need_bytes)
            else:
                self.failures += 1
                self._sizes.failed(size)
            if not good or not self.keeps_pool:
                self.held_bytes = 0
        self.leases.pop(0)
        self.sequence += 1


def jobs(seed: int, workers: int, cap_bytes: int, *, modest: int | None) -> list[Job]:
    draw = Random(f"{seed}/jobs")  # noqa: S311 - a simulation, no secret
    made = []
    for index in range(workers):
        fixed_bytes = int(draw.uniform(0.03, 0.15) * cap_bytes)
        item_bytes = int(draw.uniform(1.0, 4.0) * MIB)
        items_at_cap = cap_bytes / item_bytes
        half_items = int(items_at_cap * draw.uniform(0.1, 0.5))
        made.append(
            Job(
                fixed_bytes=fixed_bytes,
                item_bytes=item_bytes,
                half_items=half_items,
                rate_per_s=(half_items + items_at_cap) / draw.uniform(0.1, 2.5),
                largest=int(0.1 * items_at_cap) if index == modest else LARGEST,
            )
        )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What happens on the card."""

    name: str
    duration_s: float
    tenants: Sequence[Wishes] = ()
    deaths: Sequence[tuple[float, int]] = ()  # (second, index of the worker whose process ends)
    modest: int | None = None  # index of a worker whose largest step is small
    disturbed_at_s: Sequence[float] = ()  # when a tenant comes or goes, beyond what it always does


def _tenant(draw: Random) -> Sequence[Wishes]:
    """A tenant who has a part of the card and keeps it."""
    return [[(0.0, int(draw.uniform(0.2, 0.5) * CARD_BYTES))]]


def _game(draw: Random, _workers: int, duration_s: float) -> dict[str, Any]:
    """A game runs when the workers start, ends, comes back, and ends."""
    level = int(draw.uniform(0.3, 0.55) * CARD_BYTES)
    times = [duration_s * (quarter / 4 + draw.uniform(-0.05, 0.05)) for quarter in (1, 2, 3)]
    wishes = [(0.0, level), (times[0], 0), (times[1], level), (times[2], 0)]
    return {"tenants": [wishes], "disturbed_at_s": times}


def _neighbour(draw: Random, _workers: int, duration_s: float) -> dict[str, Any]:
    """A job next door whose memory goes up and down by some percent of the card, every second."""
    level, jitter = draw.uniform(0.25, 0.4), draw.uniform(0.005, 0.015)
    levels = [level + draw.uniform(-jitter, jitter) for _ in range(int(duration_s))]
    return {
        "tenants": [
            [(float(second), int(share * CARD_BYTES)) for second, share in enumerate(levels)]
        ]
    }


def _visits(draw: Random, _workers: int, duration_s: float) -> dict[str, Any]:
    """A job that takes a part of the card for half a minute to two, ends, and comes again."""
    wishes = [
        (at_s, 0 if number % 2 else int(draw.uniform(0.15, 0.4) * CARD_BYTES))
        for number, at_s in enumerate(moments(draw, duration_s, 30.0, 120.0))
    ]
    return {"tenants": [wishes], "disturbed_at_s": [at_s for at_s, _ in wishes]}


def _restart(draw: Random, workers: int, duration_s: float) -> dict[str, Any]:
    """A tenant has a part of the card, and a worker's process dies now and then."""
    times_s = moments(draw, duration_s, 60.0, 120.0, at_s=draw.uniform(60.0, 90.0))
    deaths = [(at_s, draw.randrange(workers)) for at_s in times_s]
    return {"tenants": _tenant(draw), "deaths": deaths}


#: By name; each returns fields of a scene.
SCENES: dict[str, Callable[[Random, int, float], dict[str, Any]]] = {
    "constant": lambda *_: {},  # no tenant: what the budgets allow is there
    "crowded": lambda draw, *_: {"tenants": _tenant(draw)},
    "game": _game,
    "neighbour": _neighbour,
    "visits": _visits,
    "restart": _restart,
    "modest": lambda draw, workers, _: {
        "tenants": _tenant(draw),
        "modest": draw.randrange(workers),
    },
}


def scenes(seed: int, workers: int, duration_s: float) -> list[Scene]:
    return [
        Scene(
            name=name,
            duration_s=duration_s,
            **draw_scene(Random(f"{seed}/{name}/scene"), workers, duration_s),  # noqa: S311
        )
        for name, draw_scene in SCENES.items()
    ]
