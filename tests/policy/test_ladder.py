"""The ladder: one row of steps with growing memory, whichever of the two numbers moves it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.policy.test_adaptive import Said
from tests.scene import GUIDES
from workers.policy.adaptive import TILE, Ladder, ladders_of
from workers.policy.base import Run, Stages
from workers.settings import MemorySettings, WorkloadSpec

ASKED = WorkloadSpec(name="mine:Mlp", dtype="fp16", size=4096, batch=128, seed=0)


def three_squares(size: int, batch: int) -> int:
    """Return what matmul needs: two operands and a result in half precision."""
    return 3 * 2 * (size // TILE * TILE) ** 2


def stepping(size_power: float = 2.0, batch_power: float = 1.0, **said: Any) -> Said:
    return Said(size_power=size_power, batch_power=batch_power, **said)


def ladder_of(memory: MemorySettings, asked: WorkloadSpec, said: Said) -> Ladder:
    (ladder,) = ladders_of(memory, asked, said)
    return ladder


def runs_of(ladder: Ladder) -> list[Run]:
    return [ladder.run(units) for units in ladder.units]


class TestStepping:
    def test_on_the_way_down_the_batch_gives_way_before_the_size(self) -> None:
        runs = list(reversed(runs_of(ladder_of(GUIDES, ASKED, stepping()))))
        smallest_batch = next(
            index for index, run in enumerate(runs) if run.batch == GUIDES.batch_floor
        )
        assert all(run.size == ASKED.size for run in runs[: smallest_batch + 1])
        assert all(run.batch == GUIDES.batch_floor for run in runs[smallest_batch:])
        assert (runs[-1], runs[0]) == (Run(size=256, batch=32), Run(size=4096, batch=128))

    def test_a_number_that_does_not_move_memory_is_never_changed(self) -> None:
        only_batch = runs_of(ladder_of(GUIDES, ASKED, stepping(size_power=0.0)))
        assert {run.size for run in only_batch} == {4096}
        assert [run.batch for run in only_batch] == list(range(32, 129))
        only_size = runs_of(ladder_of(GUIDES, ASKED, stepping(batch_power=0.0)))
        assert {run.batch for run in only_size} == {128}
        assert [run.size for run in only_size] == list(range(256, 4097, TILE))

    def test_sizes_between_the_ends_are_whole_tiles(self) -> None:
        asked = replace(ASKED, size=1000)
        sizes = [run.size for run in runs_of(ladder_of(GUIDES, asked, stepping(batch_power=0.0)))]
        assert sizes[-1] == 1000
        assert all(size % TILE == 0 for size in sizes[:-1])


class TestStages:
    def test_each_level_has_all_batches(self) -> None:
        said = stepping(offers=Stages(batches=(1, 3, 8), keeps=(1.0, 1.0)))
        for level, ladder in enumerate(ladders_of(GUIDES, ASKED, said)):
            assert ladder.units == (1, 3, 8)
            runs = runs_of(ladder)
            assert [(run.size, run.batch, run.level) for run in runs] == [
                (ASKED.size, batch, level) for batch in ladder.units
            ]
            assert [run.is_largest for run in runs] == [False, False, level == 0]

    @pytest.mark.parametrize("batches", [(), (0, 1), (2, 1), (1, 1)])
    def test_batches_that_do_not_ascend_are_refused(self, batches: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"mine:Mlp.*must ascend from 1"):
            ladders_of(GUIDES, ASKED, stepping(offers=Stages(batches=batches)))


class TestWithin:
    @given(limit_bytes=st.integers(0, 1 << 30))
    @example(limit_bytes=three_squares(256, 32) - 1)
    @example(limit_bytes=three_squares(256, 32))
    def test_it_is_the_highest_rung_that_is_said_to_fit(self, limit_bytes: int) -> None:
        ladder = ladder_of(GUIDES, ASKED, stepping(says=three_squares))
        fitting = [
            units
            for units in ladder.units
            if three_squares(ladder.run(units).size, 0) <= limit_bytes
        ]
        within = ladder.within(limit_bytes, ladder.units[-1])
        assert within == (fitting[-1] if fitting else None)


powers = st.one_of(st.just(0.0), st.floats(0.5, 3.0))


@given(
    size=st.integers(1, 70_000),
    batch=st.integers(1, 10_000),
    size_floor=st.integers(1, 1000),
    batch_floor=st.integers(1, 1000),
    size_power=powers,
    batch_power=powers,
)
def test_whatever_is_asked_for(
    size: int, batch: int, size_floor: int, batch_floor: int, size_power: float, batch_power: float
) -> None:
    memory = replace(GUIDES, size_floor=size_floor, batch_floor=batch_floor)
    asked = replace(ASKED, size=size, batch=batch)
    ladder = ladder_of(memory, asked, stepping(size_power, batch_power))
    runs = runs_of(ladder)
    assert list(ladder.units) == sorted(set(ladder.units))
    assert ladder.units[0] >= 1
    assert runs[-1] == Run(size=size, batch=batch)
    for run, larger in pairwise(runs):
        assert run.size <= larger.size
        assert run.batch <= larger.batch
    assert all(min(size_floor, size) <= run.size <= size for run in runs)
    assert all(min(batch_floor, batch) <= run.batch <= batch for run in runs)
