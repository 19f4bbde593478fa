"""The ladder: one row of steps with growing memory, whichever of the two numbers moves it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policy.test_adaptive import Said
from tests.scene import GUIDES
from workers.policy.adaptive import TILE, Ladder, ladders_of
from workers.policy.base import Run, Stages
from workers.settings import MemorySettings, WorkloadSpec

ASKED = WorkloadSpec(name="mine:Mlp", dtype="fp16", size=4096, batch=128, seed=0)


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


class TestStages:
    @pytest.mark.parametrize("batches", [(), (0, 1), (2, 1), (1, 1)])
    def test_batches_that_do_not_ascend_are_refused(self, batches: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"mine:Mlp.*must ascend from 1"):
            ladders_of(GUIDES, ASKED, stepping(offers=Stages(batches=batches)))
