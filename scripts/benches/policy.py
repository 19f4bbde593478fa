"""How much of the work an oracle would do the rules for a step's size do, and how often they fail meanwhile.

Plays the adaptive rule with each of its three signals, and the rules in use today, in the worlds of `policy_world.py`;
then the adaptive one from cold and from learned limits at a constant level, and takes the time of its decisions. Judges
the targets one by one; a target that is missed breaks nothing. Needs no torch, no Ray and, but for the time of a
decision, gives the same figures everywhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benches.common import Result, progress
from benches.policy_rules import RULES
from benches.policy_workload import HALF_SPEED_ITEMS, ITEM_BYTES, LARGEST, WOBBLE, World, world_of
from benches.policy_world import BLIND, EXACT, PEAK, REAL, Outcome, Rule, Signal, play, worlds
from workers.resilience.adaptive_size import AdaptiveSize, Learned
from workers.units import GIB

ADAPTIVE = "adaptive"
RULE_NAMES = (ADAPTIVE, *RULES)

#: What the adaptive rule is told it may fail within any sixty seconds.
FAILURES_PER_MINUTE = 6

#: At a constant level: this share of the largest size that fits in every step, whatever its wobble, counts as there.
_THERE = 0.98
_COLD_LEVELS_GIB = (1.2, 1.7, 2.4, 3.4, 4.7, 6.3, 8.0)
_COLD_S = 20 * 60.0
#: The steps of a second run, from learned limits, that are looked at for failures.
_SECOND_RUN_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the adaptive rule shall reach in a regime with a signal."""

    regime: str
    signal: str
    mean: float
    worst: float = 0.0
    failures_per_minute: float = float("inf")


TARGETS = (
    Target(regime="precious", signal="exact", mean=0.99, worst=0.97),
    Target(regime="precious", signal="real", mean=0.95, worst=0.90, failures_per_minute=0.2),
    Target(regime="precious", signal="blind", mean=0.86, worst=0.75, failures_per_minute=2.0),
    Target(regime="saturating", signal="exact", mean=0.995),
    Target(regime="saturating", signal="real", mean=0.98),
    Target(regime="saturating", signal="blind", mean=0.95),
)


@dataclass(slots=True)
class Recorder:
    """Keeps the sizes that a rule had run, and whether they ended well."""

    rule: Rule
    tried: list[tuple[int, bool]] = field(default_factory=list)

    def next(self, free_bytes: int | None = None) -> int | None:
        """Ask the rule."""
        return self.rule.next(free_bytes)

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        """Keep it, and tell the rule."""
        self.tried.append((size, True))
        self.rule.succeeded(size, peak_bytes)

    def failed(self, size: int) -> None:
        """Keep it, and tell the rule."""
        self.tried.append((size, False))
        self.rule.failed(size)


def run(seeds: int, first_seed: int, rules: Sequence[str], rate_per_s: float) -> Result:
    """Play the rules in the worlds of some seeds.

    Args:
        seeds: How many, from the first one on.
        first_seed: Another one, other worlds.
        rules: Names of `RULE_NAMES`.
        rate_per_s: Items per second of an endlessly large step.

    """
    figures: dict[str, Any] = {"seeds": seeds, "first_seed": first_seed, "rate_items_per_s": rate_per_s}
    broken: list[str] = []
    found: list[dict[str, Any]] = []
    for regime in HALF_SPEED_ITEMS:
        rows = []
        for name in rules:
            for signal in (EXACT, REAL, BLIND) if name == ADAPTIVE else (BLIND,):
                progress(f"{regime}: {name}, {signal.name}")
                outcomes = _outcomes(name, regime, signal, range(first_seed, first_seed + seeds), rate_per_s)
                rows.append({"regime": regime, "rule": name, "signal": signal.name, **_row(outcomes)})
                broken += _broken(name, f"{regime}, {signal.name}", outcomes)
        figures[regime] = rows
        found += rows
    if ADAPTIVE in rules:
        cold = [_cold_start(signal, first_seed, rate_per_s) for signal in (EXACT, PEAK, BLIND)]
        figures["constant_level"] = cold
        decisions_us = {signal.name: _decision_us(signal, first_seed) for signal in (EXACT, REAL, BLIND)}
        figures |= {f"decision_us_{name}": value for name, value in decisions_us.items()}
        targets = [*_targets(found), *_cold_targets(cold[0]), _cost_target(decisions_us)]
        figures["targets"] = targets
        figures["targets_met"] = f"{sum(target['met'] == 'yes' for target in targets)} of {len(targets)}"
    return Result(bench="policy", figures=figures, broken=broken)


def _maker(name: str, learned: Learned | None = None) -> Callable[[Callable[[], float]], Rule]:
    if name == ADAPTIVE:
        return lambda clock: AdaptiveSize(
            LARGEST, smallest=1, failures_per_minute=FAILURES_PER_MINUTE, learned=learned, clock=clock
        )
    return lambda _clock: RULES[name](LARGEST)


