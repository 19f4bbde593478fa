"""How much of the work an oracle would do the rules for a step's size do, and how often they fail meanwhile.

Plays the adaptive rule with each of its three signals, and the rules in use today, in the worlds of `simulator.py`;
then the adaptive one from cold and from learned limits at a constant level, and takes the time of its decisions. Judges
the targets one by one; a target that is missed breaks nothing. Needs no torch, no Ray and, but for the time of a
decision, gives the same figures everywhere.

The rules of today are blind: they learn from success and failure alone. They are written anew from what their authors'
code and texts do, without the decorators around it; the simulator charges a failure the same for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benches.common import Result, judged, progress
from benches.simulator import (
    BLIND,
    EXACT,
    HALF_SPEED_ITEMS,
    LARGEST,
    PEAK,
    REAL,
    WOBBLE,
    Maker,
    Outcome,
    Rule,
    Signal,
    World,
    play,
    world_of,
    worlds,
)
from workers.resilience.adaptive_size import AdaptiveSize, Learned
from workers.units import GIB

ADAPTIVE = "adaptive"

#: What the adaptive rule is told it may fail within any sixty seconds.
FAILURES_PER_MINUTE = 6

#: At a constant level: this share of the largest size that fits in every step, whatever its wobble, counts as there.
THERE = 0.98
COLD_LEVELS_GIB = (1.2, 1.7, 2.4, 3.4, 4.7, 6.3, 8.0)
_COLD_S = 20 * 60.0
#: The steps of a second run, from learned limits, that are looked at for failures.
_SECOND_RUN_STEPS = 12


@dataclass(frozen=True, slots=True)
class Target:
    """What the adaptive rule shall reach in a regime with a signal."""

    regime: str
    signal: Signal
    mean: float
    worst: float = 0.0
    failures_per_minute: float = float("inf")


TARGETS = (
    Target("precious", EXACT, 0.99, 0.97),
    Target("precious", REAL, 0.95, 0.90, 0.2),
    Target("precious", BLIND, 0.86, 0.75, 2.0),
    Target("saturating", EXACT, 0.995),
    Target("saturating", REAL, 0.98),
    Target("saturating", BLIND, 0.95),
)


@dataclass(slots=True)
class Shrinking:
    """Starts at the largest size, takes a share of it after a failure and never grows; at zero it gives up."""

    size: int
    share: float

    def next(self, free_bytes: int | None = None) -> int | None:  # noqa: ARG002
        """Return the size of the next step."""
        return self.size or None

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        """Take no notice."""

    def failed(self, size: int) -> None:
        """Shrink."""
        self.size = int(size * self.share)


class Guide:
    """The 3070 guide: max(floor, int(base * 0.7 ** failures)); its count of failures never goes down."""

    def __init__(self, largest: int, *, floor: int = 256) -> None:
        self._largest, self._floor, self._failures = largest, floor, 0

    def next(self, free_bytes: int | None = None) -> int | None:  # noqa: ARG002
        """Return the size of the next step."""
        return max(self._floor, int(self._largest * 0.7**self._failures))

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        """Take no notice."""

    def failed(self, size: int) -> None:  # noqa: ARG002
        """Count it, for good."""
        self._failures += 1


class Aimd:
    """As TCP does it: 0.7 of it after a failure, 2 % more after ten good steps; begins anew at neither."""

    def __init__(self, largest: int) -> None:
        self._largest, self._size, self._good = largest, float(largest), 0

    def next(self, free_bytes: int | None = None) -> int | None:  # noqa: ARG002
        """Return the size of the next step."""
        return int(self._size)

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:  # noqa: ARG002
        """Count it; after ten in a row, grow by 2 %."""
        self._good += 1
        if self._good == 10:
            self._size, self._good = min(self._largest, self._size * 1.02), 0

    def failed(self, size: int) -> None:  # noqa: ARG002
        """Reduce to 70 %."""
        self._size, self._good = max(1.0, self._size * 0.7), 0


RULES: Mapping[str, Callable[[int], Rule]] = {
    "accelerate": lambda largest: Shrinking(largest, 0.9),  # 1.15, find_executable_batch_size
    "toma": lambda largest: Shrinking(largest, 0.5),  # 1.1, `batch` without a cache between calls
    "guide": Guide,
    "aimd": Aimd,
}
"""By name; each is made with the largest size, which it starts from."""


def run(seeds: int, seed: int, rules: Sequence[str], rate: float) -> Result:
    """Play the rules in the worlds of some seeds.

    Args:
        seeds: How many, from the first one on.
        seed: The first; another one, other worlds.
        rules: `ADAPTIVE` and names of `RULES`.
        rate: Items per second of an endlessly large step.

    """
    figures: dict[str, Any] = {"seeds": seeds, "first_seed": seed, "rate_items_per_s": rate}
    broken: list[str] = []
    for regime in HALF_SPEED_ITEMS:
        figures[regime] = []
        for name in rules:
            for signal in (EXACT, REAL, BLIND) if name == ADAPTIVE else (BLIND,):
                progress(f"{regime}: {name}, {signal.name}")
                outcomes = [
                    (world, play(_maker(name, signal), world, signal))
                    for each in range(seed, seed + seeds)
                    for world in worlds(each, regime, rate)
                ]
                figures[regime].append({"regime": regime, "rule": name, "signal": signal.name, **_row(outcomes)})
                broken += _broken(name, f"{regime}, {signal.name}", outcomes)
    if ADAPTIVE in rules:
        figures["constant_level"] = [_cold_start(signal, seed, rate) for signal in (EXACT, PEAK, BLIND)]
        decisions_us = {signal.name: _decision_us(signal, seed) for signal in (EXACT, REAL, BLIND)}
        figures |= {f"decision_us_{name}": value for name, value in decisions_us.items()}
        targets = _targets(figures, max(decisions_us.values()))
        figures["targets"] = targets
        figures["targets_met"] = f"{sum(target['met'] == 'yes' for target in targets)} of {len(targets)}"
    return Result(bench="policy", figures=figures, broken=broken)


def _maker(name: str, signal: Signal, learned: Learned | None = None, made: list[AdaptiveSize] | None = None) -> Maker:
    """Return what makes a rule; an adaptive one is told whether samples are exact, and put into `made` too."""

    def adaptive(clock: Callable[[], float]) -> AdaptiveSize:
        rule = AdaptiveSize(
            LARGEST,
            failures_per_minute=FAILURES_PER_MINUTE,
            exact_samples=signal.every_step,
            learned=learned,
            clock=clock,
        )
        if made is not None:
            made.append(rule)
        return rule

    return adaptive if name == ADAPTIVE else lambda _clock: RULES[name](LARGEST)


def _row(outcomes: Sequence[tuple[World, Outcome]]) -> dict[str, Any]:
    by_course: dict[str, list[float]] = {}
    for world, outcome in outcomes:
        by_course.setdefault(world.name, []).append(outcome.score)
    worst_world, worst = min(outcomes, key=lambda pair: pair[1].score)
    minutes = sum(world.duration_s for world, _ in outcomes) / 60
    return {
        "mean": statistics.fmean(outcome.score for _, outcome in outcomes),
        "worst": worst.score,
        "in": f"{worst_world.name}/{worst_world.seed}",
        "failures_per_minute": sum(outcome.failures for _, outcome in outcomes) / minutes,
        "worst_minute": max(outcome.worst_minute for _, outcome in outcomes),
        "size_changes_per_minute": sum(outcome.size_changes for _, outcome in outcomes) / minutes,
        **{course: statistics.fmean(scores) for course, scores in by_course.items()},
    }


def _broken(name: str, where: str, outcomes: Sequence[tuple[World, Outcome]]) -> list[str]:
    # A rule may beat the oracle by a hair, which never waits for memory that is about to come; not by more.
    sentences = [
        f"{name} beats the oracle in {where}, {world.name}/{world.seed}: {outcome.score:.4f}"
        for world, outcome in outcomes
        if outcome.score > 1.002
    ]
    if name == ADAPTIVE:
        sentences += [
            f"{outcome.worst_minute} failures within a minute in {where}, {world.name}/{world.seed}; "
            f"{FAILURES_PER_MINUTE} are allowed"
            for world, outcome in outcomes
            if outcome.worst_minute > FAILURES_PER_MINUTE
        ]
    return sentences


def _cold_start(signal: Signal, seed: int, rate_per_s: float) -> dict[str, Any]:
    """Return the worst that the adaptive rule does at a few constant levels, from nothing and from what it learned."""
    steps: list[int | None] = []
    failures: list[int] = []
    second_steps: list[int | None] = []
    second_failures: list[int] = []
    for level_gib in COLD_LEVELS_GIB:
        world, largest = constant_world(seed, level_gib, _COLD_S, rate_per_s=rate_per_s)
        made: list[AdaptiveSize] = []
        first = play(_maker(ADAPTIVE, signal, made=made), world, signal).tried
        steps.append(_first_there(first, THERE * largest))
        failures.append(sum(not good for _, good in first[: steps[-1]]))
        # Another run meets other steps.
        turned = replace(world, wobble=world.wobble[::-1])
        second = play(_maker(ADAPTIVE, signal, made[0].learned), turned, signal).tried
        second_steps.append(_first_there(second, THERE * largest))
        second_failures.append(sum(not good for _, good in second[:_SECOND_RUN_STEPS]))
    return {
        "signal": signal.name,
        "levels": len(COLD_LEVELS_GIB),
        "most_steps_from_cold": _most(steps),
        "most_failures_till_there": max(failures),
        "most_steps_from_learned": _most(second_steps),
        f"most_failures_in_{_SECOND_RUN_STEPS}_steps_from_learned": max(second_failures),
    }


def constant_world(seed: int, level_gib: float, duration_s: float, **options: Any) -> tuple[World, float]:  # noqa: ANN401 - of world_of
    """Return a world whose level stays as it is, and the largest size that fits however its steps wobble."""
    world = world_of(f"constant at {level_gib}", [(0.0, level_gib * GIB)], duration_s, seed=seed, **options)
    return world, (level_gib * GIB / (1 + WOBBLE) - world.job.fixed_bytes) / world.job.item_bytes


def _first_there(tried: Sequence[tuple[int, bool]], there: float) -> int | None:
    return next((number for number, (size, good) in enumerate(tried, start=1) if good and size >= there), None)


def _most(steps: Sequence[int | None]) -> int | None:
    """Return the most, None if one of them never got there."""
    known = [step for step in steps if step is not None]
    return max(known) if len(known) == len(steps) else None


def _decision_us(signal: Signal, seed: int) -> float:
    """Return the time of one `next` and what it is told of the step's end, the median over the eight worlds."""

    def call_s(name: str, world: World) -> float:
        begin_s = time.perf_counter()
        outcome = play(_maker(name, signal), world, signal)
        return (time.perf_counter() - begin_s) / len(outcome.tried)

    return statistics.median(
        1e6 * (call_s(ADAPTIVE, world) - call_s("accelerate", world)) for world in worlds(seed, "precious")
    )


