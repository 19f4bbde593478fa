"""What `tune` calls a lever, by rounds that were measured, and what it chooses."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.lab.levers import LeverVerdict, ParityClass, Trial, chosen_of
from workers.tuning.messages import Turn

OBJECTIVE = ParityClass.OBJECTIVE

#: Ratios of the speeds of two equal trainings, in turns of a step: eight times a lever that changes
#: nothing, of gpt-nano in a rehearsal, on 2 cores of an EPYC beside 14 to 17 other programs at work
#: (2026-11-28). Half of them differ from 1.0 by more than 0.036.
EQUAL_ARMS = (
    1.018, 0.995, 0.970, 1.015, 1.003, 1.108, 0.985, 0.977, 1.020, 1.001, 0.942, 0.947, 0.904,
    1.090, 0.958, 1.015, 0.948, 0.958, 0.986, 0.965, 1.100, 0.908, 0.996, 0.981, 1.001, 0.999,
    0.961, 1.080, 0.940, 0.926, 1.032, 1.097, 0.993, 1.017, 0.974, 1.232, 1.061, 1.013, 1.009,
    1.080, 0.991, 1.093, 0.914, 1.026, 1.026, 0.984, 0.883, 0.996, 1.030, 1.169, 1.071, 0.961,
    0.996, 0.927, 0.973, 1.020, 0.852, 1.122, 1.047, 1.026, 0.970, 0.939, 1.128, 1.091, 0.987,
    1.016, 0.996, 1.127, 0.984, 0.990, 0.931, 0.964, 1.136, 1.077, 0.996, 0.996, 1.030, 1.022,
    0.761, 0.965, 1.151, 0.863, 0.907, 0.968, 0.972, 1.033, 0.999, 0.976, 1.115, 1.003, 1.002,
    1.052, 1.070, 0.800, 0.988, 0.933, 0.990, 0.957, 0.959, 0.976, 0.971, 0.884, 0.952, 0.939,
)  # fmt: skip

#: As many as a lever gets of a long budget.
ROUNDS = 100

BASELINE = Turn(speed=1.0, losses=(4.0, 3.0), peak_bytes=1000, subject={})


def lever(key: str = "precision", value: object = "bf16", **fields: Any) -> Trial:
    fields = {"parity_class": ParityClass.NUMERIC, **fields}
    return Trial(lever=key, setting=str(value), changes={key: value}, **fields)


def judged(
    ratios: Iterable[float],
    trial: Trial | None = None,
    *,
    lost: str | None = None,
    in_fp32: bool = True,
    **own: Any,
) -> Trial:
    """Judge a lever that has these speeds against a baseline of 1."""
    trial = trial or lever()
    for ratio in ratios:
        trial.add_round(replace(BASELINE, speed=ratio, **own), BASELINE, BASELINE)
    trial.judge(lost, in_fp32=in_fp32)
    return trial


def test_memory_is_compared_with_the_baseline_when_it_was_as_old() -> None:
    old = replace(BASELINE, peak_bytes=2 * BASELINE.peak_bytes)
    trial = lever()
    for _ in range(20):
        trial.add_round(BASELINE, old, BASELINE)
    trial.judge(None, in_fp32=True)
    assert trial.verdict is LeverVerdict.NO_DIFFERENCE
    assert trial.baseline_peak_bytes == BASELINE.peak_bytes


def drawn(seed: int, planted: float) -> LeverVerdict:
    """The verdict of rounds drawn from real ones; which arm is the lever is a toss of a coin."""
    draw = random.Random(seed)  # noqa: S311 - a simulation
    noise = (draw.choice(EQUAL_ARMS) ** draw.choice((-1, 1)) for _ in range(ROUNDS))
    return judged(planted * ratio for ratio in noise).verdict


def test_of_200_equal_arms_at_most_16_seem_to_differ() -> None:
    verdicts = [drawn(seed, 1.0) for seed in range(200)]
    wrong = [each for each in verdicts if each in {LeverVerdict.FASTER, LeverVerdict.SLOWER}]
    assert len(wrong) <= 16


@pytest.mark.parametrize(
    ("planted", "wanted"), [(1.05, LeverVerdict.FASTER), (1 / 1.05, LeverVerdict.SLOWER)]
)
def test_five_percent_are_found_in_180_of_200(planted: float, wanted: LeverVerdict) -> None:
    assert sum(drawn(seed, planted) is wanted for seed in range(200)) >= 180


@pytest.mark.parametrize(
    ("ratio", "noise", "rounds", "peak_bytes", "wanted"),
    [
        (1.10, 0.01, 12, 1000, "FASTER"),
        (1.10, 0.01, 12, 500, "FASTER"),
        (1.00, 0.01, 12, 500, "LESS MEMORY"),
        (0.70, 0.01, 12, 500, "LESS MEMORY"),
        (0.90, 0.01, 12, 1000, "SLOWER"),
        (1.00, 0.005, 12, 970, "NO DIFFERENCE"),
        # Less than what counts, however sure.
        (1.015, 0.001, 12, 1000, "NO DIFFERENCE"),
        (1.025, 0.01, 12, 1000, "TOO FEW ROUNDS"),
        (1.00, 0.10, 12, 1000, "TOO FEW ROUNDS"),
        # Six are the fewest with an interval.
        (1.50, 0.01, 6, 1000, "FASTER"),
        (1.50, 0.01, 5, 500, "TOO FEW ROUNDS"),
        (1.50, 0.01, 0, 500, "TOO FEW ROUNDS"),
    ],
)
def test_speed_and_memory_make_the_verdict(
    ratio: float, noise: float, rounds: int, peak_bytes: int, wanted: str
) -> None:
    ratios = [ratio + noise * (-1) ** number for number in range(rounds)]
    assert judged(ratios, peak_bytes=peak_bytes).verdict == wanted


@pytest.mark.parametrize(
    ("parity", "in_fp32", "gap", "broken"),
    [
        (ParityClass.EXACT, True, 1e-7, False),
        (ParityClass.EXACT, True, 1e-5, True),
        (ParityClass.EXACT, False, 1e-3, False),
        (ParityClass.NUMERIC, True, 1e-3, False),
        (ParityClass.NUMERIC, True, 2e-2, True),
        (ParityClass.NUMERIC, True, math.nan, True),
        (OBJECTIVE, True, 0.5, False),
    ],
)
def test_a_lever_that_changes_losses_too_much_is_broken(
    parity: ParityClass, in_fp32: bool, gap: float, broken: bool
) -> None:
    losses = (4.0, 3.0 * (1 + gap))
    trial = judged([2.0] * 8, lever(parity_class=parity), in_fp32=in_fp32, losses=losses)
    assert (trial.verdict is LeverVerdict.BROKEN) is broken
    assert trial.loss_gap is None or trial.loss_gap == pytest.approx(gap * 3.0 / 3.0)
    assert chosen_of([trial]) == ([] if broken or parity is OBJECTIVE else [trial])


def test_a_row_has_the_figures_beside_the_baselines() -> None:
    row = judged([2.0] * 8, peak_bytes=800).to_json()
    assert row == {
        "lever": "precision",
        "setting": "bf16",
        "verdict": "FASTER",
        "reason": "",
        "speed_ratio": 2.0,
        "speed_low": 2.0,
        "speed_high": 2.0,
        "rounds": 8,
        "peak_bytes": 800,
        "baseline_peak_bytes": 1000,
        "parity_class": "numeric",
        "loss_gap": 0.0,
    }


@pytest.mark.parametrize(
    ("trial", "verdict", "reason"),
    [
        (lever(), "TOO FEW ROUNDS", "not begun"),
        (judged([2.0] * 8, lost="ended by SIGKILL"), "UNAVAILABLE", "SIGKILL"),
        (judged([2.0] * 8, lever(parity_class=OBJECTIVE)), "FASTER", ""),
    ],
)
def test_a_lever_that_helps_nobody_says_why(trial: Trial, verdict: str, reason: str) -> None:
    assert trial.verdict == verdict
    assert reason in trial.reason
    assert chosen_of([trial]) == []


def test_one_value_is_chosen_for_each_key_the_fastest_first() -> None:
    trials = [
        judged([speed] * 8, lever(key, value), peak_bytes=peak_bytes)
        for key, value, speed, peak_bytes in (
            ("precision", "fp16", 1.4, 1200),
            ("precision", "bf16", 1.5, 1200),
            ("states_on_host", 50, 1.0, 800),
            ("recompute", "all", 0.8, 500),
            ("micro", 8, 0.3, 500),
        )
    ]
    assert [each.name for each in chosen_of(trials)] == ["precision=bf16", "states_on_host=50"]
