"""What experience forbids: nothing as large as what failed lately, and probes that are rationed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.sizes_tried import (
    Bounds,
    Bracket,
    Proof,
    Proofs,
    largest_proven,
    started_at,
    with_proof,
    without_refuted,
)

BOUNDS = Bounds(largest=10_000)
LONG_S = 1000.0
"""By then everything is forgotten, and every probe earned anew."""

histories = st.lists(
    st.tuples(st.integers(1, 10_000), st.booleans(), st.floats(0.0, 100.0)), max_size=30
)


def after(history: list[tuple[int, bool, float]]) -> tuple[Bracket, float]:
    bracket, now_s = Bracket(), 0.0
    for size, good, seconds in history:
        now_s += seconds
        bracket = bracket.ended_well(size, now_s) if good else bracket.ran_out(BOUNDS, size, now_s)
    return bracket, now_s


@given(history=histories, size=st.integers(2, 10_000), promised=st.booleans())
def test_nothing_as_large_as_what_just_failed(
    history: list[tuple[int, bool, float]], size: int, promised: bool
) -> None:
    bracket, now_s = after(history)
    failed = bracket.ran_out(BOUNDS, size, now_s)
    assert failed.good is not None
    if bracket.good is None or size > bracket.good or bracket.in_row:
        assert failed.allowed(min(failed.good, size - 1), BOUNDS, now_s, promised=promised) < size
    again = failed.ended_well(min(failed.good, size - 1), now_s + 1.0)
    assert again.good is not None
    assert again.allowed(again.good, BOUNDS, now_s + 1.0, promised=promised) < size


FAILED = Bracket(good=1000).ran_out(BOUNDS, 1000, 0.0).ended_well(800, 1.0)
PROBED = Bracket(good=100).ran_out(BOUNDS, 200, 0.0).ended_well(100, 0.0)


@pytest.mark.parametrize(
    ("bracket", "at_s", "otherwise", "promised"),
    [
        pytest.param(Bracket().ended_well(100, 0.0), 0.0, 200, 10_000,
         id="nothing bad: doubles, unless bounded"),
        pytest.param(Bracket(good=400, bad=900, bad_until_s=LONG_S), 0.0, 600, 600, id="bisects"),
        pytest.param(Bracket(good=400, bad=411, bad_until_s=LONG_S), 0.0, 400, 400,
         id="close enough"),
        pytest.param(FAILED, 2.0, 894, 894, id="half way to what failed, however much is promised"),
        pytest.param(FAILED, LONG_S, 848, 10_000,
         id="what failed is forgotten, and the next probe is small"),
        pytest.param(Bracket(good=100, probes=0.0), 1.0, 100, 10_000,
         id="without a probe nothing beyond"),
        pytest.param(Bracket(good=100, bad=400, bad_until_s=LONG_S, probes=0.0), 1.0, 100, 200,
         id="bounded, it needs no probe"),
        pytest.param(PROBED, 0.0, 141, 141, id="not yet forgiven"),
        pytest.param(PROBED.forgiven(), 0.0, 106, 10_000, id="forgiven"),
        pytest.param(started_at(500), 0.0, 500, 500, id="remembered: tried as it is"),
        pytest.param(started_at(500).ended_well(500, 1.0), 1.0, 530, 10_000,
         id="remembered: grows once it ended well"),
    ],
)  # fmt: skip
def test_the_largest_size_to_try(
    bracket: Bracket, at_s: float, otherwise: int, promised: int
) -> None:
    assert bracket.good is not None
    found = [
        bracket.allowed(bracket.good, BOUNDS, at_s, promised=is_promised)
        for is_promised in (False, True)
    ]
    assert found == [otherwise, promised]


def test_a_failed_probe_leaves_the_good_size() -> None:
    probe = Bracket(good=400).ran_out(BOUNDS, 800, 0.0)
    assert (probe.good, probe.bad) == (400, 800)
    assert Bracket(good=400).ran_out(BOUNDS, 400, 0.0).good == 320
    sizes, bracket = [], Bracket(good=1000)
    for _ in range(4):
        bracket = bracket.ran_out(BOUNDS, bracket.good or 0, 0.0)
        sizes.append(bracket.good)
    assert sizes == [800, 480, 216, 64], "each failure in a row cuts deeper"


def test_a_good_size_that_is_also_bad_is_not_allowed() -> None:
    bracket = Bracket(good=500, bad=500, bad_until_s=100.0)
    assert bracket.allowed(500, BOUNDS, 0.0, promised=False) == BOUNDS.down(499)


STEPS = st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 1000)), min_size=1, max_size=60)


def proofs_after(steps: list[tuple[int, int]]) -> Proofs:
    proofs: Proofs = ()
    for at_s, (size, memory_bytes) in enumerate(steps):
        proofs = with_proof(proofs, Proof(size, float(memory_bytes), float(at_s)))
    return proofs


@given(steps=STEPS, size=st.integers(1, 10_000), memory_bytes=st.integers(0, 1000))
def test_what_fails_or_is_nearly_as_large_is_not_proven(
    steps: list[tuple[int, int]], size: int, memory_bytes: int
) -> None:
    left = without_refuted(proofs_after(steps), size, memory_bytes)
    assert (
        largest_proven(left, memory_bytes, 60.0) is None
        or largest_proven(left, memory_bytes, 60.0) < 0.8 * size
    )  # type: ignore[operator]
    assert {
        proof for proof in proofs_after(steps) if 0.95 * proof.memory_bytes > memory_bytes
    } <= set(left), "under more it may fit"


def test_a_proof_lasts_ten_minutes_and_is_renewed() -> None:
    proofs = with_proof((), Proof(100, 50.0, 0.0))
    assert with_proof(proofs, Proof(100, 60.0, 4.0)) is proofs, "a step costs next to nothing"
    assert largest_proven(proofs, 50.0, 599.0) == 100
    assert largest_proven(proofs, 50.0, 600.0) is None
    assert largest_proven(with_proof(proofs, Proof(100, 60.0, 5.0)), 60.0, 604.0) == 100
