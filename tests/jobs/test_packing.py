"""What jobs get of a card that they share."""

from __future__ import annotations

import pytest

from orchestrator.jobs.packing import likeness, packed_budgets
from tests.jobs.scene import training
from workers.units import GIB


def test_packed_jobs_get_what_was_measured_and_a_reserve() -> None:
    assert packed_budgets([4 * GIB, GIB], 6 * GIB) == (4 * GIB + 429496730, GIB + GIB // 4)


def test_no_budgets_beyond_the_room_or_without_measure() -> None:
    assert packed_budgets([4 * GIB, GIB], 5 * GIB) is None
    assert packed_budgets([4 * GIB, None], 23 * GIB) is None


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"train.lr": 3e-4, "train.batch": 16}, True),
        ({"train.lr": 1e-4, "train.batch": 32}, False),
        ({"train.lr": 1e-4, "train.batch": 16, "train.preset": "gpt2-small"}, False),
    ],
)
def test_jobs_are_alike_whose_steps_cost_the_same(other: dict[str, object], same: bool) -> None:
    one = training("a", overrides={"train.lr": 1e-4, "train.batch": 16})
    assert (likeness(one) == likeness(training("b", overrides=other))) is same
