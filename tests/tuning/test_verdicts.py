"""The statistics of `tune`, its verdicts, and what it chooses."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from orchestrator.config.schema import TuneConfig
from orchestrator.lab.tune.choice import chosen_of, row_of
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import Measured
from orchestrator.lab.tune.results import LeverRow
from orchestrator.lab.tune.statistics import (
    LeverVerdict,
    ParityClass,
    effect_of,
    judge,
    least_rounds,
    most_gap,
    parity_gap,
)
from workers.tuning.messages import Opened

RESOLVE = 0.02

#: Logarithms of the ratios of two equal trainings, in turns of a step of about 0.45 s: nine times a
#: lever that changes nothing, of gpt-nano in a rehearsal, on 2 cores of an EPYC beside 8 to 12 other
#: programs at work (2026-11-28). Half of them differ by more than 0.066.
EQUAL_ARMS = (
    0.019, 0.016, -0.273, 0.092, -0.077, -0.133, 0.101, 0.023, -0.143, 0.081, 0.058, 0.072, 0.015,
    -0.013, -0.05, -0.018, 0.009, -0.066, -0.218, 0.339, -0.035, -0.055, -0.183, 0.001, 0.106,
    0.196, -0.069, -0.065, -0.012, 0.061, -0.002, 0.069, -0.064, -0.025, 0.036, -0.026, 0.119,
    -0.043, -0.054, 0.061, 0.044, 0.239, 0.091, -0.012, 0.057, 0.128, -0.084, -0.203, -0.349,
    -0.346, -0.054, 0.102, 0.041, 0.423, 0.152, 0.483, 0.025, -0.163, 0.067,
)  # fmt: skip

#: As many as a lever gets of a long budget. With 3 % of noise, as on a machine at rest, ten do.
ROUNDS = 100


def verdict(ratios: list[float], peak_share: float | None = None) -> LeverVerdict:
    return judge(effect_of(ratios, 0.95), peak_share, is_broken=False, resolve=RESOLVE)


def drawn(seed: int, planted: float) -> LeverVerdict:
    """The verdict of rounds drawn from real ones; which arm is the lever is a toss of a coin."""
    draw = random.Random(seed)  # noqa: S311 - a simulation
    noise = [draw.choice((-1, 1)) * draw.choice(EQUAL_ARMS) for _ in range(ROUNDS)]
    return verdict([math.log(planted) + each for each in noise])


def test_of_200_equal_arms_at_most_16_seem_to_differ() -> None:
    verdicts = [drawn(seed, 1.0) for seed in range(200)]
    wrong = [each for each in verdicts if each in {LeverVerdict.FASTER, LeverVerdict.SLOWER}]
    assert len(wrong) <= 16


@pytest.mark.parametrize(
    ("planted", "wanted"), [(1.05, LeverVerdict.FASTER), (1 / 1.05, LeverVerdict.SLOWER)]
)
def test_five_percent_are_found_in_180_of_200(planted: float, wanted: LeverVerdict) -> None:
    assert sum(drawn(seed, planted) is wanted for seed in range(200)) >= 180


@pytest.mark.parametrize("count", [6, 7, 9])
def test_the_interval_holds_what_ranks_do_not_reject(count: int) -> None:
    """Wilcoxon's test, counted over all signs, rejects just beyond the interval and not within."""
    draw = random.Random(count)  # noqa: S311 - a simulation
    ratios = [draw.gauss(0.03, 0.02) for _ in range(count)]
    effect = effect_of(ratios, 0.95)
    assert effect is not None
    assert effect.low is not None
    assert effect.high is not None
    within, beyond = 1 - 1e-9, 1 + 1e-9
    assert _p([each - math.log(effect.low * beyond) for each in ratios]) > 0.05
    assert _p([each - math.log(effect.low * within) for each in ratios]) <= 0.05
    assert _p([each - math.log(effect.high * within) for each in ratios]) > 0.05
    assert _p([each - math.log(effect.high * beyond) for each in ratios]) <= 0.05


def _p(values: list[float]) -> float:
    ranked = sorted(values, key=abs)
    total = sum(range(1, len(values) + 1))
    found = sum(rank for rank, value in enumerate(ranked, 1) if value > 0)
    sums = [
        sum(rank for rank, sign in enumerate(signs, 1) if sign)
        for signs in product((False, True), repeat=len(values))
    ]
    smaller = sum(each <= min(found, total - found) for each in sums)
    return min(1.0, 2 * smaller / len(sums))


def test_six_rounds_are_the_fewest_with_an_interval() -> None:
    assert least_rounds(0.95) == 6
    few, enough = effect_of([0.1] * 5, 0.95), effect_of([0.1] * 6, 0.95)
    assert few is not None
    assert enough is not None
    assert (few.low, few.high) == (None, None)
    assert enough.low == enough.high == pytest.approx(math.exp(0.1))
    assert effect_of([], 0.95) is None


@pytest.mark.parametrize(
    ("ratio", "noise", "peak_share", "wanted"),
    [
        (1.10, 0.01, 1.0, "FASTER"),
        (1.10, 0.01, 0.5, "FASTER"),
        (1.00, 0.01, 0.5, "LESS MEMORY"),
        (0.70, 0.01, 0.5, "LESS MEMORY"),
        (0.90, 0.01, 1.0, "SLOWER"),
        (1.00, 0.005, 0.97, "NO DIFFERENCE"),
        (1.01, 0.005, None, "NO DIFFERENCE"),
        (1.00, 0.10, 1.0, "TOO FEW ROUNDS"),
    ],
)
def test_speed_and_memory_make_the_verdict(
    ratio: float, noise: float, peak_share: float | None, wanted: str
) -> None:
    ratios = [math.log(ratio) + noise * (-1) ** number for number in range(12)]
    assert verdict(ratios, peak_share) == wanted


