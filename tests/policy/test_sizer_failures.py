"""Courses of failures that the sizer has to end by itself: nothing fits, or what had ended well no longer does."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import pytest

from workers.policy.memory_needed import MUCH_MORE
from workers.policy.memory_seen import MINUTE_S
from workers.policy.sizer import FIRST_WAIT_S, Sizer
from workers.policy.sizes_tried import Bounds

_FREE_BYTES: Final = 10_000


def worked(bounds: Bounds, steps: int) -> Sizer:
    """The state after so many steps under free memory that is told, whose needs are their sizes."""
    state = Sizer.cold(bounds)
    for second in range(steps):
        state, size = Sizer.next_size(state, bounds, float(second), _FREE_BYTES)
        assert size is not None
        state = Sizer.succeeded(state, bounds, second + 0.5, size, size)
    return state


@pytest.mark.parametrize("failures_per_minute", [1, 2, 6])
@pytest.mark.parametrize("smallest", [1, 40])
def test_while_nothing_fits_failures_stay_within_what_is_allowed(
    smallest: int, failures_per_minute: int
) -> None:
    """Also where memory seems to come back at each question, so that the smallest size is promised."""
    bounds = Bounds(largest=40, smallest=smallest, failures_per_minute=failures_per_minute)
    state, failed_s = worked(bounds, 30), list[float]()
    for second in range(100, 700):
        state, size = Sizer.next_size(
            state, bounds, float(second), 1000 * second if second % 2 else 10
        )
        if size is not None:
            state = Sizer.failed(state, bounds, second + 0.5, size)
            failed_s.append(second + 0.5)
    allowed = failures_per_minute + (
        6 if smallest < bounds.largest else 0
    )  # what it takes to shrink
    assert len(failed_s) > allowed
    assert all(
        later - sooner >= MINUTE_S
        for sooner, later in zip(failed_s, failed_s[allowed:], strict=False)
    )


def test_what_ended_well_is_given_up_despite_heavy_steps() -> None:
    """No signal tells that memory was taken.

    Each step may have been a heavy one, and each was run smaller.
    """
    bounds = Bounds(largest=1000)
    state = worked(bounds, 40)
    at_s = 100.0
    for gap in (1, 3, 2):  # so that no period is seen
        for ratio in (*[1.0] * gap, 2.0 * MUCH_MORE):
            at_s += 0.1
            state, size = Sizer.next_size(state, bounds, at_s, _FREE_BYTES)
            assert size is not None
            state = Sizer.succeeded(state, bounds, at_s, size, int(ratio * size))
    assert state.heavy.factor(at_s) > 1.0
    sizes = list[int]()
    for _ in range(40):
        at_s += 0.1
        state, size = Sizer.next_size(state, bounds, at_s, None)
        if size is not None:
            state = Sizer.failed(state, bounds, at_s, size)
            sizes.append(size)
    assert sizes[-1:] == [bounds.smallest]
    assert all(later < sooner for sooner, later in pairwise(sizes))


@pytest.mark.parametrize("peaks", [True, False])
def test_absurd_peaks_of_the_only_size_are_forgotten(*, peaks: bool) -> None:
    """They say that it does not fit.

    It ends well all the same when it is tried: with a peak, or against the signal.
    """
    bounds = Bounds(largest=8, smallest=8)
    state, rests = worked(bounds, 3), 0
    for at_s in (10.0, 11.0):
        state = Sizer.succeeded(state, bounds, at_s, 8, 10**15)
    for second in range(20, 320):
        state, size = Sizer.next_size(state, bounds, float(second), _FREE_BYTES)
        rests += size is None
        if size is not None:
            state = Sizer.succeeded(state, bounds, second + 0.5, size, size if peaks else None)
    assert 0 < rests <= 2 * FIRST_WAIT_S