def _targets(figures: Mapping[str, Any], decision_us: float) -> list[dict[str, str]]:
    found_rows = [row for regime in HALF_SPEED_ITEMS for row in figures[regime] if row["rule"] == ADAPTIVE]
    rows = {(row["regime"], row["signal"]): row for row in found_rows}
    found = []
    for target in TARGETS:
        row = rows[target.regime, target.signal.name]
        where = f"{target.regime}, {target.signal.name}"
        found.append(judged(f"{where}: mean", row["mean"], at_least=target.mean))
        if target.worst:
            found.append(judged(f"{where}: worst", row["worst"], at_least=target.worst))
        if target.failures_per_minute < float("inf"):
            rate = row["failures_per_minute"]
            found.append(judged(f"{where}: failures per minute", rate, at_most=target.failures_per_minute))
    cold, level = figures["constant_level"][0], "constant level, exact"
    failures = cold[f"most_failures_in_{_SECOND_RUN_STEPS}_steps_from_learned"]
    return [
        *found,
        judged(f"{level}: steps from cold", cold["most_steps_from_cold"], at_most=12),
        judged(f"{level}: failures till there", cold["most_failures_till_there"], at_most=1),
        judged(f"{level}: steps from learned", cold["most_steps_from_learned"], at_most=1),
        judged(f"{level}: failures from learned", failures, at_most=0),
        judged("microseconds for a decision", decision_us, at_most=20),
    ]
