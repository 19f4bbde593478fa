"""The adaptive policy with stages: smaller batches first, then the next level, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.test_adaptive import BATCH_ONLY, Card
from tests.scene import MIB
from workers.policy.base import Run, Stages

STAGES = Stages(batches=(1, 2, 3, 4, 6, 8, 12, 16), keeps=(1.0, 1.0, 0.4))

#: The fixed memory of each level, and the memory of a sample.
FIXED_MIB, SAMPLE_MIB = (100, 100, 40), (20, 5, 5)


def takes(run: Run) -> int:
    return (FIXED_MIB[run.level] + SAMPLE_MIB[run.level] * run.batch) * MIB


class Staged(Card):
    """A card whose steps need the memory of their level."""

    def bytes_of(self, run: Run) -> int:
        return takes(run)

    def ended_well(self, run: Run) -> None:
        self.held_bytes = FIXED_MIB[run.level] * MIB
        super().ended_well(run)


def staged(allowed_mib: int, **how: Any) -> Staged:
    return Staged(replace(BATCH_ONLY, offers=STAGES), lambda *_: 0, allowed_mib * MIB, **how)


@pytest.mark.parametrize(
    ("allowed_mib", "level", "batch"), [(130, 0, 1), (112, 1, 2), (75, 2, 6), (48, 2, 1)]
)
def test_it_ends_at_the_first_level_that_fits(allowed_mib: int, level: int, batch: int) -> None:
    one = staged(allowed_mib)
    for _ in range(60):
        one.slice(4)
    assert one.last.level == level
    assert batch - 1 <= one.last.batch <= batch
    assert len(one.failed) <= 3 * level + 6, "and a larger one is tried now and then"
    levels = {run.level for run in one.good}
    assert level or levels == {0}, "smaller batches come before the next level"
    assert (one.policy.learned is None) == (level > 0), "no level that saves memory is remembered"


def test_it_goes_down_and_up_again_as_memory_goes_and_comes() -> None:
    one = staged(500)
    for allowed_mib, level in [(500, 0), (112, 1), (48, 2), (500, 0)]:
        one.allowed_bytes = allowed_mib * MIB
        for _ in range(30):
            one.slice(4)
        assert one.last.level == level, allowed_mib
    assert one.last.batch == 16
    assert len(one.failed) <= 6


def test_a_moment_without_memory_is_soon_forgotten() -> None:
    one = staged(130, shows_bytes=lambda _: 135 * MIB)
    one.slice(20)
    assert one.last.level == 0
    one.allowed_bytes = 110 * MIB  # which the signal does not show
    while one.last.level == 0:
        one.slice()
    one.allowed_bytes = 135 * MIB
    for _ in range(60):
        one.slice(4)
    assert one.last.level == 0


def test_where_no_level_fits_it_says_which_step_is_the_smallest() -> None:
    one = staged(300)
    one.slice(20)
    one.allowed_bytes = 20 * MIB
    while one.slice() is not None:
        pass
    assert "level 2" in one.policy.reason


@settings(max_examples=30)
@given(rooms=st.lists(st.integers(30, 500), min_size=1, max_size=12))
def test_whatever_comes_there_are_few_failures_and_the_state_survives(rooms: list[int]) -> None:
    one = staged(0)
    for allowed_mib in rooms:
        one.allowed_bytes = allowed_mib * MIB
        for _ in range(20):
            one.slice(2)
        if allowed_mib >= 60:
            assert one.log
            assert one.good
            assert takes(one.last) <= one.allowed_bytes
    state, fresh = one.policy.state, one.fresh()
    fresh.resume(state)
    assert fresh.state == state
    times_s = [at_s for at_s, _ in one.failed]
    for at_s in times_s:
        assert sum(at_s <= other < at_s + 60 for other in times_s) <= 3 * 6
