"""The simulator that judges the rules: the same for everybody, beaten by nobody, and as hard as it says."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from benches import policy
from benches.policy import RULES, RuleOfToday
from benches.simulator import (
    BLIND,
    BLOCK_BYTES,
    COURSES,
    EXACT,
    FAILURE_S,
    HALF_SPEED_ITEMS,
    IDLE_S,
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
            for at_s, level in zip(reversed(self.world.times_s), reversed(self.world.levels_bytes), strict=True)
            if at_s <= self.clock()
        )
        return self.world.largest_that_fits(available, self.step, blocks=self.blocks) or None

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        self.step += 1

    def failed(self, size: int) -> None:
        raise AssertionError(f"the oracle's size {size} failed in step {self.step} of {self.world.name}")


def level(gib: float, duration_s: float = 120.0, **options: Any) -> World:  # noqa: ANN401 - of world_of
    return world_of("level", [(0.0, gib * GIB)], duration_s, seed=1, **options)


def watch(world: World, size: int | None, signal: Signal) -> tuple[Fixed, Outcome]:
    outcome = play(partial(Fixed, size), world, signal)
    assert isinstance(outcome.rule, Fixed)
    return outcome.rule, outcome


def test_a_seed_is_a_world_and_another_seed_another() -> None:
    first = worlds(5, "precious")
    worlds.cache_clear()
    again, other = worlds(5, "precious"), worlds(6, "precious")
    assert [world.name for world in first] == list(COURSES)
    for one, same, different in zip(first, again, other, strict=True):
        assert one is not same
        assert (one.times_s, one.levels_bytes, one.job) == (same.times_s, same.levels_bytes, same.job)
        assert (one.wobble, one.workspace, one.noise) == (same.wobble, same.workspace, same.noise)
        assert one.levels_bytes != different.levels_bytes
        assert one.job != different.job
        assert play(lambda _: RULES["aimd"](LARGEST), one, REAL) == play(lambda _: RULES["aimd"](LARGEST), same, REAL)


def test_both_regimes_of_a_seed_share_everything_but_the_speed() -> None:
    for precious, saturating in zip(worlds(5, "precious"), worlds(5, "saturating"), strict=True):
        assert (precious.levels_bytes, precious.wobble) == (saturating.levels_bytes, saturating.wobble)
        for world, size in ((precious, 1000), (saturating, 150)):
            assert world.job.step_s(size) == 2 * size / world.job.rate_per_s


def test_courses_are_as_long_and_as_high_as_they_say() -> None:
    for world in itertools.chain.from_iterable(worlds(seed, "precious") for seed in (5, 6, 7)):
        assert 20 * 60 <= world.duration_s <= 40 * 60
        assert world.times_s[0] == 0
        assert list(world.times_s) == sorted(set(world.times_s))
        assert max(world.levels_bytes) <= 8 * GIB
        assert min(world.levels_bytes) >= (0.6 if world.name == "game" else 1.19) * GIB
        assert 0.2 * GIB <= world.job.fixed_bytes <= 0.6 * GIB
        assert all(0.99 <= factor <= 1.01 for factor in world.wobble)
        assert world.need_bytes(LARGEST, 0, blocks=False) > 8 * GIB, "the largest size must never fit"


@pytest.mark.parametrize("blocks", [False, True])
def test_no_size_above_the_oracles_fits_and_the_oracles_does(blocks: bool) -> None:
    world = worlds(7, "precious")[0]
    for step in range(60):
        available = int((0.3 + 0.125 * step) * GIB)
        fitting = [
            size for size in range(1, 4200) if world.need_bytes(size, step, blocks=blocks) <= available
        ]  # beyond 4200 items nothing fits into 7.8 GiB
        assert world.largest_that_fits(available, step, blocks=blocks) == max(fitting, default=0)


@pytest.mark.parametrize("regime", HALF_SPEED_ITEMS)
@pytest.mark.parametrize("signal", [EXACT, REAL], ids=lambda signal: signal.name)
def test_who_knows_what_the_oracle_knows_never_fails_and_does_exactly_its_work(regime: str, signal: Signal) -> None:
    for world in worlds(8, regime, 1000.0):
        outcome = play(partial(Cheat, world, blocks=signal.blocks), world, signal)
        assert outcome.failures == 0
        assert outcome.score == pytest.approx(1.0, abs=1e-9)


def test_a_rule_that_always_fails_does_no_work_and_pays_half_a_step_and_the_cleanup() -> None:
    world = level(2.0)
    rule, outcome = watch(world, LARGEST, EXACT)
    cost_s = world.job.step_s(LARGEST) / 2 + FAILURE_S
    assert outcome.score == outcome.items == 0
    assert [at_s for at_s, _, _ in rule.ends] == pytest.approx([cost_s * n for n in range(1, len(rule.ends) + 1)])
    assert outcome.failures == len(outcome.tried) == len(rule.ends) == -(-world.duration_s // cost_s)
    assert outcome.worst_minute == -(-60 // cost_s)


def test_a_rule_that_runs_nothing_waits_and_scores_nothing() -> None:
    world = level(2.0)
    rule, outcome = watch(world, None, EXACT)
    assert (outcome.score, outcome.tried) == (0, [])
    assert outcome.idle_s == pytest.approx(world.duration_s, abs=2 * IDLE_S)
    assert rule.told[1][0] == pytest.approx(IDLE_S)


def test_real_tells_once_a_second_with_three_percent_noise_and_nothing_in_between() -> None:
    world = level(4.0, 4000.0)
    rule, _ = watch(world, 500, REAL)
    seconds = [int(at_s) for at_s, told in rule.told if told is not None]
    assert seconds == list(range(4000))
    assert sum(told is None for _, told in rule.told) == len(rule.told) - 4000 > 4000
    errors = [told / (4 * GIB) - 1 for _, told in rule.told if told is not None]
    assert statistics.fmean(errors) == pytest.approx(0, abs=0.003)
    assert statistics.stdev(errors) == pytest.approx(0.03, rel=0.1)


def test_real_needs_come_in_blocks_and_with_a_workspace_at_some_sizes() -> None:
    world = level(8.0)
    ratios = []
    for size in range(10, 3000, 10):
        need = world.need_bytes(size, size, blocks=True)
        assert need % BLOCK_BYTES == 0
        ratios.append(need / world.need_bytes(size, size, blocks=False))
    dear = [ratio > 1.04 for ratio in ratios]
    assert min(ratios) >= 1
    assert max(ratios) <= 1.05 + BLOCK_BYTES / world.job.fixed_bytes
    assert 0.3 < sum(dear) / len(dear) < 0.7
    assert sum(one != other for one, other in itertools.pairwise(dear)) > 10, "it comes and goes"


@pytest.mark.parametrize("signal", [EXACT, REAL, PEAK, BLIND], ids=lambda signal: signal.name)
def test_each_signal_tells_what_it_says_and_no_more(signal: Signal) -> None:
    world = level(4.0)
    rule, outcome = watch(world, 500, signal)
    needs = [world.need_bytes(500, step, blocks=signal.blocks) for step in range(len(rule.ends))]
    assert outcome.failures == 0
    assert [peak for _, _, peak in rule.ends] == ([None] * len(needs) if signal is BLIND else needs)
    assert any(told is not None for _, told in rule.told) == (signal in {EXACT, REAL})


@pytest.mark.parametrize("size", [0, -1, LARGEST + 1])
def test_a_size_out_of_bounds_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"returned {size}; a size is from 1 to {LARGEST}"):
        watch(level(4.0), size, BLIND)


def test_most_failures_in_a_minute_are_counted() -> None:
    # At 1000 items/s, 500 items fail in 0.8 s and end well in 1.5 s: 3 fail, 66 end well until 101.4 s, 4 fail.
    world = world_of("holes", [(0.0, 1 * GIB), (2.0, 4 * GIB), (100.0, 1 * GIB)], 104.0, seed=1, rate_per_s=1000.0)
    rule, outcome = watch(world, 500, EXACT)
    good = [good for _, good, _ in rule.ends]
    assert good[:3] == [False, False, False]
    assert good.count(False) == outcome.failures == 7
    assert outcome.worst_minute == 4


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
    ("name", "least", "most"),
    [("accelerate", 0.73, 0.81), ("toma", 0.62, 0.70), ("guide", 0.69, 0.77), ("aimd", 0.85, 0.93)],
)
def test_rules_of_today_score_what_the_courses_were_made_for(name: str, least: float, most: float) -> None:
    scores = [
        play(lambda _: RULES[name](LARGEST), world, BLIND).score
        for seed in range(1000, 1003)
        for world in worlds(seed, "precious")
    ]
    assert least < statistics.fmean(scores) < most


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


def test_slower_steps_are_harder_for_a_rule_that_grows_back() -> None:
    def mean(rate_per_s: float) -> float:
        played = [play(lambda _: RULES["aimd"](LARGEST), world, BLIND) for world in worlds(3, "precious", rate_per_s)]
        return statistics.fmean(outcome.score for outcome in played)

    assert mean(1000.0) < mean(10_000.0) - 0.03


def test_the_verb_runs_the_rules_that_are_asked_for_and_no_others() -> None:
    assert len(bench("policy", "--seeds", "1", "--rate", "1000", "--rules", "toma")["precious"]) == 1
    done = typed("policy", "--rules", "luck")
    assert done.returncode == 2
    assert "adaptive" in done.stderr
