"""A virtual clock to play a rule for sizes against eight made-up courses of free memory, and an oracle's work in them.

A step of b items takes (half_items + b) / rate seconds and needs (fixed + item x b) bytes, give or take 1 %. Where a
signal wants it so, needs come in blocks and with a library's workspace that comes and goes with the size. A step fails
when it needs more than what is available at the moment it begins. The score of a rule is its work divided by that of an
oracle that knows every need and always runs the largest size that fits. The same seed is the same world, for every
rule. No fragmentation, no cache, and no device that is slow to give memory back. Needs no torch and no real second.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from benches.courses import COURSES
from workers.units import GIB

LARGEST = 8000
"""No size is larger; 16 GiB and more, above every level."""
RATE_PER_S = 10_000.0
"""Items per second of an endlessly large step."""
ITEM_BYTES = 2 * GIB / 1000
HALF_SPEED_ITEMS = {"precious": 1000, "saturating": 150}
"""By regime: the size that runs at half of the full rate."""
WOBBLE = 0.01
BLOCK_BYTES = 2 * 2**20
"""torch's caching allocator takes large memory in blocks of 2 MiB."""
WORKSPACE = 0.05
"""What a library's workspace adds at the sizes for which it picks the algorithm that wants one."""
WORKSPACE_ITEMS = 64
"""So many neighbouring sizes share the library's choice."""
FAILURE_S = 0.05
"""What a failure costs beside half of its step: the cleanup."""
IDLE_S = 0.1
"""How long a rule waits that runs nothing."""

