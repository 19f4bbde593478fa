"""Steps that take several times what others take: when the next one is expected."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.memory_needed import HeavySteps


def played(
    *, every: int, steps: int, ratio: float = 4.0, repeats: bool = False
) -> list[tuple[bool, bool]]:
    """Whether each step was heavy, and whether it had been expected; one that was not expected fails.

    `repeats`: a heavy step that failed comes again at once, as where only steps that end well are
    counted, and ends well then, because it is run smaller.
    """
    heavy, seen, number = HeavySteps(), list[tuple[bool, bool]](), 0
    for step in range(steps):
        number += 1
        is_heavy = number % every == 0
        fits = heavy.factor(float(step)) >= ratio or (repeats and heavy.failed)
        seen.append((is_heavy, heavy.is_due))
        if is_heavy:
            heavy = heavy.met(float(step), ratio if fits else 1.1, failed=not fits)
            number -= repeats and not fits
        else:
            heavy = heavy.passed()
    return seen


@pytest.mark.parametrize("repeats", [False, True])
@given(every=st.integers(3, 60))
def test_after_three_equal_gaps_heavy_steps_are_expected(*, repeats: bool, every: int) -> None:
    seen = played(every=every, steps=12 * every, repeats=repeats)
    assert all(is_heavy == expected for is_heavy, expected in seen[-4 * every :])


def test_another_failure_costs_a_small_step_not_the_period() -> None:
    """Whether the workload counted it is not known: the next one may come a step earlier."""
    for counted in (False, True):
        heavy, at_s = HeavySteps(), 0.0
        for _ in range(4):
            for _ in range(9):
                heavy = heavy.passed()
            heavy = heavy.met(at_s, 4.0, failed=False)
        heavy = heavy.passed(failed=True)
        for _ in range(8):
            assert not heavy.is_due
            heavy = heavy.passed()
        assert heavy.is_due
        if not counted:
            heavy = heavy.passed()
            assert heavy.is_due
        heavy = heavy.met(at_s, 4.0, failed=False)
        for _ in range(9):
            assert not heavy.is_due
            heavy = heavy.passed()
        assert heavy.is_due


def test_a_period_is_found_and_given_up_after_two_misses() -> None:
    heavy = HeavySteps()
    places = {10, 14, 20, 30}
    for step in range(60):
        assert heavy.is_due == (step in {40, 50}), step
        heavy = heavy.met(float(step), 3.0, failed=False) if step in places else heavy
        heavy = heavy.passed()
    assert heavy.period is None


@given(seed=st.integers(0, 1000))
def test_irregular_heavy_steps_count_while_they_are_frequent(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    heavy, now_s = HeavySteps(), 0.0
    for gap in (3, 17, 8, 29, 5):
        for _ in range(gap):
            heavy, now_s = heavy.passed(), now_s + draw.uniform(0.1, 0.5)
        heavy = heavy.met(now_s, 3.0, failed=False).passed()
    assert heavy.factor(now_s) == 3.0
    assert heavy.factor(now_s + 121.0) == 1.0


def test_an_expected_step_that_fails_was_heavier_than_known() -> None:
    heavy = HeavySteps()
    for _ in range(3):
        for _ in range(5):
            heavy = heavy.passed()
        heavy = heavy.met(0.0, 1.5, failed=True)
    for _ in range(5):
        heavy = heavy.passed()
    assert heavy.factor(0.0) == 1.5
    heavy = heavy.met(0.0, 1.0, failed=True)
    assert (heavy.factor(0.0), heavy.confirmed) == (3.0, True), "and it may come again at once"
    assert heavy.met(0.0, 5.0, failed=False).passed().factor(0.0) == 1.0
