"""Courses of failures that the sizer has to end by itself: nothing fits, or what had ended well no longer does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Final

import pytest

from workers.policy.memory_needed import MUCH_MORE
from workers.policy.memory_seen import MINUTE_S
from workers.policy.sizer import Sizer
from workers.policy.sizes_tried import Bounds
from workers.resilience.adaptive_size import AdaptiveSize

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


_MIB = 1 << 20
_LARGEST = 2450
_LEAST_MIB, _ITEM_MIB = 3.7, 0.0272
_SQUEEZED_MIB, _RELEASED_MIB = 11.77, 46.15
_RELEASED_AT_S, _END_S = 21.0, 60.0

#: Most of what fits after the release: the margin still remembers the noise of small steps.
_BACK = int(0.85 * _RELEASED_MIB / _ITEM_MIB)


@dataclass(frozen=True)
class Played:
    """What came of it."""

    squeezed_failures: int
    released_failures: int
    steps_until_back: int | None
    """Good steps after the release until the size was back; `None` if it never was."""


def play(seed: int) -> Played:
    """Return what the sizer made of one such course."""
    draw, now_s, held_mib = Random(seed), 0.0, 0.0  # noqa: S311 - a course, not secrets
    failed = {False: 0, True: 0}
    steps, until_back = 0, None
    size_of = AdaptiveSize(_LARGEST, clock=lambda: now_s)
    while now_s < _END_S:
        released = now_s >= _RELEASED_AT_S
        if draw.random() < 0.03:
            held_mib = draw.random()
        free_mib = (_RELEASED_MIB if released else _SQUEEZED_MIB) - held_mib
        size = size_of.next(int(free_mib * _MIB))
        if size is None:
            now_s += 0.02
            continue
        if released and until_back is None and size >= _BACK:
            until_back = steps
        needed_mib = max(_LEAST_MIB, size * _ITEM_MIB) * (1 + 0.01 * draw.random())
        seen_mib = needed_mib * (1 - 0.08 * max(0.0, 1 - size / 1200) * draw.random())
        step_s = 0.045 + size * 45e-6
        if needed_mib <= free_mib + draw.gauss(0, 0.15):
            now_s += step_s
            steps += released
            size_of.succeeded(size, int(seen_mib * _MIB))
        else:
            now_s += 0.3 * step_s
            failed[released] += 1
            size_of.failed(size)
    return Played(failed[False], failed[True], until_back)


def test_the_size_is_back_within_60_steps_of_the_memory() -> None:
    courses = [play(seed) for seed in range(30)]
    squeezed = sum(played.squeezed_failures >= 2 for played in courses)
    assert squeezed > len(courses) / 2, "else no failure is held against a size"
    slow = [
        seed
        for seed, played in enumerate(courses)
        if played.steps_until_back is None or played.steps_until_back > 60
    ]
    assert not slow, f"not back within 60 good steps with seeds {slow}"
    assert sum(played.released_failures for played in courses) <= len(courses) / 2


def test_a_wrong_signal_is_heard_when_it_tells_of_far_more() -> None:
    """The smallest step fits although the signal denies it; then it fails.

    Then nearly everything is there.
    """
    now_s, good = 0.0, []
    size_of = AdaptiveSize(1000, clock=lambda: now_s)
    for until_s, told_mib, there_mib in (
        (20.0, 5000, 5000),
        (30.0, 90, 600),
        (70.0, 170, 100),
        (90.0, 4000, 4000),
    ):
        good.clear()
        while now_s < until_s:
            size = size_of.next(told_mib * _MIB)
            needed_mib = 480 + 4 * (size or 0)
            now_s += 0.1
            if size is None:
                continue
            if needed_mib <= there_mib:
                good.append(size)
                size_of.succeeded(size, needed_mib * _MIB)
            else:
                size_of.failed(size)
    assert max(good[:10], default=0) > 800, "of 880 that fit"


def test_a_signal_that_always_says_nothing_is_ignored() -> None:
    now_s, good, failures = 0.0, [], 0
    size_of = AdaptiveSize(10_000, clock=lambda: now_s)
    for _ in range(750):
        size = size_of.next(0)
        now_s += 1.0
        if size is not None and size <= 3000:
            good.append(size)
            size_of.succeeded(size, size * _MIB)
        elif size is not None:
            failures += 1
            size_of.failed(size)
    assert sum(good[-500:]) >= 0.75 * 500 * 3000
    assert failures < 0.04 * 750


def test_the_wait_for_the_smallest_size_doubles_until_it_fits() -> None:
    clock = [0]
    sizes = AdaptiveSize(4, smallest=4, clock=lambda: clock[0])

    def wait_after_a_failure() -> int:
        sizes.failed(4)
        began_s = clock[0]
        while sizes.next() is None:
            clock[0] += 1
        return clock[0] - began_s

    waits = [wait_after_a_failure(), wait_after_a_failure()]
    sizes.succeeded(4)
    assert [*waits, wait_after_a_failure()] == [10, 20, 10]


def test_a_signal_that_falls_silent_is_forgotten_after_half_a_minute() -> None:
    bounds = Bounds(largest=1000)
    state = worked(bounds, 5)
    kept, gone = (
        Sizer.next_size(state, bounds, 4.0 + later_s, None)[0] for later_s in (29.9, 30.1)
    )
    assert kept.level is not None
    assert gone.level is None