_DRAWS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What steps take, without their wobble."""

    fixed_bytes: float
    item_bytes: float
    half_items: float
    """The size that runs at half of the rate."""
    rate_per_s: float
    """Items per second of an endlessly large step."""
    largest: int = LARGEST

    def need_bytes(self, size: int) -> float:
        """Return the bytes of a step."""
        return self.fixed_bytes + self.item_bytes * size

    def step_s(self, size: int) -> float:
        """Return how long a step takes that fits."""
        return (self.half_items + size) / self.rate_per_s

    def largest_within(self, limit_bytes: float) -> int:
        """Return the largest size whose step takes no more; a hair below, so that rounding never makes it fail."""
        items = (limit_bytes - self.fixed_bytes) / self.item_bytes
        return max(0, min(self.largest, math.floor(items - 1e-6)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """One course, and the job that meets it. Two worlds are the same only if they are one object."""

    name: str
    seed: int
    job: Job
    duration_s: float
    times_s: Sequence[float]
    """When the level changes; the first is 0."""
    levels_bytes: Sequence[int]
    """What is available from the time at the same place on."""
    wobble: Sequence[float]
    """Factor on the need of the n-th step, over and over."""
    workspace: Sequence[bool]
    """By size // `WORKSPACE_ITEMS`: whether the library wants its workspace."""
    samples_bytes: Sequence[int]
    """What is available at each whole second."""
    noise: Sequence[float]
    """Standard normal, for each whole second."""

    def need_bytes(self, size: int, step: int, *, blocks: bool) -> int:
        """Return what the given step (counted from 0) needs at this size, failed or not."""
        need = self.job.need_bytes(size) * self.wobble[step % _DRAWS]
        if not blocks:
            return math.ceil(need)
        if self.workspace[size // WORKSPACE_ITEMS]:
            need *= 1 + WORKSPACE
        return math.ceil(need / BLOCK_BYTES) * BLOCK_BYTES

    def largest_that_fits(self, available_bytes: int, step: int, *, blocks: bool) -> int:
        """Return the largest size this step could have, 0 if none."""
        wobble = self.wobble[step % _DRAWS]
        if not blocks:
            return self.job.largest_within(available_bytes / wobble)
        available_bytes = available_bytes // BLOCK_BYTES * BLOCK_BYTES
        without = self.job.largest_within(available_bytes / wobble)
        having = self.job.largest_within(available_bytes / wobble / (1 + WORKSPACE))
        while without > having:
            if not self.workspace[without // WORKSPACE_ITEMS]:
                return without
            without = without // WORKSPACE_ITEMS * WORKSPACE_ITEMS - 1
        return having


def world_of(
    name: str,
    points: Sequence[tuple[float, float]],
    duration_s: float,
    *,
    seed: int,
    regime: str = "precious",
    rate_per_s: float = RATE_PER_S,
) -> World:
    """Return the world of a course given as (second, available bytes), the first at 0."""
    draw = random.Random(f"{seed}/{name}/workload")  # noqa: S311 - a simulation, no secret
    times = [point[0] for point in points]
    levels = [int(point[1]) for point in points]
    samples: list[int] = []
    place = 0
    for second in range(math.ceil(duration_s) + 1):
        while place + 1 < len(times) and times[place + 1] <= second:
            place += 1
        samples.append(levels[place])
    return World(
        name=name,
        seed=seed,
        job=Job(
            fixed_bytes=draw.uniform(0.2, 0.6) * GIB,
            item_bytes=ITEM_BYTES,
            half_items=HALF_SPEED_ITEMS[regime],
            rate_per_s=rate_per_s,
        ),
        duration_s=duration_s,
        times_s=times,
        levels_bytes=levels,
        wobble=array("d", (1 + draw.uniform(-WOBBLE, WOBBLE) for _ in range(_DRAWS))),
        workspace=[draw.random() < 0.5 for _ in range(LARGEST // WORKSPACE_ITEMS + 1)],
        samples_bytes=samples,
        noise=array("d", (draw.gauss(0.0, 1.0) for _ in samples)),
    )


class Rule(Protocol):
    """Whatever chooses sizes: `next`, then `succeeded` or `failed`, and again."""

    def next(self, free_bytes: int | None = None) -> int | None:
        """Return the size of the next step; None to run nothing now."""

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        """Take note that a step ended well."""

    def failed(self, size: int) -> None:
        """Take note that a step ran out of memory."""


Maker = Callable[[Callable[[], float]], Rule]
"""Makes a rule that knows nothing yet, given the clock it may read."""


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the start of the course."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What a rule is told."""

    name: str
    every_step: bool = False
    """Tells what is available, truly, before each step."""
    noise: float | None = None
    """Tells once a second what was available at that second, with this relative standard deviation; None: it does
    not. Between two samples a rule is told None."""
    peaks: bool = True
    """Tells what a good step needed."""
    blocks: bool = False
    """Needs come in whole blocks, and with a workspace that comes and goes with the size."""


EXACT = Signal(name="exact", every_step=True)
REAL = Signal(name="real", noise=0.03, blocks=True)
BLIND = Signal(name="blind", peaks=False)
PEAK = Signal(name="peak")
"""Peaks and nothing else: a process that can measure itself, but not its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rule fared in a world."""

    score: float
    """Its work as a share of the oracle's."""
    items: float
    tried: Sequence[tuple[int, bool]]
    """Of each step: its size, and whether it ended well."""
    failures: int
    worst_minute: int
    """Most failures within any sixty seconds."""
    size_changes: int
    idle_s: float


def play(make: Maker, world: World, signal: Signal) -> Outcome:
    """Let a fresh rule choose the sizes from the beginning to the end of a course.

    Args:
        make: Returns the rule, given the clock it may read.
        world: The course.
        signal: What the rule is told.

    Raises:
        ValueError: The rule returned a size outside 1..`LARGEST`.

    """
    clock = VirtualClock()
    rule = make(clock)
    times, levels, duration = world.times_s, world.levels_bytes, world.duration_s
    place, last_place, sampled_s = 0, len(times) - 1, -1
    now, items, idle_s = 0.0, 0.0, 0.0
    changes = 0
    tried: list[tuple[int, bool]] = []
    failed_at: list[float] = []
    while now < duration:
        while place < last_place and times[place + 1] <= now:
            place += 1
        available = levels[place]
        told: int | None = None
        if signal.every_step:
            told = available
        elif signal.noise is not None and int(now) > sampled_s:
            sampled_s = int(now)
            told = max(0, int(world.samples_bytes[sampled_s] * (1 + signal.noise * world.noise[sampled_s])))
        size = rule.next(told)
        if size is None:
            now += IDLE_S
            idle_s += IDLE_S
            clock.now_s = now
            continue
        if not 1 <= size <= LARGEST:
            raise ValueError(f"{type(rule).__name__}.next() returned {size}; a size is from 1 to {LARGEST}")
        changes += bool(tried) and size != tried[-1][0]
        need = world.need_bytes(size, len(tried), blocks=signal.blocks)
        step_s = world.job.step_s(size)
        tried.append((size, need <= available))
        if need > available:
            failed_at.append(now)
            now += step_s / 2 + FAILURE_S
            clock.now_s = now
            rule.failed(size)
            continue
        # Of a step that the end cuts off, only the part before the end counts.
        items += size if now + step_s <= duration else size * (duration - now) / step_s
        now += step_s
        clock.now_s = now
        rule.succeeded(size, need if signal.peaks else None)
    return Outcome(
        score=items / oracle_items(world, blocks=signal.blocks),
        items=items,
        tried=tried,
        failures=len(failed_at),
        worst_minute=_most_within(failed_at, 60.0),
        size_changes=changes,
        idle_s=idle_s,
    )


@lru_cache(maxsize=1024)
def oracle_items(world: World, *, blocks: bool) -> float:
    """Return the work of a rule that knows what each step needs and has, and never fails."""
    place, last_place, step, now, items = 0, len(world.times_s) - 1, 0, 0.0, 0.0
    while now < world.duration_s:
        while place < last_place and world.times_s[place + 1] <= now:
            place += 1
        size = world.largest_that_fits(world.levels_bytes[place], step, blocks=blocks)
        if size == 0:
            now += IDLE_S
            continue
        step_s = world.job.step_s(size)
        items += size * min(1.0, (world.duration_s - now) / step_s)
        now += step_s
        step += 1
    return items


def _most_within(moments_s: Sequence[float], span_s: float) -> int:
    first = most = 0
    for last, moment_s in enumerate(moments_s):
        while moment_s - moments_s[first] >= span_s:
            first += 1
        most = max(most, last - first + 1)
    return most


@lru_cache(maxsize=64)
def worlds(seed: int, regime: str, rate_per_s: float = RATE_PER_S) -> tuple[World, ...]:
    """Return the eight worlds of a seed, in the order of `COURSES`.

    Args:
        seed: Whatever is drawn is drawn from it; both regimes of a seed share their courses and needs.
        regime: A key of `HALF_SPEED_ITEMS`.
        rate_per_s: Items per second of an endlessly large step. At a lower rate a rule has fewer steps to learn from
            between two changes.

    """
    made = []
    for name, course in COURSES.items():
        draw = random.Random(f"{seed}/{name}/course")  # noqa: S311 - a simulation, no secret
        duration_s = draw.uniform(20.0, 40.0) * 60
        points = course(draw, duration_s)
        made.append(world_of(name, points, duration_s, seed=seed, regime=regime, rate_per_s=rate_per_s))
    return tuple(made)
