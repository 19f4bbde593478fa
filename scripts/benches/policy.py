"""Measures the work of rules for the size of a step as a share of an oracle's work, and how often
the rules fail.

Runs the adaptive rule with each of three signals, and the rules in use today, in the worlds of
`simulator.py` and in its shaped worlds (in the `spiky` ones some steps need far more memory). Then
measures the time of a decision. The rules of today learn from success and failure alone. They are
reimplemented from the code and texts of their authors, and a failure costs every rule the same.
Judges nothing: tests/policy has the requirements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benches import simulator
from benches.common import Result, progress
from benches.simulator import BLIND, EXACT, LARGEST, REAL, Maker, Outcome, Signal, World, play
from workers.resilience.adaptive_size import AdaptiveSize

ADAPTIVE = "adaptive"
#: Limit of failures within any 60 s that the adaptive rule gets.
FAILURES_PER_MINUTE = 6


@dataclass(slots=True)
class RuleOfToday:
    """Begins with the largest size, reduces it to `share` after a failure, and may grow again."""

    largest: int
    share: float
    floor: float = 0.0  # at size 0 the rule gives up
    growth: float = 1.0
    whole: bool = False  # whether the reduced size is rounded down
    _size: float = field(init=False)
    _good: int = 0

    def __post_init__(self) -> None:
        self._size = self.largest

    def next(self, free_bytes: int | None = None) -> int | None:  # noqa: ARG002
        return int(self._size) or None

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:  # noqa: ARG002
        self._good += 1
        if self._good == 10:
            self._size, self._good = min(self.largest, self._size * self.growth), 0

    def failed(self, size: int) -> None:  # noqa: ARG002
        less = self._size * self.share
        self._size, self._good = max(self.floor, int(less) if self.whole else less), 0


#: Keyed by name; each is called with the largest size.
RULES: Mapping[str, Callable[[int], simulator.Rule]] = {
    # 1.15, find_executable_batch_size
    "accelerate": lambda largest: RuleOfToday(largest, 0.9, whole=True),
    # 1.1, `batch` without a cache between calls
    "toma": lambda largest: RuleOfToday(largest, 0.5, whole=True),
    # The 3070 guide: max(floor, int(base * 0.7 ** failures)); its count of failures only grows.
    "guide": lambda largest: RuleOfToday(largest, 0.7, floor=256.0),
    # As in TCP: 0.7 of the size after a failure, and 2 % more after ten good steps.
    "aimd": lambda largest: RuleOfToday(largest, 0.7, floor=1.0, growth=1.02),
}


def run(seeds: int, seed: int, rules: Sequence[str], rate: float) -> Result:
    figures: dict[str, Any] = {"seeds": seeds, "first_seed": seed, "rate_items_per_s": rate}
    broken: list[str] = []
    for regime in simulator.HALF_SPEED_ITEMS:
        figures[regime], figures[f"{regime}_shapes"] = [], []
        for name in rules:
            for signal in (EXACT, REAL, BLIND) if name == ADAPTIVE else (BLIND,):
                progress(f"{regime}: {name}, {signal.name}")
                of = {"regime": regime, "rule": name, "signal": signal.name}
                for rows, shaped in ((regime, False), (f"{regime}_shapes", True)):
                    outcomes = [
                        (world, play(_maker(name, signal), world, signal))
                        for each in range(seed, seed + seeds)
                        for world in simulator.worlds(each, regime, rate, shaped=shaped)
                    ]
                    figures[rows].append({**of, **_row(outcomes)})
                    broken += _broken(name, f"{regime}, {signal.name}", outcomes)
    if ADAPTIVE in rules:
        figures |= {
            f"decision_us_{signal.name}": _decision_us(signal, seed)
            for signal in (EXACT, REAL, BLIND)
        }
    return Result(bench="policy", figures=figures, broken=broken)


def _maker(name: str, signal: Signal) -> Maker:
    """Return a maker of the rule; the adaptive rule learns whether samples are exact."""
    if name != ADAPTIVE:
        return lambda _clock: RULES[name](LARGEST)
    return lambda clock: AdaptiveSize(
        LARGEST, failures_per_minute=FAILURES_PER_MINUTE, exact_samples=signal.every_step,
        clock=clock,
    )  # fmt: skip


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
        "rest_share": statistics.fmean(outcome.rest_share for _, outcome in outcomes),
        **{course: statistics.fmean(scores) for course, scores in by_course.items()},
    }


def _broken(name: str, where: str, outcomes: Sequence[tuple[World, Outcome]]) -> list[str]:
    # A rule may beat the oracle slightly, because the oracle never waits for memory that will be
    # free soon.
    return [
        f"{name} beats the oracle in {where}, {world.name}/{world.seed}: {outcome.score:.4f}"
        for world, outcome in outcomes
        if outcome.score > 1.002
    ]


def _decision_us(signal: Signal, seed: int) -> float:
    """Return the time of one `next` and its answer in microseconds, the median over all worlds."""

    def call_s(name: str, world: World) -> float:
        begin_s = time.perf_counter()
        outcome = play(_maker(name, signal), world, signal)
        return (time.perf_counter() - begin_s) / len(outcome.tried)

    return statistics.median(
        1e6 * (call_s(ADAPTIVE, world) - call_s("accelerate", world))
        for world in simulator.worlds(seed, "precious")
    )
