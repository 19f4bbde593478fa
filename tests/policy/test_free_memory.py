"""What samples say: noise is smoothed, exact ones are taken at their word, and cuts at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.memory_seen import FreeMemory, with_sample

GIB = 2.0**30


def fed(samples: Iterable[float]) -> FreeMemory:
    level: FreeMemory | None = None
    for sample in samples:
        level = with_sample(level, sample)
    assert level is not None
    return level


def noisy(count: int, *, noise: float = 0.03, walk: float = 0.0, seed: int = 1) -> list[float]:
    draw, true_bytes, samples = Random(seed), 4 * GIB, []  # noqa: S311 - a simulation
    for _ in range(count):
        true_bytes *= 1.0 + draw.gauss(0.0, walk)
        samples.append(true_bytes * (1.0 + draw.gauss(0.0, noise)))
    return samples


def test_noise_is_smoothed_and_its_error_is_known() -> None:
    misses = [fed(noisy(200, seed=seed)).level_bytes / (4 * GIB) - 1.0 for seed in range(40)]
    errors = [fed(noisy(200, seed=seed)).error for seed in range(40)]
    assert statistics.stdev(misses) < 0.015, "half of the noise at most"
    assert 0.6 < statistics.fmean(errors) / statistics.stdev(misses) < 1.7
    assert all(fed(noisy(200, seed=seed)).usable_bytes < 4 * GIB for seed in range(40))


@pytest.mark.parametrize("now_bytes", [2 * GIB, 8 * GIB], ids=["taken", "given"])
def test_memory_that_is_taken_or_given_shows_at_once(now_bytes: int) -> None:
    assert with_sample(fed(noisy(100)), now_bytes).level_bytes == now_bytes


def test_an_exact_sample_is_used_as_it_is_and_others_are_not() -> None:
    level = fed(noisy(50))
    exact = with_sample(level, 4.4 * GIB, exact=True)
    assert exact.usable_bytes == exact.likely_bytes == 4.4 * GIB
    assert with_sample(level, 4.4 * GIB).usable_bytes < 4.4 * GIB


@given(samples=st.lists(st.floats(0.0, 1e13), min_size=1, max_size=40), exact=st.booleans())
def test_usable_is_never_more_than_was_seen_and_never_negative(
    samples: list[float], exact: bool
) -> None:
    level: FreeMemory | None = None
    for place, sample in enumerate(samples, start=1):
        level = with_sample(level, sample, exact=exact)
        assert 0.0 <= level.usable_bytes <= max(samples[:place]) * (1 + 1e-9)
        assert level.usable_bytes <= level.likely_bytes


def test_a_third_piece_is_expected_after_two_in_a_row() -> None:
    level = with_sample(with_sample(None, 100.0, exact=True), 90.0, 0.1, exact=True)
    assert level.usable_bytes == 90.0
    level = with_sample(level, 80.0, 0.2, exact=True)
    assert 65.0 < level.usable_bytes < 70.0
    assert with_sample(level, 80.0, 1.2, exact=True).usable_bytes == 80.0
    apart = with_sample(with_sample(None, 90.0, exact=True), 80.0, 2.0, exact=True)
    assert with_sample(apart, 70.0, 4.0, exact=True).usable_bytes == 70.0

    jittery = with_sample(with_sample(None, 100.0, exact=True), 96.0, exact=True, failed=True)
    assert with_sample(jittery, 100.0, 119.0, exact=True).usable_bytes == 100.0 * (
        1.0 - jittery.jitter
    )
    assert 0.039 < jittery.jitter < 0.041
    assert with_sample(jittery, 100.0, 120.0, exact=True).usable_bytes == 100.0
    taken = with_sample(jittery, 40.0, 1.0, exact=True)
    assert taken.usable_bytes == 40.0 * (1.0 - taken.jitter)
    assert with_sample(taken, 100.0, 2.0, exact=True).usable_bytes == 100.0, (
        "a program was the reason"
    )
