"""How much of the work an oracle would do the rules for a step's size do, and how often they fail
meanwhile.

Plays the adaptive rule with each of its three signals, and the rules in use today, in the worlds of
`simulator.py`, and in those of its shapes, whose figures have their own targets (`plain` steps, and
`spiky` ones: some take far more); then the adaptive one from cold and from learned limits at a
constant level, and takes the time of its decisions. A target that is missed breaks nothing. The
rules of today learn from success and failure alone; they are written anew from their authors' code
and texts, and the simulator charges a failure the same for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from benches import simulator
from benches.common import Result, judged, progress
from benches.simulator import BLIND, EXACT, LARGEST, PEAK, REAL, Maker, Outcome, Signal, World, play
from workers.resilience.adaptive_size import AdaptiveSize, Learned
from workers.units import GIB

ADAPTIVE = "adaptive"
#: What the adaptive rule is told it may fail within any sixty seconds.
FAILURES_PER_MINUTE = 6
#: At a constant level: this share of the largest size that fits in every step, whatever its wobble,
#: counts as there.
THERE = 0.98
COLD_LEVELS_GIB = (1.2, 1.7, 2.4, 3.4, 4.7, 6.3, 8.0)
_COLD_S = 20 * 60.0
#: The steps of a second run, from learned limits, that are looked at for failures.
_SECOND_RUN_STEPS = 12


class Target(NamedTuple):
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


#: What the adaptive rule shall reach in the shapes, as a mean over their plain worlds and over
#: their spiky ones. Without a signal it shall do as well as the best rule of today on the whole,
#: and within so much of it in each shape. The guide's rule is not among these: it keeps failing, up
#: to 800 times a minute.
RULES_TO_BEAT = ("accelerate", "aimd")
SHAPE_TARGETS = {"exact": (0.985, 0.90), "real": (0.95, 0.90)}
NEAR_BEST_OF_TODAY = 0.02
MOST_REST_SHARE = 0.02


@dataclass(slots=True)
class RuleOfToday:
    """Begins with the largest size, takes a share of it after a failure, and may grow again."""

    largest: int
    share: float
    floor: float = 0.0  # at zero it gives up
    growth: float = 1.0
    whole: bool = False  # whether the share is taken of a whole number
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


#: By name; each is made with the largest size, which it starts from.
RULES: Mapping[str, Callable[[int], simulator.Rule]] = {
    # 1.15, find_executable_batch_size
    "accelerate": lambda largest: RuleOfToday(largest, 0.9, whole=True),
    # 1.1, `batch` without a cache between calls
    "toma": lambda largest: RuleOfToday(largest, 0.5, whole=True),
    # The 3070 guide: max(floor, int(base * 0.7 ** failures)); its count of failures never goes
    # down.
    "guide": lambda largest: RuleOfToday(largest, 0.7, floor=256.0),
    # As TCP does it: 0.7 after a failure, 2 % more after ten good steps; begins anew at neither.
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
                for rows, made in (
                    (regime, simulator.worlds),
                    (f"{regime}_shapes", simulator.shapes),
                ):
                    outcomes = [
                        (world, play(_maker(name, signal), world, signal))
                        for each in range(seed, seed + seeds)
                        for world in made(each, regime, rate)
                    ]
                    figures[rows].append({**of, **_row(outcomes)})
                    broken += _broken(name, f"{regime}, {signal.name}", outcomes)
    if ADAPTIVE in rules:
        figures["constant_level"] = [
            _cold_start(signal, seed, rate) for signal in (EXACT, PEAK, BLIND)
        ]
        decisions_us = {signal.name: _decision_us(signal, seed) for signal in (EXACT, REAL, BLIND)}
        figures |= {f"decision_us_{name}": value for name, value in decisions_us.items()}
        targets = [*_targets(figures, max(decisions_us.values())), *_shape_targets(figures)]
        figures["targets"] = targets
        figures["targets_met"] = (
            f"{sum(target['met'] == 'yes' for target in targets)} of {len(targets)}"
        )
    return Result(bench="policy", figures=figures, broken=broken)


def _maker(name: str, signal: Signal, learned: Learned | None = None) -> Maker:
    """Return what makes a rule; an adaptive one is told whether samples are exact."""
    if name != ADAPTIVE:
        return lambda _clock: RULES[name](LARGEST)
    return lambda clock: AdaptiveSize(
        LARGEST, failures_per_minute=FAILURES_PER_MINUTE, exact_samples=signal.every_step,
        learned=learned, clock=clock,
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
        "size_changes_per_minute": sum(outcome.size_changes for _, outcome in outcomes) / minutes,
        **{course: statistics.fmean(scores) for course, scores in by_course.items()},
    }


def _broken(name: str, where: str, outcomes: Sequence[tuple[World, Outcome]]) -> list[str]:
    # A rule may beat the oracle by a hair, which never waits for memory that is about to come; not
    # by more.
    return [
        f"{name} beats the oracle in {where}, {world.name}/{world.seed}: {outcome.score:.4f}"
        for world, outcome in outcomes
        if outcome.score > 1.002
    ]


def _cold_start(signal: Signal, seed: int, rate_per_s: float) -> dict[str, Any]:
    """Return the worst of a few constant levels, from nothing and from what was learned."""
    found: dict[str, list[tuple[int | None, int]]] = {"cold": [], "learned": []}
    for level_gib in COLD_LEVELS_GIB:
        world, largest = constant_world(seed, level_gib, _COLD_S, rate_per_s=rate_per_s)
        first = play(_maker(ADAPTIVE, signal), world, signal)
        learned = first.rule.learned if isinstance(first.rule, AdaptiveSize) else None
        # Another run meets other steps.
        turned = replace(world, wobble=world.wobble[::-1])
        second = play(_maker(ADAPTIVE, signal, learned), turned, signal)
        for name, run in (("cold", first), ("learned", second)):
            there = (
                number
                for number, (size, good) in enumerate(run.tried, 1)
                if good and size >= THERE * largest
            )
            steps = next(there, None)
            looked_at = run.tried[: steps if name == "cold" else _SECOND_RUN_STEPS]
            found[name].append((steps, sum(not good for _, good in looked_at)))
    most_steps, most_failures = {}, {}
    for name, pairs in found.items():
        known = [steps for steps, _ in pairs if steps is not None]
        most_steps[name] = max(known) if len(known) == len(pairs) else None
        most_failures[name] = max(failures for _, failures in pairs)
    return {
        "signal": signal.name,
        "levels": len(COLD_LEVELS_GIB),
        "most_steps_from_cold": most_steps["cold"],
        "most_failures_till_there": most_failures["cold"],
        "most_steps_from_learned": most_steps["learned"],
        f"most_failures_in_{_SECOND_RUN_STEPS}_steps_from_learned": most_failures["learned"],
    }


def constant_world(
    seed: int,
    level_gib: float,
    duration_s: float,
    **options: Any,  # noqa: ANN401 - of world_of
) -> tuple[World, float]:
    """Return a world of one level, and the largest size that fits however its steps wobble."""
    world = simulator.world_of(
        f"constant at {level_gib}", [(0.0, level_gib * GIB)], duration_s, seed=seed, **options
    )
    return world, (
        level_gib * GIB / (1 + simulator.WOBBLE) - world.job.fixed_bytes
    ) / world.job.item_bytes


def _decision_us(signal: Signal, seed: int) -> float:
    """Return the time of one `next` and of its answer, the median over the eight worlds."""

    def call_s(name: str, world: World) -> float:
        begin_s = time.perf_counter()
        outcome = play(_maker(name, signal), world, signal)
        return (time.perf_counter() - begin_s) / len(outcome.tried)

    return statistics.median(
        1e6 * (call_s(ADAPTIVE, world) - call_s("accelerate", world))
        for world in simulator.worlds(seed, "precious")
    )


def _targets(figures: Mapping[str, Any], decision_us: float) -> list[dict[str, str]]:
    rows = {
        (row["regime"], row["signal"]): row
        for regime in simulator.HALF_SPEED_ITEMS
        for row in figures[regime]
        if row["rule"] == ADAPTIVE
    }
    found = []
    for target in TARGETS:
        row = rows[target.regime, target.signal.name]
        where, most = f"{target.regime}, {target.signal.name}", target.failures_per_minute
        found.append(judged(f"{where}: mean", row["mean"], at_least=target.mean))
        if target.worst:
            found.append(judged(f"{where}: worst", row["worst"], at_least=target.worst))
        if most < float("inf"):
            rate = row["failures_per_minute"]
            found.append(judged(f"{where}: failures per minute", rate, at_most=most))
        found.append(_worst_minute(where, row))
    cold = figures["constant_level"][0]
    at_most = {
        "steps from cold": ("most_steps_from_cold", 12),
        "failures till there": ("most_failures_till_there", 1),
        "steps from learned": ("most_steps_from_learned", 1),
        "failures from learned": (f"most_failures_in_{_SECOND_RUN_STEPS}_steps_from_learned", 0),
    }
    found += [
        judged(f"constant level, exact: {words}", cold[key], at_most=most)
        for words, (key, most) in at_most.items()
    ]
    return [*found, judged("microseconds for a decision", decision_us, at_most=20)]


def _worst_minute(where: str, row: Mapping[str, Any]) -> dict[str, str]:
    return judged(f"{where}: worst minute", row["worst_minute"], at_most=FAILURES_PER_MINUTE)


def _shape_targets(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    found = []
    for regime in simulator.HALF_SPEED_ITEMS:
        rows = figures[f"{regime}_shapes"]
        today = [_kinds(row) for row in rows if row["rule"] in RULES_TO_BEAT]
        for row in (row for row in rows if row["rule"] == ADAPTIVE):
            where = f"{regime}, shapes, {row['signal']}"
            means = _kinds(row)
            found.append(judged(f"{where}: rest", row["rest_share"], at_most=MOST_REST_SHARE))
            found.append(_worst_minute(where, row))
            if row["signal"] in SHAPE_TARGETS:
                least = dict(zip(("plain", "spiky"), SHAPE_TARGETS[row["signal"]], strict=True))
            elif not today:
                continue
            else:
                best = {kind: max(rule[kind] for rule in today) for kind in means}
                least = {kind: best[kind] - NEAR_BEST_OF_TODAY * (kind in row) for kind in means}
            found += [
                judged(f"{where}: {kind}", means[kind], at_least=bound)
                for kind, bound in least.items()
            ]
    return found


def _kinds(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean over plain worlds and that over spiky ones, then that of each shape."""
    by_shape = {key: row[key] for key in row if key.partition(",")[0] in simulator.SHAPES}
    plain, spiky = (
        statistics.fmean(mean for shape, mean in by_shape.items() if ("spiky" in shape) == kind)
        for kind in (False, True)
    )
    return {"plain": plain, "spiky": spiky, **by_shape}
