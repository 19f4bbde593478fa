"""The sums of counters, and the steps that a training did again."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from orchestrator.core.training import NO_TRAINING, follow
from tests.factories import status_of
from workers.messages import Progress, StepCounts


@pytest.mark.parametrize("name", StepCounts.__slots__)
def test_each_counter_is_added_to_its_own_sum_and_to_no_other(name: str) -> None:
    before = StepCounts(**{field.name: index for index, field in enumerate(fields(StepCounts))})
    more = StepCounts(**{name: 100})
    expected = replace(before, **{name: getattr(before, name) + 100})
    assert before + more == more + before == StepCounts.total((before, more)) == expected


def redone(*reports: tuple[int, int | None, int | None, int | None]) -> int | None:
    """Follow statuses of an incarnation, its step, its saved step, and the steps that it says it did again."""
    training = NO_TRAINING
    for incarnation, step, saved, own in reports:
        told = (
            None if step is None else Progress(train_step=step, saved_step=saved, redone_steps=own)
        )
        training = follow(training, status_of("pc1/0", incarnation, progress=told))
    return training.progress.redone_steps


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([(0, 1, None, None), (0, 30, 20, None)], 0),
        ([(0, 30, 20, None), (1, 20, 20, None), (1, 40, 40, None)], 10),
        ([(0, 30, 20, None), (1, 23, 20, None)], 10),  # its first report came after three steps
        ([(0, 30, None, None), (1, 1, None, None)], 29),
        ([(0, 30, 20, None), (1, 20, 20, None), (2, 20, 20, None), (3, 35, 30, None)], 10),
        (
            [(0, 30, 20, None), (1, None, None, None), (2, 20, 20, None)],
            10,
        ),  # one that never told anything
        (
            [(0, 30, 20, 4), (0, 40, 20, 7), (1, 20, 20, 0), (1, 50, 20, 2)],
            29,
        ),  # each counts its own from 0
        ([(0, 30, 30, None), (1, 45, 30, None)], 0),
        ([(0, None, None, None)], None),
    ],
)
def test_steps_done_again(
    reports: list[tuple[int, int | None, int | None, int | None]], expected: int | None
) -> None:
    assert redone(*reports) == expected
