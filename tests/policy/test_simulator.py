"""The simulator that judges the rules: the same for everybody, beaten by nobody, and as hard as it says."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from benches import policy
from benches.policy import RULES, RuleOfToday
from benches.simulator import (
    BLIND,
    COURSES,
    EXACT,
    FAILURE_S,
    HALF_SPEED_ITEMS,
    LARGEST,
    PEAK,
    REAL,
    Outcome,
    Rule,
    Signal,
    World,
    play,
    world_of,
    worlds,
)

from tests.bench_command import bench, typed
from workers.units import GIB

pytestmark = pytest.mark.slow


Clock = Callable[[], float]


@dataclass
class Fixed:
    """Always the same size, or none; keeps what it was told."""

    size: int | None
    clock: Clock
    told: list[tuple[float, int | None]] = field(default_factory=list)
    ends: list[tuple[float, bool, int | None]] = field(default_factory=list)

    def next(self, free_bytes: int | None = None) -> int | None:
        self.told.append((self.clock(), free_bytes))
        return self.size

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        self.ends.append((self.clock(), True, peak_bytes))

    def failed(self, size: int) -> None:
        self.ends.append((self.clock(), False, None))


@dataclass
class Cheat:
    """Looks into the world: what the oracle knows, behind a rule's surface."""

    world: World
    clock: Clock
    blocks: bool
    step: int = 0

    def next(self, free_bytes: int | None = None) -> int | None:
        available = next(
            level
            for at_s, level in zip(
                reversed(self.world.times_s), reversed(self.world.levels_bytes), strict=True
            )
            if at_s <= self.clock()
        )
        return self.world.largest_that_fits(available, self.step, blocks=self.blocks) or None

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        self.step += 1

    def failed(self, size: int) -> None:
        raise AssertionError(
            f"the oracle's size {size} failed in step {self.step} of {self.world.name}"
        )


def level(gib: float, duration_s: float = 120.0) -> World:
    return world_of("level", [(0.0, gib * GIB)], duration_s, seed=1)


def watch(world: World, size: int | None, signal: Signal) -> tuple[Fixed, Outcome]:
    outcome = play(partial(Fixed, size), world, signal)
    assert isinstance(outcome.rule, Fixed)
    return outcome.rule, outcome


@pytest.mark.parametrize("blocks", [False, True])
def test_no_size_above_the_oracles_fits_and_the_oracles_does(blocks: bool) -> None:
    world = worlds(7, "precious")[0]
    for step in range(60):
        available = int((0.3 + 0.125 * step) * GIB)
        fitting = [
            size
            for size in range(1, 4200)
            if world.need_bytes(size, step, blocks=blocks) <= available
        ]  # beyond 4200 items nothing fits into 7.8 GiB
        assert world.largest_that_fits(available, step, blocks=blocks) == max(fitting, default=0)


@pytest.mark.parametrize("regime", HALF_SPEED_ITEMS)
@pytest.mark.parametrize("signal", [EXACT, REAL], ids=lambda signal: signal.name)
def test_who_knows_what_the_oracle_knows_never_fails_and_does_exactly_its_work(
    regime: str, signal: Signal
) -> None:
    for world in worlds(8, regime, 1000.0):
        outcome = play(partial(Cheat, world, blocks=signal.blocks), world, signal)
        assert outcome.failures == 0
        assert outcome.score == pytest.approx(1.0, abs=1e-9)


