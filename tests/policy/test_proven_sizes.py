"""What still runs when no failure can be afforded."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from workers.policy.sizes_tried import Proof, Proofs, largest_proven, with_proof, without_refuted

STEPS = st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 1000)), min_size=1, max_size=60)


def after(steps: list[tuple[int, int]]) -> Proofs:
    proofs: Proofs = ()
    for at_s, (size, memory_bytes) in enumerate(steps):
        proofs = with_proof(proofs, Proof(size, float(memory_bytes), float(at_s)))
    return proofs


@given(steps=STEPS, memory_bytes=st.integers(0, 1000))
def test_only_what_ended_well_under_no_more_memory_is_proven(
    steps: list[tuple[int, int]], memory_bytes: int
) -> None:
    """Samples are noisy: 5 % more is no more."""
    found = largest_proven(after(steps), memory_bytes, 60.0)
    assert found is None or any(
        size == found and 0.95 * needed <= memory_bytes for size, needed in steps
    )


@given(steps=STEPS)
def test_a_few_proofs_are_kept_and_the_last_step_is_one(steps: list[tuple[int, int]]) -> None:
    proofs = after(steps)
    assert any(proof.size == steps[-1][0] for proof in proofs)
    sizes = sorted(proof.size for proof in proofs)
    assert all(larger >= 1.5 * smaller for smaller, larger in itertools.pairwise(sizes))


@given(steps=STEPS, size=st.integers(1, 10_000), memory_bytes=st.integers(0, 1000))
def test_what_fails_or_is_nearly_as_large_is_not_proven(
    steps: list[tuple[int, int]], size: int, memory_bytes: int
) -> None:
    left = without_refuted(after(steps), size, memory_bytes)
    assert (
        largest_proven(left, memory_bytes, 60.0) is None
        or largest_proven(left, memory_bytes, 60.0) < 0.8 * size
    )  # type: ignore[operator]
    assert {proof for proof in after(steps) if 0.95 * proof.memory_bytes > memory_bytes} <= set(
        left
    ), "under more it may fit"


def test_a_proof_lasts_ten_minutes_and_is_renewed() -> None:
    proofs = with_proof((), Proof(100, 50.0, 0.0))
    assert with_proof(proofs, Proof(100, 60.0, 4.0)) is proofs, "a step costs next to nothing"
    assert largest_proven(proofs, 50.0, 599.0) == 100
    assert largest_proven(proofs, 50.0, 600.0) is None
    assert largest_proven(with_proof(proofs, Proof(100, 60.0, 5.0)), 60.0, 604.0) == 100
