"""The thermal governor in a closed loop with simulated cards; HYPOTHESIS_FRESH=1 draws other cards.

`thermal_cards.py` has the cards and their sensors, and defines settling.
"""

from __future__ import annotations

import os
import random
import statistics
from functools import cache
from typing import Any

import pytest

from tests.policy.thermal_cards import Course, best_constant, draw, governor, judge, play

pytestmark = pytest.mark.slow


FIRST = random.SystemRandom().randrange(10**6) if os.environ.get("HYPOTHESIS_FRESH") else 1
SEEDS = tuple(range(FIRST, FIRST + 5))


@cache
def governed(seed: int) -> tuple[Course, dict[str, Any]]:
    """Simulate a random card once for all tests."""
    course = play(draw(seed), governor)
    return course, judge(draw(seed), course)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_card_settles_in_the_band_and_stays(seed: int) -> None:
    card, (_, figures) = draw(seed), governed(seed)
    assert figures["critical_settled_s"] == 0.0, card
    assert figures["pauses_settled"] == 0, card
    assert figures["outside_settled_pct"] == 0.0, card
    assert figures["turns_per_min"] <= 0.5, card
    assert figures["most_c"] < 83.0, card
    assert figures["settle_s"] < 600.0
    assert figures["critical_unsettled_s"] <= 15.0


def test_it_loses_less_than_3_percent_to_the_best_duty() -> None:
    shares = []
    for seed in SEEDS:
        course, figures = governed(seed)
        if figures["least_c"] >= 75.0:  # cooler cards never need a governor
            shares.append(course.work_s / best_constant(draw(seed)).work_s)
    assert len(shares) >= 2
    assert min(shares) > 0.97
    assert statistics.fmean(shares) > 0.98