def _outcomes(
    name: str, regime: str, signal: Signal, seeds: Sequence[int], rate_per_s: float
) -> list[tuple[World, Outcome]]:
    make = _maker(name)
    return [(world, play(make, world, signal)) for seed in seeds for world in worlds(seed, regime, rate_per_s)]


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
    for level_gib in _COLD_LEVELS_GIB:
        world = world_of(
            f"constant at {level_gib}", [(0.0, level_gib * GIB)], _COLD_S, seed=seed, rate_per_s=rate_per_s
        )
        there = _THERE * (level_gib * GIB / (1 + WOBBLE) - world.fixed_bytes) / ITEM_BYTES
        made: list[AdaptiveSize] = []
        first = _tried(partial(_kept, made), world, signal)
        steps.append(_first_there(first, there))
        failures.append(sum(not good for _, good in first[: steps[-1]]))
        # Another run meets other steps.
        second = _tried(_maker(ADAPTIVE, made[0].learned), replace(world, wobble=world.wobble[::-1]), signal)
        second_steps.append(_first_there(second, there))
        second_failures.append(sum(not good for _, good in second[:_SECOND_RUN_STEPS]))
    return {
        "signal": signal.name,
        "levels": len(_COLD_LEVELS_GIB),
        "most_steps_from_cold": _most(steps),
        "most_failures_till_there": max(failures),
        "most_steps_from_learned": _most(second_steps),
        f"most_failures_in_{_SECOND_RUN_STEPS}_steps_from_learned": max(second_failures),
    }


def _kept(made: list[AdaptiveSize], clock: Callable[[], float]) -> AdaptiveSize:
    made.append(AdaptiveSize(LARGEST, smallest=1, failures_per_minute=FAILURES_PER_MINUTE, clock=clock))
    return made[-1]


def _tried(make: Callable[[Callable[[], float]], Rule], world: World, signal: Signal) -> list[tuple[int, bool]]:
    recorders: list[Recorder] = []

    def recorded(clock: Callable[[], float]) -> Recorder:
        recorders.append(Recorder(make(clock)))
        return recorders[-1]

    play(recorded, world, signal)
    return recorders[0].tried


def _first_there(tried: Sequence[tuple[int, bool]], there: float) -> int | None:
    return next((number for number, (size, good) in enumerate(tried, start=1) if good and size >= there), None)


def _most(steps: Sequence[int | None]) -> int | None:
    """Return the most, None if one of them never got there."""
    known = [step for step in steps if step is not None]
    return max(known) if len(known) == len(steps) else None


def _decision_us(signal: Signal, seed: int) -> float:
    """Return the time of one `next` and what it is told of the step's end, the median over the eight worlds."""
    costs = []
    for world in worlds(seed, "precious"):
        passed_s, calls = _timed(_maker(ADAPTIVE), world, signal)
        bare_s, bare_calls = _timed(lambda _clock: RULES["accelerate"](LARGEST), world, signal)
        costs.append(1e6 * (passed_s / calls - bare_s / bare_calls))
    return statistics.median(costs)


def _timed(make: Callable[[Callable[[], float]], Rule], world: World, signal: Signal) -> tuple[float, int]:
    begin_s = time.perf_counter()
    outcome = play(make, world, signal)
    return time.perf_counter() - begin_s, outcome.steps + outcome.failures


def _targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    by_place = {(row["regime"], row["signal"]): row for row in rows if row["rule"] == ADAPTIVE}
    judged = []
    for target in TARGETS:
        row = by_place[target.regime, target.signal]
        where = f"{target.regime}, {target.signal}"
        judged.append(_judged(f"{where}: mean", row["mean"], at_least=target.mean))
        if target.worst:
            judged.append(_judged(f"{where}: worst", row["worst"], at_least=target.worst))
        if target.failures_per_minute < float("inf"):
            judged.append(
                _judged(f"{where}: failures per minute", row["failures_per_minute"], at_most=target.failures_per_minute)
            )
    return judged


def _cold_targets(cold: dict[str, Any]) -> list[dict[str, str]]:
    return [
        _judged("constant level, exact: steps from cold", cold["most_steps_from_cold"], at_most=12),
        _judged("constant level, exact: failures till there", cold["most_failures_till_there"], at_most=1),
        _judged("constant level, exact: steps from learned", cold["most_steps_from_learned"], at_most=1),
        _judged(
            "constant level, exact: failures from learned",
            cold[f"most_failures_in_{_SECOND_RUN_STEPS}_steps_from_learned"],
            at_most=0,
        ),
    ]


def _cost_target(decisions_us: dict[str, float]) -> dict[str, str]:
    return _judged("microseconds for a decision", max(decisions_us.values()), at_most=20)


def _judged(
    text: str, found: float | None, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, str]:
    met = found is not None and (at_least is None or found >= at_least) and (at_most is None or found <= at_most)
    asked = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
    return {
        "target": text,
        "asked": asked,
        "found": "never" if found is None else f"{found:.4g}",
        "met": "yes" if met else "NO",
    }
