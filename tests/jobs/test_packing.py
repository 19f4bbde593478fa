"""What jobs get of a card that they share."""

from __future__ import annotations

import random

import pytest

from orchestrator.jobs.packing import WINDOWS, Pace, judged, likeness, packed_budgets
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


def test_a_pace_is_measured_from_the_first_step_beside_the_other() -> None:
    pace = Pace("b")
    for second in range(20):  # its process begins
        pace.saw(float(second), 40)
    for second in range(20, 60):
        pace.saw(float(second), 40 + 2 * (second - 19))
    assert pace.windows == pytest.approx([2.0] * WINDOWS)
    pace.saw(60.0, 30)
    assert pace.windows == [], "it was taken back"


def test_trials_accept_what_pays_and_nothing_else() -> None:
    """A thousand pairs without a gain, and a thousand with 20 %, noise of 2 % in each window."""
    drawn = random.Random(1)  # noqa: S311 - noise

    def trial(gain: float) -> bool:
        paces = [[gain / 2 * drawn.gauss(1.0, 0.02) for _ in range(WINDOWS)] for _ in range(2)]
        found = judged(paces, alone=drawn.gauss(1.0, 0.02))
        assert found is not None
        return found.pays

    assert sum(trial(1.0) for _ in range(1000)) <= 50
    assert sum(trial(1.2) for _ in range(1000)) >= 900
