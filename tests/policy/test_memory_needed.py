"""What a step takes: a line through what was measured and a margin that was earned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.memory_needed import (
    Footprint,
    HeavySteps,
    first_footprint,
    footprint_of,
    with_peak,
)
from workers.settings import Learned

MIB = 2.0**20
FIXED, UNIT = 400 * MIB, 2 * MIB


def need(x: float) -> float:
    return FIXED + UNIT * x


def line_after(*steps: float, extra: float = 0.0) -> Footprint:
    line: Footprint | None = None
    for at_s, x in enumerate(steps):
        line = with_peak(
            line, x, need(x) * (1.0 + (extra if at_s == len(steps) - 1 else 0.0)), float(at_s)
        )
    assert line is not None
    return line


def test_one_step_bounds_and_two_give_the_slope() -> None:
    one = line_after(100)
    assert not one.has_slope
    assert one.bytes_at(400) >= need(400)
    two = line_after(100, 400)
    assert two.has_slope
    assert two.unit_bytes == pytest.approx(UNIT)
    assert two.fixed_bytes == pytest.approx(FIXED)
    assert (one.steps, two.steps, line_after(100, 400, 400).steps) == (1, 1, 2)


@given(
    fixed=st.floats(0.0, 1e10),
    unit=st.floats(1e3, 1e8),
    sizes=st.tuples(st.integers(1, 1000), st.integers(2, 8)),
    limit=st.floats(0.1, 4.0),
)
def test_what_is_promised_fits_by_the_line_with_its_margin(
    fixed: float, unit: float, sizes: tuple[int, int], limit: float
) -> None:
    small, times = sizes
    large = small * times
    line = with_peak(first_footprint(small, fixed + unit * small), large, fixed + unit * large, 1.0)
    limit_bytes = limit * (fixed + unit * large)
    x = line.largest_x(limit_bytes)
    if x > 0:
        assert line.bytes_at(x) * (1.0 + line.margin) <= limit_bytes * (1 + 1e-9)
        # What is k times as large as all before takes at most k times as much, and no more is
        # promised.
        assert x <= max(large, large / (fixed + unit * large) * limit_bytes)


def test_the_margin_narrows_until_a_surprise_widens_it() -> None:
    line = line_after(100, 400)
    calm = line
    for at_s in range(2, 60):
        calm = with_peak(calm, 400, need(400), float(at_s))
    assert calm.margin < line.margin / 2
    surprised = with_peak(calm, 405, need(405) * 1.05, 60.0)
    assert surprised.margin > 0.04


@pytest.mark.parametrize("steps", [10, 1000])
def test_a_surprise_fades_with_time_and_not_with_steps(steps: int) -> None:
    line = with_peak(line_after(100, 400, 400, 400), 405, need(405) * 1.05, 4.0)
    for step in range(1, steps + 1):
        line = with_peak(line, 405, need(405) * 1.05, 4.0 + 600.0 * step / steps)
    assert 0.5 < line.surprise / 0.05 < 0.8


def test_a_surprise_elsewhere_does_not_end_what_goes_well_here() -> None:
    line = line_after(100, 400).surprised(200, 1.2 * need(200))
    assert line.largest_x(1.05 * need(400)) < 400, "no step has ended well since"
    line = with_peak(line, 400, need(400), 3.0)
    assert line.surprise > 0.05
    assert line.largest_x(1.05 * need(400)) == 400
    assert line.largest_x(0.99 * need(400)) < 400


@pytest.mark.parametrize("factor", [0.5, 1.3, 10.0])
def test_a_workload_that_changed_is_followed_at_once(factor: float) -> None:
    line = line_after(100, 390, 420, 400, 400, 400)
    changed = with_peak(line, 400, factor * need(400), 10.0)
    assert changed.here_bytes == factor * need(400)
    assert changed.steps == 1


def test_a_remembered_line_goes_through_its_two_places() -> None:
    line = footprint_of(Learned(size=1600, fixed_bytes=1000.0, unit_bytes=2.0), 1.0)
    assert line is not None
    assert (line.here_x, line.here_bytes) == (1600.0, 1000.0 + 2 * 1600)
    assert (line.far_x, line.far_bytes) == (100.0, 1000.0 + 2 * 100)
    assert line.unit_bytes == 2.0
    squared = footprint_of(Learned(size=40, fixed_bytes=1000.0, unit_bytes=2.0), 2.0)
    assert squared is not None
    assert (squared.here_x, squared.bytes_at(5000.0)) == (1600.0, 1000.0 + 2 * 5000)
    flat = footprint_of(Learned(size=1600, fixed_bytes=1000.0, unit_bytes=0.0), 1.0)
    assert flat is not None
    assert 0 < flat.unit_bytes < 1000.0 / 1600, "it grows a little, so that a size can be found"


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


def test_a_period_is_found_and_given_up_after_two_misses() -> None:
    heavy = HeavySteps()
    places = {10, 14, 20, 30}
    for step in range(60):
        assert heavy.is_due == (step in {40, 50}), step
        heavy = heavy.met(float(step), 3.0, failed=False) if step in places else heavy
        heavy = heavy.passed()
    assert heavy.period is None
