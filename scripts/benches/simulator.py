"""Simulates, with a virtual clock, how a rule chooses the sizes of steps while free memory changes
along eight random courses, and compares its work with the work of an oracle.

A step of b items takes (half_items + b) / rate seconds and needs (fixed + item x b) bytes, within
1 %. With `Signal.blocks`, needs are rounded up to whole blocks, and some sizes need a library's
workspace as well. A step that needs more than is available when it begins fails, and is repeated.
The score of a rule is its work divided by the work of an oracle, which knows every need and always
runs the largest size that fits. Does not simulate fragmentation or a cache.

The courses are calibrated to these mean scores over many seeds in the regime `precious`:
accelerate's rule 0.77, toma's 0.66, the guide's 0.73, and AIMD 0.89 at 10,000 items a second.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, Protocol

from workers.units import GIB

LARGEST = 8000  # the largest size; it needs 16 GiB and more, above every level
RATE_PER_S = 10_000.0  # items per second in the limit of large steps
ITEM_BYTES = 2 * GIB / 1000
#: The size that runs at half of the full rate, keyed by regime.
HALF_SPEED_ITEMS = {"precious": 1000, "saturating": 150}
WOBBLE = 0.01
BLOCK_BYTES = 2 * 2**20  # torch's caching allocator maps large memory in blocks of 2 MiB
#: A library's workspace, as a share of the need, at sizes whose algorithm uses one.
WORKSPACE = 0.05
WORKSPACE_ITEMS = 64  # number of neighbouring sizes that use the same algorithm
FAILURE_S = 0.05  # time of the cleanup after a failure, which also costs half of its step
IDLE_S = 0.1  # time that passes when a rule runs nothing
_DRAWS = 8192
_LOW_GIB, _HIGH_GIB = 1.2, 8.0  # bounds of the memory that other programs leave

#: (second, available bytes), the first at second 0; a level holds until the next.
Course = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Memory and time of steps, without their random variation."""

    fixed_bytes: float
    item_bytes: float
    half_items: float  # the size that runs at half of the rate
    rate_per_s: float  # items per second in the limit of large steps

    def need_bytes(self, size: int) -> float:
        return self.fixed_bytes + self.item_bytes * size

    def step_s(self, size: int) -> float:
        return (self.half_items + size) / self.rate_per_s

    def largest_within(self, limit_bytes: float) -> int:
        """Return the largest size whose step fits; 1e-6 items less, against rounding errors."""
        items = (limit_bytes - self.fixed_bytes) / self.item_bytes
        return max(0, min(LARGEST, math.floor(items - 1e-6)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """One course of free memory, and the job that runs under it. Compared by identity."""

    name: str
    seed: int
    job: Job
    duration_s: float
    times_s: Sequence[float]  # when the level changes; the first is 0
    levels_bytes: Sequence[int]  # available memory from the time at the same index on
    wobble: Sequence[float]  # factor of the need of the n-th step; repeats after the last
    workspace: Sequence[bool]
    """Whether the library uses a workspace, indexed by size // `WORKSPACE_ITEMS`."""
    samples_bytes: Sequence[int]  # available memory at each whole second
    noise: Sequence[float]  # standard normal, for each whole second

    def need_bytes(self, size: int, step: int, *, blocks: bool) -> int:
        """Return the need of a step of this size; `step` is the number of good steps before it."""
        need = self.job.need_bytes(size) * self.wobble[step % len(self.wobble)]
        if not blocks:
            return math.ceil(need)
        if self.workspace[size // WORKSPACE_ITEMS]:
            need *= 1 + WORKSPACE
        return math.ceil(need / BLOCK_BYTES) * BLOCK_BYTES

    def largest_that_fits(self, available_bytes: int, step: int, *, blocks: bool) -> int:
        wobble = self.wobble[step % len(self.wobble)]
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
    heavy: tuple[int, float] = (1, 1.0),
) -> World:
    """Return the world of a course given as (second, available bytes), the first at 0.

    `heavy` is (n, factor): every n-th step needs `factor` times the memory.
    """
    draw = Random(f"{seed}/{name}/workload")  # noqa: S311 - a simulation, no secret
    times = [point[0] for point in points]
    levels = [int(point[1]) for point in points]
    samples = [
        levels[bisect_right(times, second) - 1] for second in range(math.ceil(duration_s) + 1)
    ]
    every, factor = heavy

    def wobble(step: int) -> float:
        return (1 + draw.uniform(-WOBBLE, WOBBLE)) * (factor if (step + 1) % every == 0 else 1.0)

    return World(
        name=name, seed=seed, duration_s=duration_s, times_s=times, levels_bytes=levels,
        job=Job(
            fixed_bytes=draw.uniform(0.2, 0.6) * GIB, item_bytes=ITEM_BYTES,
            half_items=HALF_SPEED_ITEMS[regime], rate_per_s=rate_per_s,
        ),
        wobble=array("d", map(wobble, range(_DRAWS // every * every))),
        workspace=[draw.random() < 0.5 for _ in range(LARGEST // WORKSPACE_ITEMS + 1)],
        samples_bytes=samples,
        noise=array("d", (draw.gauss(0.0, 1.0) for _ in samples)),
    )  # fmt: skip


class Rule(Protocol):
    """Chooses sizes. The caller repeats: `next`, then `succeeded` or `failed`."""

    def next(self, free_bytes: int | None = None) -> int | None:
        """Return the size of the next step; None to run nothing now."""

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        pass

    def failed(self, size: int) -> None:
        pass


#: Makes a fresh rule that reads the given clock.
Maker = Callable[[Callable[[], float]], Rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """The information that a rule receives."""

    name: str
    every_step: bool = False  # reports the exact available memory before each step
    noise: float | None = None
    """Reports the available memory once a second with this relative standard deviation, and None
    between two samples. None: reports no samples."""
    peaks: bool = True  # reports the need of each good step
    blocks: bool = False
    """Rounds needs up to whole blocks, and adds a workspace at some sizes."""


EXACT = Signal(name="exact", every_step=True)
REAL = Signal(name="real", noise=0.03, blocks=True)
BLIND = Signal(name="blind", peaks=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a rule in a world."""

    score: float  # work of the rule as a share of the oracle's work
    tried: Sequence[tuple[int, bool]]  # size of each step, and whether it succeeded
    failures: int
    worst_minute: int  # most failures within any 60 s
    rest_share: float
    """Share of the time in which the rule ran nothing, although a size fitted that had succeeded in
    the minute before.
    """


def play(make: Maker, world: World, signal: Signal) -> Outcome:
    """Run a fresh rule through a world. ValueError: it chose a size outside 1..`LARGEST`."""
    now = 0.0
    rule = make(lambda: now)
    times, levels, duration = world.times_s, world.levels_bytes, world.duration_s
    sampled_s = -1
    items = 0.0
    tried: list[tuple[int, bool]] = []
    done = 0  # good steps; a failed step is repeated
    failed_at: list[float] = []
    recently: deque[tuple[float, int]] = deque()  # time and size of good steps of the last minute
    rested_s = 0.0
    while now < duration:
        available = levels[bisect_right(times, now) - 1]
        sample: int | None = None
        if signal.every_step:
            sample = available
        elif signal.noise is not None and int(now) > sampled_s:
            sampled_s = int(now)
            noise = 1 + signal.noise * world.noise[sampled_s]
            sample = max(0, int(world.samples_bytes[sampled_s] * noise))
        size = rule.next(sample)
        if size is None:
            while recently and recently[0][0] < now - 60.0:
                recently.popleft()
            fits = world.largest_that_fits(available, done, blocks=signal.blocks)
            rested_s += IDLE_S * any(known <= fits for _, known in recently)
            now += IDLE_S
            continue
        if not 1 <= size <= LARGEST:
            raise ValueError(
                f"{type(rule).__name__}.next() returned {size}; a size is from 1 to {LARGEST}"
            )
        need = world.need_bytes(size, done, blocks=signal.blocks)
        step_s = world.job.step_s(size)
        tried.append((size, need <= available))
        if need > available:
            failed_at.append(now)
            now += step_s / 2 + FAILURE_S
            rule.failed(size)
            continue
        # If the world ends during a step, only the part of the step before the end counts.
        done += 1
        items += size if now + step_s <= duration else size * (duration - now) / step_s
        now += step_s
        if not recently or recently[-1][1] != size or recently[-1][0] < now - 1.0:
            recently.append((now, size))
        rule.succeeded(size, need if signal.peaks else None)
    worst = max(
        (n - bisect_right(failed_at, at_s - 60.0) for n, at_s in enumerate(failed_at, 1)), default=0
    )
    return Outcome(
        score=items / oracle_items(world, blocks=signal.blocks), tried=tried,
        failures=len(failed_at), worst_minute=worst, rest_share=rested_s / duration,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def oracle_items(world: World, *, blocks: bool) -> float:
    """Return the work of an oracle that knows the need of each step and the memory, in items."""
    step, now, items = 0, 0.0, 0.0
    while now < world.duration_s:
        available = world.levels_bytes[bisect_right(world.times_s, now) - 1]
        size = world.largest_that_fits(available, step, blocks=blocks)
        if size == 0:
            now += IDLE_S
            continue
        step_s = world.job.step_s(size)
        items += size * min(1.0, (world.duration_s - now) / step_s)
        now += step_s
        step += 1
    return items


def moments(
    draw: Random, until_s: float, least_s: float, most_s: float, at_s: float = 0.0
) -> Iterator[float]:
    """Yield moments with random gaps of `least_s` to `most_s`; each gap is drawn when needed."""
    while at_s < until_s:
        yield at_s
        at_s += draw.uniform(least_s, most_s)


def _constant(draw: Random, _duration_s: float) -> Course:
    return [(0.0, draw.uniform(_LOW_GIB, _HIGH_GIB) * GIB)]


def _steps(draw: Random, duration_s: float) -> Course:
    """Changes to another level every two to five minutes."""
    return [
        (at_s, draw.uniform(_LOW_GIB, _HIGH_GIB) * GIB)
        for at_s in moments(draw, duration_s, 120.0, 300.0)
    ]


def _squeeze(draw: Random, duration_s: float) -> Course:
    """Is high at first, and is then reduced once or twice for good."""
    return _in_parts(
        draw, duration_s, draw.uniform(5.0, _HIGH_GIB), at_once=(0.25, 0.5), each=(0.45, 0.7)
    )


def _release(draw: Random, duration_s: float) -> Course:
    """Is low at first; more memory is released at once or in two parts."""
    return _in_parts(
        draw, duration_s, draw.uniform(_LOW_GIB, 2.2), at_once=(2.5, 3.6), each=(1.6, 1.9)
    )


def _in_parts(
    draw: Random,
    duration_s: float,
    level: float,
    at_once: tuple[float, float],
    each: tuple[float, float],
) -> Course:
    points = [(0.0, level * GIB)]
    parts = draw.choice((1, 2))
    for part in range(parts):
        level *= draw.uniform(*(at_once if parts == 1 else each))
        level = min(_HIGH_GIB, max(_LOW_GIB, level))
        moment = draw.uniform(0.2, 0.4) if part == 0 else draw.uniform(0.5, 0.7)
        points.append((duration_s * moment, level * GIB))
    return points


def _game(draw: Random, duration_s: float) -> Course:
    """A desktop whose use varies each second; twice a game uses most memory for minutes."""
    level, jitter = draw.uniform(4.0, _HIGH_GIB), draw.uniform(0.02, 0.08)
    games = []
    for half in (0.0, 0.5):
        begin_s = duration_s * (half + draw.uniform(0.08, 0.2))
        end_s = begin_s + duration_s * draw.uniform(0.08, 0.25)
        games.append((begin_s, end_s, draw.uniform(0.18, 0.35)))
    points = []
    for second in range(int(duration_s) + 1):
        left = next((share for begin_s, end_s, share in games if begin_s <= second < end_s), 1.0)
        points.append((float(second), level * left * (1 - jitter * draw.random()) * GIB))
    return points


def _neighbour(draw: Random, duration_s: float) -> Course:
    """A neighbouring job that uses a fixed amount for minutes, ends, and starts again."""
    level = draw.uniform(4.0, _HIGH_GIB)
    amount = level * draw.uniform(0.45, 0.75)
    comes = int(draw.random() >= 0.5)
    times_s = enumerate(moments(draw, duration_s, 60.0, 240.0))
    return [(at_s, (level - amount * (number % 2 == comes)) * GIB) for number, at_s in times_s]


def _leak(draw: Random, duration_s: float) -> Course:
    """A neighbour that leaks memory, and frees all of it when it restarts."""
    high = draw.uniform(4.0, _HIGH_GIB)
    low = max(_LOW_GIB, high * draw.uniform(0.2, 0.4))
    points, begin_s = [], 0
    length_s = draw.randint(120, 300)
    for second in range(int(duration_s) + 1):
        if second - begin_s >= length_s:
            begin_s, length_s = second, draw.randint(120, 300)
        points.append((float(second), (high - (high - low) * (second - begin_s) / length_s) * GIB))
    return points


def _walk(draw: Random, duration_s: float) -> Course:
    """A random walk with a small step each second, reflected at the bounds."""
    level, step = draw.uniform(2.5, 6.0), draw.uniform(0.04, 0.1)
    points = []
    for second in range(int(duration_s) + 1):
        points.append((float(second), level * GIB))
        level += draw.gauss(0.0, step)
        level = 2 * _LOW_GIB - level if level < _LOW_GIB else level
        level = 2 * _HIGH_GIB - level if level > _HIGH_GIB else level
    return points


def _sine(draw: Random, duration_s: float) -> Course:
    """A sine with a period of one to five minutes."""
    middle, period_s = draw.uniform(3.0, 5.0), draw.uniform(60.0, 300.0)
    swing, phase = middle * draw.uniform(0.3, 0.6), draw.uniform(0.0, math.tau)
    return [
        (at_s, (middle + swing * math.sin(math.tau * at_s / period_s + phase)) * GIB)
        for at_s in _half_seconds(duration_s)
    ]


def _bursts(draw: Random, duration_s: float) -> Course:
    """A neighbour that repeatedly uses most of the memory for one to three seconds."""
    level = draw.uniform(4.0, _HIGH_GIB)
    points = [(0.0, level * GIB)]
    for at_s in moments(draw, duration_s, 8.0, 40.0, at_s=draw.uniform(8.0, 40.0)):
        points.append((at_s, level * draw.uniform(0.15, 0.35) * GIB))
        points.append((at_s + draw.uniform(1.0, 3.0), level * GIB))
    return points


def _sawtooth(draw: Random, duration_s: float) -> Course:
    """Falls for 30 to 120 s, returns to the high level at once, and repeats."""
    high, period_s = draw.uniform(4.0, _HIGH_GIB), draw.uniform(30.0, 120.0)
    low = high * draw.uniform(0.2, 0.45)
    return [
        (at_s, (high - (high - low) * (at_s % period_s) / period_s) * GIB)
        for at_s in _half_seconds(duration_s)
    ]


def _half_seconds(duration_s: float) -> Iterator[float]:
    return (0.5 * half for half in range(2 * int(duration_s) + 1))


COURSES: Mapping[str, Callable[[Random, float], Course]] = {
    "constant": _constant, "steps": _steps, "squeeze": _squeeze, "release": _release,
    "game": _game, "neighbour": _neighbour, "leak": _leak, "walk": _walk,
}  # fmt: skip
#: Courses that were not used to design any rule.
SHAPES: Mapping[str, Callable[[Random, float], Course]] = {
    "sine": _sine, "bursts": _bursts, "sawtooth": _sawtooth,
}  # fmt: skip


@lru_cache(maxsize=128)
def worlds(
    seed: int, regime: str, rate_per_s: float = RATE_PER_S, *, shaped: bool = False
) -> tuple[World, ...]:
    """Return the eight worlds of a seed, in the order of `COURSES`; both regimes share courses and
    needs. With `shaped`, return two worlds for each of `SHAPES`; in the second one every n-th step
    needs several times the memory.

    At a lower rate (items per second in the limit of large steps) a rule has fewer steps to learn
    from between changes.
    """
    made = []
    for name, course in (SHAPES if shaped else COURSES).items():
        draw = Random(f"{seed}/{name}/course")  # noqa: S311 - a simulation, no secret
        duration_s = draw.uniform(20.0, 40.0) * 60
        points = course(draw, duration_s)
        options: dict[str, Any] = {"seed": seed, "regime": regime, "rate_per_s": rate_per_s}
        made.append(world_of(name, points, duration_s, **options))
        if shaped:
            options["heavy"] = (draw.randint(5, 40), draw.uniform(2.5, 6.0))
            made.append(world_of(f"{name}, spiky", points, duration_s, **options))
    return tuple(made)
