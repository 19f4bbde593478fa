"""What jobs get of a card that they share."""

from __future__ import annotations

from orchestrator.jobs.packing import packed_budgets
from workers.units import GIB


def test_packed_jobs_get_what_was_measured_and_a_reserve() -> None:
    assert packed_budgets([4 * GIB, GIB], 6 * GIB) == (4 * GIB + 429496730, GIB + GIB // 4)


def test_no_budgets_beyond_the_room_or_without_measure() -> None:
    assert packed_budgets([4 * GIB, GIB], 5 * GIB) is None
    assert packed_budgets([4 * GIB, None], 23 * GIB) is None
