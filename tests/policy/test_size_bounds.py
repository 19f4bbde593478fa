"""What experience forbids: nothing as large as what failed lately, and probes that are rationed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.adaptive.bounds import Bounds
from workers.policy.adaptive.size_bounds import Bracket, allowed, ended_well, forgiven, ran_out, rested, started_at

BOUNDS = Bounds(largest=10_000)
LONG_S = 1000.0
"""By then everything is forgotten, and every probe earned anew."""

histories = st.lists(st.tuples(st.integers(1, 10_000), st.booleans(), st.floats(0.0, 100.0)), max_size=30)


def after(history: list[tuple[int, bool, float]]) -> tuple[Bracket, float]:
    bracket, now_s = Bracket(), 0.0
    for size, good, seconds in history:
        now_s += seconds
        bracket = ended_well(bracket, size, now_s) if good else ran_out(bracket, BOUNDS, size, now_s)
    return bracket, now_s


@given(history=histories, size=st.integers(2, 10_000), promised=st.booleans())
def test_nothing_as_large_as_what_just_failed(
    history: list[tuple[int, bool, float]], size: int, promised: bool
) -> None:
    bracket, now_s = after(history)
    failed = ran_out(bracket, BOUNDS, size, now_s)
    assert failed.good is not None
    if bracket.good is None or size > bracket.good or bracket.in_row:
        assert allowed(failed, min(failed.good, size - 1), BOUNDS, now_s, promised=promised) < size
    again = ended_well(failed, min(failed.good, size - 1), now_s + 1.0)
    assert again.good is not None
    assert allowed(again, again.good, BOUNDS, now_s + 1.0, promised=promised) < size


@given(history=histories)
def test_what_is_allowed_is_a_size_there_is(history: list[tuple[int, bool, float]]) -> None:
    bracket, now_s = after(history)
    if bracket.good is not None:
        for later_s in (0.0, 30.0, LONG_S):
            for promised in (False, True):
                assert 1 <= allowed(bracket, bracket.good, BOUNDS, now_s + later_s, promised=promised) <= 10_000


def test_with_nothing_known_to_be_bad_sizes_double_unless_something_else_bounds_them() -> None:
    bracket = ended_well(Bracket(), 100, 0.0)
    assert allowed(bracket, 100, BOUNDS, 0.0, promised=False) == 200
    assert allowed(bracket, 100, BOUNDS, 0.0, promised=True) == 10_000


def test_between_good_and_bad_it_bisects_until_they_are_close() -> None:
    bracket = Bracket(good=400, bad=900, bad_until_s=LONG_S)
    assert allowed(bracket, 400, BOUNDS, 0.0, promised=False) == 600
    close = Bracket(good=400, bad=411, bad_until_s=LONG_S)
    assert allowed(close, 400, BOUNDS, 0.0, promised=False) == 400


def test_a_probe_that_failed_leaves_the_good_size_and_what_was_good_is_cut() -> None:
    probe = ran_out(Bracket(good=400), BOUNDS, 800, 0.0)
    assert (probe.good, probe.bad) == (400, 800)
    assert ran_out(Bracket(good=400), BOUNDS, 400, 0.0).good == 320
    sizes, bracket = [], Bracket(good=1000)
    for _ in range(4):
        bracket = ran_out(bracket, BOUNDS, bracket.good or 0, 0.0)
        sizes.append(bracket.good)
    assert sizes == [800, 480, 216, 64], "each failure in a row cuts deeper"


def test_a_bad_size_is_forgotten_and_the_next_probe_beyond_it_is_small() -> None:
    bracket = ended_well(ran_out(Bracket(good=1000), BOUNDS, 1000, 0.0), 800, 1.0)
    assert allowed(bracket, 800, BOUNDS, 2.0, promised=True) == 894, "half way, however much is promised"
    assert allowed(bracket, 800, BOUNDS, LONG_S, promised=True) == 10_000
    assert allowed(bracket, 800, BOUNDS, LONG_S, promised=False) == 848


def test_probes_are_rationed_and_earned_again() -> None:
    bracket = Bracket(good=100)
    failures = 0
    while bracket.may_probe(0.0):
        bracket = ended_well(ran_out(bracket, BOUNDS, 5000, 0.0), 100, 0.0)
        failures += 1
    assert 1 <= failures <= 5
    assert allowed(bracket, 100, BOUNDS, 1.0, promised=False) == 100
    assert allowed(bracket, 100, BOUNDS, LONG_S, promised=False) > 100


def test_without_a_probe_nothing_beyond_the_good_size_is_tried() -> None:
    assert allowed(Bracket(good=100, probes=0.0), 100, BOUNDS, 1.0, promised=False) == 100
    assert allowed(Bracket(good=100, probes=0.0), 100, BOUNDS, 1.0, promised=True) == 10_000


def test_where_something_else_bounds_the_size_it_bisects_without_a_probe() -> None:
    bracket = Bracket(good=100, bad=400, bad_until_s=LONG_S, probes=0.0)
    assert allowed(bracket, 100, BOUNDS, 1.0, promised=False) == 100
    assert allowed(bracket, 100, BOUNDS, 1.0, promised=True) == 200


def test_a_size_found_bad_again_is_remembered_longer() -> None:
    first = ended_well(ran_out(Bracket(good=100), BOUNDS, 200, 0.0), 100, 0.0)
    second = ran_out(first, BOUNDS, 205, 100.0)
    assert second.bad_until_s - 100.0 > first.bad_until_s
    elsewhere = ran_out(first, BOUNDS, 400, 100.0)
    assert elsewhere.bad_until_s - 100.0 == first.bad_until_s


def test_what_is_forgiven_may_be_tried_at_once() -> None:
    bracket = ended_well(ran_out(Bracket(good=100), BOUNDS, 200, 0.0), 100, 0.0)
    assert allowed(bracket, 100, BOUNDS, 0.0, promised=True) == 141
    assert allowed(forgiven(bracket), 100, BOUNDS, 0.0, promised=True) == 10_000


def test_nothing_is_forgotten_while_nothing_runs() -> None:
    bracket = ended_well(ran_out(Bracket(good=100), BOUNDS, 200, 0.0), 100, 0.0)
    awake = rested(bracket, 60.0)
    assert awake.bad_until_s == bracket.bad_until_s + 60.0
    assert awake.may_probe(LONG_S + 60.0) == bracket.may_probe(LONG_S)
    assert awake.probes_at_s == bracket.probes_at_s + 60.0


@pytest.mark.parametrize("promised", [False, True])
def test_a_remembered_size_is_tried_as_it_is_before_it_grows(promised: bool) -> None:
    bracket = started_at(500)
    assert allowed(bracket, 500, BOUNDS, 0.0, promised=promised) == 500
    assert allowed(ended_well(bracket, 500, 1.0), 500, BOUNDS, 1.0, promised=promised) > 500