def test_without_rounds_there_is_no_verdict() -> None:
    assert verdict([], 0.5) is LeverVerdict.TOO_FEW_ROUNDS
    assert verdict([0.5] * 5, 0.5) is LeverVerdict.TOO_FEW_ROUNDS


@pytest.mark.parametrize(
    ("parity", "in_fp32", "gap", "broken"),
    [
        (ParityClass.EXACT, True, 1e-7, False),
        (ParityClass.EXACT, True, 1e-5, True),
        (ParityClass.EXACT, False, 1e-3, False),
        (ParityClass.NUMERIC, True, 1e-3, False),
        (ParityClass.NUMERIC, True, 2e-2, True),
        (ParityClass.NUMERIC, True, math.nan, True),
        (ParityClass.OBJECTIVE, True, 0.5, False),
    ],
)
def test_a_lever_that_changes_losses_too_much_is_broken(
    parity: ParityClass, in_fp32: bool, gap: float, broken: bool
) -> None:
    candidate, baseline = lever("compile", "block", parity), Opened(losses=(4.0, 3.0))
    found = measured(2.0, losses=(4.0, 3.0 * (1 + gap)))
    row = row_of(candidate, found, baseline, TuneConfig(), in_fp32=in_fp32)
    assert (row.verdict is LeverVerdict.BROKEN) is broken
    assert chosen_of([candidate], {row.name: row}, TuneConfig()) == (
        [] if broken or parity is ParityClass.OBJECTIVE else [candidate]
    )


def lever(key: str, value: object, parity: ParityClass = ParityClass.NUMERIC) -> Candidate:
    return Candidate(lever=key, setting=str(value), changes={key: value}, parity=parity)


def measured(ratio: float, **opened: Any) -> Measured:
    fields = {"losses": (4.0, 3.0), "peak_bytes": 100, **opened}
    return Measured(opened=Opened(**fields), log_ratios=[math.log(ratio)] * 8, speeds=[ratio] * 8)


def test_a_row_has_the_figures_beside_the_baselines() -> None:
    found = measured(2.0, peak_bytes=80, host_bytes=150, first_step_s=3.0, step_s=1.0)
    baseline = Opened(losses=(4.0, 3.0), peak_bytes=100, host_bytes=120)
    row = row_of(lever("precision", "bf16"), found, baseline, TuneConfig())
    speed = row.speed_ratio
    assert speed == pytest.approx(2.0)
    assert row == LeverRow(
        lever="precision",
        setting="bf16",
        speed_ratio=speed,
        speed_low=speed,
        speed_high=speed,
        rounds=8,
        peak_bytes=80,
        peak_delta_bytes=-20,
        parity_class=ParityClass.NUMERIC,
        loss_gap=0.0,
        verdict=LeverVerdict.FASTER,
        reason="",
        samples_per_s=2.0,
        host_bytes=150,
        host_delta_bytes=30,
        once_s=2.0,
    )


@pytest.mark.parametrize(
    ("unavailable", "found", "verdict", "reason"),
    [
        ("it needs a card", None, LeverVerdict.UNAVAILABLE, "it needs a card"),
        (None, None, LeverVerdict.TOO_FEW_ROUNDS, "not begun"),
        (
            None,
            replace(measured(2.0), lost="ended by SIGKILL"),
            LeverVerdict.UNAVAILABLE,
            "SIGKILL",
        ),
    ],
)
def test_a_lever_that_was_not_measured_says_why(
    unavailable: str | None, found: Measured | None, verdict: LeverVerdict, reason: str
) -> None:
    candidate = replace(lever("compile", "block"), unavailable=unavailable)
    row = row_of(candidate, found, Opened(), TuneConfig())
    assert row.verdict is verdict
    assert reason in row.reason


FAST = ("precision", 1.5, 1.2)
FREE = ("states_on_host", 1.0, 0.8)
SMALL = ("recompute", 0.8, 0.5)
TINY = ("micro", 0.3, 0.5)


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        ("speed", ["precision", "states_on_host"]),
        ("memory", ["recompute", "micro", "states_on_host"]),
        ("balanced", ["recompute", "precision", "states_on_host"]),
    ],
)
def test_what_is_chosen_follows_the_objective(objective: str, names: list[str]) -> None:
    rules = TuneConfig.model_validate({"objective": objective})
    candidates = [lever(key, "on") for key, *_ in (FAST, FREE, SMALL, TINY)]
    rows = {
        f"{key}=on": row_of(
            lever(key, "on"),
            measured(ratio, peak_bytes=int(1000 * share)),
            Opened(losses=(4.0, 3.0), peak_bytes=1000),
            TuneConfig(),
        )
        for key, ratio, share in (FAST, FREE, SMALL, TINY)
    }
    assert [each.lever for each in chosen_of(candidates, rows, rules)] == names


def test_of_two_values_of_a_key_the_faster_is_chosen() -> None:
    candidates = [lever("precision", "fp16"), lever("precision", "bf16")]
    rows = {
        each.name: row_of(each, measured(ratio), Opened(losses=(4.0, 3.0)), TuneConfig())
        for each, ratio in zip(candidates, (1.2, 1.4), strict=True)
    }
    assert chosen_of(candidates, rows, TuneConfig()) == [candidates[1]]


def test_gaps_are_the_largest_of_all_steps() -> None:
    assert parity_gap((4.0, 2.9), (4.0, 3.0)) == pytest.approx(0.1 / 3)
    assert parity_gap((), ()) is None
    assert most_gap(ParityClass.OBJECTIVE, in_fp32=True) is None
