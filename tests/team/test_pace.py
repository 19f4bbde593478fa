"""The pace of a member excludes its waits, and covers steps with the same number of members."""

from __future__ import annotations

import pytest

from workers.team.pace import Pace


def steps(pace: Pace, count: int, *, wait_s: float, row_s: float = 0.1) -> None:
    """Add steps of three parts with two rows, a slower part with one row, a wait and an update."""
    now_s = 100.0 if pace._ended_s is None else pace._ended_s
    for _ in range(count):
        for rows, took_s in [(2, 2 * row_s)] * 3 + [(1, 0.15)]:
            pace.record_part(rows, updated=False, began_s=now_s + 0.02, ended_s=now_s + took_s)
            now_s += took_s
        now_s += wait_s
        pace.waited_s += wait_s
        pace.record_part(0, updated=True, began_s=now_s, ended_s=now_s + 0.2)
        now_s += 0.2


def test_waits_do_not_count() -> None:
    pace = Pace()
    steps(pace, 4, wait_s=0.5)
    assert pace.summary(32) is None, "the first steps load kernels"
    steps(pace, 9, wait_s=0.5)
    told = pace.summary(32)
    assert told is not None
    assert told.steps == 9
    assert (told.step_s, told.update_s) == (pytest.approx(1.45), pytest.approx(0.2))
    assert told.alone_s == pytest.approx(32 * 0.1 + 0.2)


def test_one_long_step_changes_nothing_and_others_are_forgotten() -> None:
    pace = Pace()
    steps(pace, 9, wait_s=0.1)
    steps(pace, 1, wait_s=90.0, row_s=5.0)
    pace.record_part(0, updated=True, began_s=1e3, ended_s=1e3 + 0.2)
    told = pace.summary(10)
    assert told is not None
    assert told.alone_s == pytest.approx(1.2)
    pace.clear()
    assert pace.summary(10) is None
