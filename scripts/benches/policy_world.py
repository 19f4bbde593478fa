"""A virtual clock to play a rule for sizes against eight made-up courses of free memory.

A step fails when it needs more than what is available at the moment it begins. The score of a rule is the work it does,
divided by the work of an oracle that knows every need beforehand and always runs the largest size that fits. Everything
is drawn from a seed: the same seed is the same world, for every rule. Needs no torch and no real second. What a step
needs is told in `benches.policy_workload`, how hard the courses are in `benches.policy_courses`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from benches.policy_courses import COURSES
from benches.policy_workload import LARGEST, RATE_PER_S, World, world_of

FAILURE_S = 0.05
"""What a failure costs beside half of its step: the cleanup."""
IDLE_S = 0.1
"""How long a rule waits that runs nothing."""


class Rule(Protocol):
    """Whatever chooses sizes: `next`, then `succeeded` or `failed`, and again."""

    def next(self, free_bytes: int | None = None) -> int | None:
        """Return the size of the next step; None to run nothing now."""

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        """Take note that a step ended well."""

    def failed(self, size: int) -> None:
        """Take note that a step ran out of memory."""


class VirtualClock:
    """Seconds since the start of the course."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

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
    steps: int
    """Good ones."""
    failures: int
    failures_per_minute: float
    worst_minute: int
    """Most failures within any sixty seconds."""
    failures_in_a_row: int
    """Longest run of them."""
    size_changes: int
    idle_s: float


def play(make: Callable[[Callable[[], float]], Rule], world: World, signal: Signal) -> Outcome:
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
    attempts = good = changes = 0
    previous: int | None = None
    failed_at: list[float] = []
    failed_attempts: list[int] = []
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
        if size != previous:
            changes += previous is not None
            previous = size
        need = world.need_bytes(size, attempts, blocks=signal.blocks)
        attempts += 1
        step_s = world.step_s(size)
        if need > available:
            failed_at.append(now)
            failed_attempts.append(attempts)
            now += step_s / 2 + FAILURE_S
            clock.now_s = now
            rule.failed(size)
            continue
        # Of a step that the end cuts off, only the part before the end counts.
        items += size if now + step_s <= duration else size * (duration - now) / step_s
        good += 1
        now += step_s
        clock.now_s = now
        rule.succeeded(size, need if signal.peaks else None)
    return Outcome(
        score=items / oracle_items(world, blocks=signal.blocks),
        items=items,
        steps=good,
        failures=len(failed_at),
        failures_per_minute=len(failed_at) / (duration / 60),
        worst_minute=_most_within(failed_at, 60.0),
        failures_in_a_row=_longest_row(failed_attempts),
        size_changes=changes,
        idle_s=idle_s,
    )


@lru_cache(maxsize=1024)
def oracle_items(world: World, *, blocks: bool) -> float:
    """Return the work of whoever knows what each step needs and has, and never fails."""
    place, last_place, step, now, items = 0, len(world.times_s) - 1, 0, 0.0, 0.0
    while now < world.duration_s:
        while place < last_place and world.times_s[place + 1] <= now:
            place += 1
        size = world.largest_that_fits(world.levels_bytes[place], step, blocks=blocks)
        if size == 0:
            now += IDLE_S
            continue
        step_s = world.step_s(size)
        items += size * min(1.0, (world.duration_s - now) / step_s)
        now += step_s
        step += 1
    return items


def _longest_row(numbers: Sequence[int]) -> int:
    longest = row = 0
    for place, number in enumerate(numbers):
        row = row + 1 if place and number == numbers[place - 1] + 1 else 1
        longest = max(longest, row)
    return longest


def _most_within(moments_s: Sequence[float], span_s: float) -> int:
    first = most = 0
    for last, moment_s in enumerate(moments_s):
        while moment_s - moments_s[first] >= span_s:
            first += 1
        most = max(most, last - first + 1)
    return most


@lru_cache(maxsize=64)
def worlds(seed: int, regime: str, rate_per_s: float = RATE_PER_S) -> tuple[World, ...]:
    """Return the eight worlds of a seed, in the order of `benches.policy_courses.COURSES`.

    Args:
        seed: Whatever is drawn is drawn from it; both regimes of a seed share their courses and needs.
        regime: A key of `benches.policy_workload.HALF_SPEED_ITEMS`.
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
