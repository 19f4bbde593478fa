"""A virtual clock to play a rule for sizes against eight courses of free memory, drawn at random,
and an oracle's work.

A step of b items takes (half_items + b) / rate seconds and needs (fixed + item x b) bytes, give or
take 1 %. Where a signal wants it so, needs come in blocks and with a library's workspace that comes
and goes with the size. A step fails when it needs more than what is available as it begins, and
comes again. The score of a rule is its work divided by that of an oracle that knows every need and
always runs the largest size that fits. No fragmentation, no cache.

How much memory others take, and how often, is set such that the rules of today score, as a mean
over many seeds where memory is precious: accelerate's 0.77, toma's 0.66, the guide's 0.73, AIMD
0.89 with 10,000 items a second to grow in.
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

LARGEST = 8000  # no size is larger; 16 GiB and more, above every level
RATE_PER_S = 10_000.0  # items per second of an endlessly large step
ITEM_BYTES = 2 * GIB / 1000
#: By regime: the size that runs at half of the full rate.
HALF_SPEED_ITEMS = {"precious": 1000, "saturating": 150}
WOBBLE = 0.01
BLOCK_BYTES = 2 * 2**20  # torch's caching allocator takes large memory in blocks of 2 MiB
#: What a library's workspace adds at the sizes for which it picks the algorithm that wants one.
WORKSPACE = 0.05
WORKSPACE_ITEMS = 64  # so many neighbouring sizes share the library's choice
FAILURE_S = 0.05  # what a failure costs beside half of its step: the cleanup
IDLE_S = 0.1  # how long a rule waits that runs nothing
_DRAWS = 8192
_LOW_GIB, _HIGH_GIB = 1.2, 8.0  # the least and the most that others leave

#: (second, available bytes), the first at second 0; a level holds until the next.
Course = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What steps take, without their wobble."""

    fixed_bytes: float
    item_bytes: float
    half_items: float  # the size that runs at half of the rate
    rate_per_s: float  # items per second of an endlessly large step

    def need_bytes(self, size: int) -> float:
        return self.fixed_bytes + self.item_bytes * size

    def step_s(self, size: int) -> float:
        return (self.half_items + size) / self.rate_per_s

    def largest_within(self, limit_bytes: float) -> int:
        """Return the largest size whose step takes no more, a hair below for rounding's sake."""
        items = (limit_bytes - self.fixed_bytes) / self.item_bytes
        return max(0, min(LARGEST, math.floor(items - 1e-6)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """One course, and the job that meets it; the same as another only if it is one object."""

    name: str
    seed: int
    job: Job
    duration_s: float
    times_s: Sequence[float]  # when the level changes; the first is 0
    levels_bytes: Sequence[int]  # what is available from the time at the same place on
    wobble: Sequence[float]  # factor on the need of the n-th step, over and over
    workspace: Sequence[bool]
    """By size // `WORKSPACE_ITEMS`: whether the library wants its workspace."""
    samples_bytes: Sequence[int]  # what is available at each whole second
    noise: Sequence[float]  # standard normal, for each whole second

    def need_bytes(self, size: int, step: int, *, blocks: bool) -> int:
        """Return what a step needs at this size; `step` have ended well before."""
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

    `heavy`: of so many steps each last one takes so many times the memory.
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
    """What chooses sizes: `next`, then `succeeded` or `failed`, and again."""

    def next(self, free_bytes: int | None = None) -> int | None:
        """Return the size of the next step; None to run nothing now."""

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        pass

    def failed(self, size: int) -> None:
        pass


#: Makes a rule that knows nothing yet, given the clock it may read.
Maker = Callable[[Callable[[], float]], Rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What a rule is told."""

    name: str
    every_step: bool = False  # tells what is available, truly, before each step
    noise: float | None = None
    """Tells once a second what was available at that second, with this relative standard deviation;
    None: it does not. Between two samples a rule is told None."""
    peaks: bool = True  # tells what a good step needed
    blocks: bool = False
    """Needs come in whole blocks, and with a workspace that comes and goes with the size."""


EXACT = Signal(name="exact", every_step=True)
REAL = Signal(name="real", noise=0.03, blocks=True)
BLIND = Signal(name="blind", peaks=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rule fared in a world."""

    score: float  # its work as a share of the oracle's
    tried: Sequence[tuple[int, bool]]  # of each step: its size, and whether it ended well
    failures: int
    worst_minute: int  # most failures within any sixty seconds
    rest_share: float
    """Share of the time in which nothing ran, although a size fitted that had ended well in the
    minute before.
    """


def play(make: Maker, world: World, signal: Signal) -> Outcome:
    """Let a fresh rule choose a course's sizes; ValueError: a size outside 1..`LARGEST`."""
    now = 0.0
    rule = make(lambda: now)
    times, levels, duration = world.times_s, world.levels_bytes, world.duration_s
    sampled_s = -1
    items = 0.0
    tried: list[tuple[int, bool]] = []
    done = 0  # a step that failed comes again
    failed_at: list[float] = []
    recently: deque[tuple[float, int]] = deque()  # good steps of the last minute
    rested_s = 0.0
    while now < duration:
        available = levels[bisect_right(times, now) - 1]
        told: int | None = None
        if signal.every_step:
            told = available
        elif signal.noise is not None and int(now) > sampled_s:
            sampled_s = int(now)
            noise = 1 + signal.noise * world.noise[sampled_s]
            told = max(0, int(world.samples_bytes[sampled_s] * noise))
        size = rule.next(told)
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
        # Of a step that the end cuts off, only the part before the end counts.
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
    """Return the work of a rule that knows what each step needs and has, and never fails."""
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
    """Yield moments so far apart; each gap is drawn after what happens before it."""
    while at_s < until_s:
        yield at_s
        at_s += draw.uniform(least_s, most_s)


def _constant(draw: Random, _duration_s: float) -> Course:
    return [(0.0, draw.uniform(_LOW_GIB, _HIGH_GIB) * GIB)]


def _steps(draw: Random, duration_s: float) -> Course:
    """Another level every two to five minutes."""
    return [
        (at_s, draw.uniform(_LOW_GIB, _HIGH_GIB) * GIB)
        for at_s in moments(draw, duration_s, 120.0, 300.0)
    ]


def _squeeze(draw: Random, duration_s: float) -> Course:
    """High at first; then one or two cuts, and what is cut stays cut."""
    return _in_parts(
        draw, duration_s, draw.uniform(5.0, _HIGH_GIB), at_once=(0.25, 0.5), each=(0.45, 0.7)
    )


def _release(draw: Random, duration_s: float) -> Course:
    """Low at first; more is released, at once or in two parts."""
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
    """A desktop that jitters each second; twice a game takes most of the memory for minutes."""
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
    """A job that takes a fixed amount for minutes, ends, and comes again."""
    level = draw.uniform(4.0, _HIGH_GIB)
    amount = level * draw.uniform(0.45, 0.75)
    comes = int(draw.random() >= 0.5)
    times_s = enumerate(moments(draw, duration_s, 60.0, 240.0))
    return [(at_s, (level - amount * (number % 2 == comes)) * GIB) for number, at_s in times_s]


def _leak(draw: Random, duration_s: float) -> Course:
    """A neighbour that takes more and more, and gives all of it back when it restarts."""
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
    """A small step each second, reflected where it would leave the bounds."""
    level, step = draw.uniform(2.5, 6.0), draw.uniform(0.04, 0.1)
    points = []
    for second in range(int(duration_s) + 1):
        points.append((float(second), level * GIB))
        level += draw.gauss(0.0, step)
        level = 2 * _LOW_GIB - level if level < _LOW_GIB else level
        level = 2 * _HIGH_GIB - level if level > _HIGH_GIB else level
    return points


def _sine(draw: Random, duration_s: float) -> Course:
    """Up and down once in one to five minutes."""
    middle, period_s = draw.uniform(3.0, 5.0), draw.uniform(60.0, 300.0)
    swing, phase = middle * draw.uniform(0.3, 0.6), draw.uniform(0.0, math.tau)
    return [
        (at_s, (middle + swing * math.sin(math.tau * at_s / period_s + phase)) * GIB)
        for at_s in _half_seconds(duration_s)
    ]


def _bursts(draw: Random, duration_s: float) -> Course:
    """A neighbour that takes most of the memory for one to three seconds, again and again."""
    level = draw.uniform(4.0, _HIGH_GIB)
    points = [(0.0, level * GIB)]
    for at_s in moments(draw, duration_s, 8.0, 40.0, at_s=draw.uniform(8.0, 40.0)):
        points.append((at_s, level * draw.uniform(0.15, 0.35) * GIB))
        points.append((at_s + draw.uniform(1.0, 3.0), level * GIB))
    return points


def _sawtooth(draw: Random, duration_s: float) -> Course:
    """Falls for half a minute to two, and is back at once."""
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
#: Courses that no rule was made for.
SHAPES: Mapping[str, Callable[[Random, float], Course]] = {
    "sine": _sine, "bursts": _bursts, "sawtooth": _sawtooth,
}  # fmt: skip


@lru_cache(maxsize=128)
def worlds(
    seed: int, regime: str, rate_per_s: float = RATE_PER_S, *, shaped: bool = False
) -> tuple[World, ...]:
    """Return the eight worlds of a seed, in the order of `COURSES`; both regimes share their
    courses and needs. Those that are `shaped` have the courses of `SHAPES`, each also with every
    n-th step of several times the memory.

    At a lower rate (items per second of an endlessly large step) a rule has fewer steps to learn
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