def test_a_rule_that_always_fails_does_no_work_and_pays_half_a_step_and_the_cleanup() -> None:
    world = level(2.0)
    rule, outcome = watch(world, LARGEST, EXACT)
    cost_s = world.job.step_s(LARGEST) / 2 + FAILURE_S
    assert outcome.score == outcome.items == 0
    assert [at_s for at_s, _, _ in rule.ends] == pytest.approx(
        [cost_s * n for n in range(1, len(rule.ends) + 1)]
    )
    assert (
        outcome.failures == len(outcome.tried) == len(rule.ends) == -(-world.duration_s // cost_s)
    )
    assert outcome.worst_minute == -(-60 // cost_s)


@pytest.mark.parametrize("signal", [EXACT, REAL, PEAK, BLIND], ids=lambda signal: signal.name)
def test_each_signal_tells_what_it_says_and_no_more(signal: Signal) -> None:
    world = level(4.0, 4000.0)
    rule, outcome = watch(world, 500, signal)
    needs = [world.need_bytes(500, step, blocks=signal.blocks) for step in range(len(rule.ends))]
    assert outcome.failures == 0
    assert [peak for _, _, peak in rule.ends] == ([None] * len(needs) if signal is BLIND else needs)
    samples = [(at_s, told / (4 * GIB) - 1) for at_s, told in rule.told if told is not None]
    if signal is REAL:
        assert [int(at_s) for at_s, _ in samples] == list(range(4000)), "once a second"
        assert statistics.fmean(error for _, error in samples) == pytest.approx(0, abs=0.003)
        assert statistics.stdev(error for _, error in samples) == pytest.approx(0.03, rel=0.1)
    else:
        assert [error for _, error in samples] == (
            [0.0] * len(rule.told) if signal is EXACT else []
        )


@pytest.mark.parametrize("size", [0, LARGEST + 1])
def test_a_size_out_of_bounds_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"returned {size}; a size is from 1 to {LARGEST}"):
        watch(level(4.0), size, BLIND)


def test_rules_of_today_do_what_their_authors_wrote() -> None:
    def sizes(rule: Rule, count: int) -> list[int | None]:
        seen = []
        for _ in range(count):
            seen.append(rule.next())
            if seen[-1] is not None:
                rule.failed(seen[-1])
        return seen

    assert sizes(RULES["accelerate"](128), 5) == [128, 115, 103, 92, 82]
    assert sizes(RULES["accelerate"](2), 4) == [2, 1, None, None]
    assert sizes(RULES["toma"](100), 8) == [100, 50, 25, 12, 6, 3, 1, None]
    assert sizes(RuleOfToday(1000, 0.7, floor=400.0), 5) == [1000, 700, 489, 400, 400]
    aimd = RULES["aimd"](1000)
    assert sizes(aimd, 3) == [1000, 700, 489]
    for _ in range(10):
        assert aimd.next() == 342
        aimd.succeeded(342)
    assert aimd.next() == 349


@pytest.mark.parametrize(
    ("name", "precious", "saturating"),
    [
        ("accelerate", 0.742, 0.898),
        ("toma", 0.641, 0.852),
        ("guide", 0.709, 0.888),
        ("aimd", 0.884, 0.937),
    ],
)
def test_the_worlds_are_as_hard_as_they_were(name: str, precious: float, saturating: float) -> None:
    """A seed draws the same worlds each time.

    A change of how hard they are changes these scores.
    """
    worlds.cache_clear()
    for regime, signal, rate_per_s, expected in (
        ("precious", BLIND, 10_000.0, precious),
        ("saturating", REAL, 1_000.0, saturating),
    ):
        scores = [
            play(lambda _: RULES[name](LARGEST), world, signal).score
            for seed in range(1000, 1003)
            for world in worlds(seed, regime, rate_per_s)
        ]
        assert statistics.fmean(scores) == pytest.approx(expected, abs=0.001)


def test_a_run_has_a_row_for_each_rule_and_signal_and_judges_its_targets() -> None:
    result = policy.run(1, 4, ["adaptive", "toma"], 1000.0)
    figures = result.figures
    assert result.broken == []
    for regime in HALF_SPEED_ITEMS:
        assert [(row["rule"], row["signal"]) for row in figures[regime]] == [
            *(("adaptive", signal) for signal in ("exact", "real", "blind")),
            ("toma", "blind"),
        ]
        for row in figures[regime]:
            assert row["worst"] == pytest.approx(min(row[course] for course in COURSES))
            assert row["mean"] == pytest.approx(statistics.fmean(row[course] for course in COURSES))
    assert {target["met"] for target in figures["targets"]} <= {"yes", "NO"}
    assert figures["decision_us_exact"] > 0


def test_the_verb_runs_the_rules_that_are_asked_for_and_no_others() -> None:
    assert (
        len(bench("policy", "--seeds", "1", "--rate", "1000", "--rules", "toma")["precious"]) == 1
    )
    done = typed("policy", "--rules", "luck")
    assert done.returncode == 2
    assert "adaptive" in done.stderr
