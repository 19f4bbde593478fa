"""The statistics of `tune`, on simulated machines with a known truth."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.lab.tune.arms import disturbance, seconds_of, turns
from orchestrator.lab.tune.report import judge_memory, judge_speed
from orchestrator.lab.tune.results import (
    LeverRow,
    LeverVerdict,
    ParityClass,
    TunedSubject,
    TuningResult,
    read_results,
    write_result,
)
from orchestrator.lab.tune.statistics import (
    Effect,
    anytime_effect,
    effect_of,
    effects,
    holm,
    least_rounds,
    log_ratios,
    signed_rank_p,
)
from workers.tuning.messages import Done

#: From a place in the simulated time to how slow the machine is then.
Drift = Callable[[int], float]

NOISE = 0.02
LEVERS = [f"lever-{number}" for number in range(100)]


def steady(_: int) -> float:
    return 1.0


def slow_trend(place: int) -> float:
    """Half as fast at the end of 40 rounds of 102 arms as at the beginning."""
    return 1.0 + place / 4080


def step(place: int) -> float:
    """A quarter slower from the middle of a round on, and a short disturbance before."""
    return 1.25 if place > 2010 else 1.6 if 700 < place < 712 else 1.0


def simulated(
    seed: int, drift: Drift, planted: Sequence[str] = (), rounds: int = 40
) -> list[Mapping[str, float]]:
    """Seconds a sample of a baseline, an A/A arm and all levers, of which the planted ones are 3 % faster."""
    draw = random.Random(seed)  # noqa: S311 - a simulation
    place, found = 0, []
    for number in range(rounds):
        blocks = []
        for arm in turns(["a/a", *LEVERS], seed, number):
            seconds = (
                drift(place) * draw.lognormvariate(0, NOISE) / (1.03 if arm in planted else 1.0)
            )
            blocks.append((arm, seconds))
            place += 1
        found.append(seconds_of(blocks))
    return found


def judged(rounds: Sequence[Mapping[str, float]]) -> dict[str, tuple[Effect, LeverVerdict]]:
    measured = effects(rounds, "baseline", ["a/a", *LEVERS], 0.95)
    real = holm({lever: measured[lever].p for lever in LEVERS}, 0.05)
    return {
        lever: (measured[lever], judge_speed(measured[lever], real=lever in real, resolve=0.01)[0])
        for lever in LEVERS
    }


@pytest.mark.parametrize("drift", [steady, slow_trend, step])
@pytest.mark.parametrize("seed", range(2))
def test_hardly_one_of_a_hundred_idle_levers_seems_to_help(drift: Drift, seed: int) -> None:
    found = judged(simulated(seed, drift)).values()
    assert sum(effect.excludes_one for effect, _ in found) <= 5
    assert sum(verdict == LeverVerdict.CONFIRMED for _, verdict in found) <= 1


@pytest.mark.parametrize("drift", [steady, slow_trend, step])
def test_effects_of_3_percent_are_found_in_40_rounds(drift: Drift) -> None:
    planted = LEVERS[:20]
    hits = sum(
        judged(simulated(seed, drift, planted))[lever][1] == "CONFIRMED"
        for seed in range(2)
        for lever in planted
    )
    assert hits >= 0.9 * 2 * len(planted)


def test_the_interval_is_the_one_that_many_resamples_show() -> None:
    draw = random.Random(7)  # noqa: S311 - a simulation
    values = [draw.gauss(0.05, 0.03) for _ in range(21)]
    medians = sorted(sorted(draw.choices(values, k=21))[10] for _ in range(20_000))
    effect = effect_of(values, 0.95)
    assert log_ratios([{"b": 1.0, "a": effect.low}], "a", "b") == pytest.approx(
        [medians[500]], abs=1e-9
    )
    assert log_ratios([{"b": 1.0, "a": effect.high}], "a", "b") == pytest.approx(
        [medians[-500]], abs=1e-9
    )


@pytest.mark.parametrize("arms", [1, 22])
def test_the_least_rounds_are_the_first_with_an_interval(arms: int) -> None:
    enough = least_rounds(arms, 0.95)
    names = [f"lever {number}" for number in range(arms)]
    rounds = [
        {"baseline": 2.0, **dict.fromkeys(names, 1.0 + 0.01 * number)} for number in range(enough)
    ]
    found = effects(rounds, "baseline", names, 0.95)
    assert all(effect.excludes_one and effect.high < 3 for effect in found.values())
    assert holm({name: effect.p for name, effect in found.items()}, 0.05) == set(names)
    too_few = effects(rounds[1:], "baseline", names, 0.95)
    assert {effect.low for effect in too_few.values()} == {0.0}


def left(
    seed: int, speeds: Mapping[str, float], disturbed: float, confidence: float
) -> dict[str, int]:
    """After which of 30 rounds each arm leaves that seems slower than the baseline, with a look after each round."""
    draw = random.Random(seed)  # noqa: S311 - a simulation
    ratios: dict[str, list[float]] = {arm: [] for arm in speeds}
    gone: dict[str, int] = {}
    for number in range(1, 31):
        baseline = sum(draw.gauss(0, NOISE) for _ in range(2)) / 2  # all arms share it
        for arm in speeds.keys() - gone.keys():
            slow = 0.3 if draw.random() < disturbed else 0.0
            ratios[arm].append(math.log(speeds[arm]) + baseline + draw.gauss(0, NOISE) - slow)
            effect = anytime_effect(ratios[arm], 1 - (1 - confidence) / len(speeds))
            if effect is not None and effect.high < 1:
                gone[arm] = number
    return gone


@pytest.mark.parametrize("disturbed", [0.0, 0.02])
def test_the_best_arm_hardly_ever_leaves(disturbed: float) -> None:
    """Not in more than 1 - confidence of the tunings, for any of ten arms that equal the baseline."""
    equal = {f"lever-{number}": 1.0 for number in range(10)}
    runs = 100
    wrong = sum(bool(left(seed, equal, disturbed, 0.8)) for seed in range(runs))
    assert wrong <= 0.2 * runs


def test_slow_arms_leave_before_there_is_an_interval() -> None:
    speeds = {"bf16": 0.23, "r_drop": 0.4, "recompute": 0.75, "best": 1.05}
    for seed in range(10):
        gone = left(seed, speeds, 0.0, 0.995)
        assert gone.keys() == speeds.keys() - {"best"}
        assert gone["bf16"] <= 5
        assert max(gone.values()) < least_rounds(22, 0.95)


def test_an_anytime_interval_is_the_published_one() -> None:
    """The martingale of Wang and Ramdas, arXiv 2310.03722, written out: 1 / (1 - confidence) at both ends."""
    values = [-0.31, -0.22, -0.27, -0.35, -0.26]

    def martingale(at: float) -> float:
        count, moved, prior = len(values), [each - at for each in values], 1e-3
        squares, total = sum(each**2 for each in moved), sum(moved)
        share = prior / (count + prior)
        return math.sqrt(share) * (squares / (squares - total**2 / (count + prior))) ** (count / 2)

    effect = anytime_effect(values, 0.99)
    assert effect is not None
    assert [martingale(math.log(end)) for end in (effect.low, effect.high)] == pytest.approx(
        [100, 100]
    )
    assert effect.p == pytest.approx(1 / martingale(0.0))
    assert anytime_effect(values[:1], 0.99) is None
    assert anytime_effect(values[:3], 0.9999) is None


def test_signed_ranks_count_all_signs() -> None:
    values = [1.0, 2.0, -3.0, 4.0, 5.0, 6.0]
    assert signed_rank_p(values) == pytest.approx(
        2 * 5 / 64
    )  # sums of at most 3: {}, {1}, {2}, {3}, {1, 2}
    assert signed_rank_p([0.0]) == 1.0


def test_holm_stops_at_the_first_that_may_be_chance() -> None:
    assert holm({"a": 0.001, "b": 0.03, "c": 0.02}, 0.05) == {"a", "c", "b"}
    assert holm({"a": 0.001, "b": 0.03, "c": 0.03}, 0.05) == {"a"}


def an_effect(low: float, high: float) -> Effect:
    return Effect(ratio=(low + high) / 2, low=low, high=high, p=0.0, rounds=40)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.02, 1.03, "CONFIRMED"),
        (0.90, 0.95, "REFUTED"),
        (0.995, 1.005, "NO EFFECT"),
        (0.98, 1.06, "UNDECIDED"),
    ],
)
def test_a_verdict_follows_from_the_interval(low: float, high: float, verdict: str) -> None:
    assert judge_speed(an_effect(low, high), real=True, resolve=0.01)[0] == verdict


@pytest.mark.parametrize(
    ("noise", "verdicts"),
    [
        (0.00, ["CONFIRMED", "CONFIRMED", "NO EFFECT", "REFUTED", "UNDECIDED"]),
        (0.04, ["CONFIRMED", "NO EFFECT", "NO EFFECT", "REFUTED", "UNDECIDED"]),
        (0.10, ["CONFIRMED", "UNDECIDED", "UNDECIDED", "REFUTED", "UNDECIDED"]),
    ],
)
def test_a_memory_lever_is_judged_beyond_the_noise_of_peaks(
    noise: float, verdicts: list[str]
) -> None:
    peaks = (600, 970, 1000, 1400, None)
    assert [judge_memory(peak, 1000, noise=noise, resolve=0.01)[0] for peak in peaks] == verdicts


def test_results_are_found_again_the_newest_first(state_dir: Path) -> None:
    subject = TunedSubject(card="cpu", driver=None, torch="2.13.0", model="gpt-nano")
    row = LeverRow(
        lever="precision",
        setting="bf16",
        speed_ratio=1.1,
        parity_class=ParityClass.NUMERIC,
        verdict=LeverVerdict.CONFIRMED,
        reason="faster",
    )
    made = TuningResult(
        tune_id="", subject=subject, device_name="cpu", created_at="", duration_s=1.0, rounds=40,
        rows=(row,), chosen={"precision": "bf16"},
    )  # fmt: skip
    for number in (1, 2, 3):
        folder = state_dir / "tunings" / f"t{number}"
        folder.mkdir(parents=True)
        at = f"2026-11-0{number}T00:00:00+00:00"
        write_result(folder, replace(made, tune_id=folder.name, created_at=at))
    (state_dir / "tunings" / "t3" / "tune.json").write_text(json.dumps([]))
    newest, older = read_results()
    assert [newest.tune_id, older.tune_id] == ["t2", "t1"]
    assert newest == replace(made, tune_id="t2", created_at=newest.created_at)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([{}, {}], None),
        ([{"throttled": True}], "throttled"),
        ([{"clock_mhz": 1700.0}, {"clock_mhz": 1740.0}], "clock moved"),
        ([{"clock_mhz": 1700.0}, {"clock_mhz": 1730.0}], None),
        ([{"neighbour_share": 0.5}], "another program"),
    ],
)  # fmt: skip
def test_a_disturbed_round_does_not_count(blocks: list[dict[str, Any]], why: str | None) -> None:
    assert disturbance([Done(samples=1.0, seconds=1.0, **block) for block in blocks]) == why
