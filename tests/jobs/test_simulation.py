"""Nights of the queue on two simulated cards: everything goes wrong, and the head dies.

Each night checks itself that no job runs twice at a time and that each ends exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.jobs.journal import JOURNAL_NAME
from orchestrator.jobs.model import ENDED, JobState
from tests.jobs.nights import DyingNight, Night, in_memory


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder in memory: thousands of syncs would test the disk."""
    with in_memory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    return Night(0, 120, tmp_path_factory.mktemp("night")).play()


def test_all_that_can_go_wrong_goes_wrong(night: Night) -> None:
    states = {each.state for each in night.queue.standings.values()}
    words = b"".join(night.lines).decode()

    assert states <= ENDED
    assert states >= {JobState.DONE, JobState.FAILED, JobState.STOPPED, JobState.SKIPPED}
    for happened in (
        '"cause":"out of memory"',
        '"cause":"killed"',
        '"to":"PAUSED"',
        '"to":"HELD"',
        '"to":"CANCELLED"',
        '"to":"PARKED"',
        "its smallest step fits in",
        '"kind":"QueueHeld"',
    ):
        assert happened in words, happened


def test_a_head_that_dies_at_every_line_decides_the_same(folder: Path) -> None:
    calm = Night(3, 40, folder / "calm").play()
    dying = DyingNight(3, 40, folder / "dying", lambda _: True).play()

    assert dying.deaths >= len(calm.lines)
    assert (folder / "dying" / JOURNAL_NAME).read_bytes() == (
        folder / "calm" / JOURNAL_NAME
    ).read_bytes()


@pytest.mark.parametrize(("seed", "jobs", "happens"), [(4, 60, "Reached"), (13, 120, "Packed")])
def test_a_head_that_dies_now_and_then_decides_the_same(
    folder: Path, seed: int, jobs: int, happens: str
) -> None:
    calm = Night(seed, jobs, folder / "calm").play()
    assert f'"kind":"{happens}"' in b"".join(calm.lines).decode()
    DyingNight(seed, jobs, folder / "dying", lambda line: line % 37 == seed).play()

    assert (folder / "dying" / JOURNAL_NAME).read_bytes() == (
        folder / "calm" / JOURNAL_NAME
    ).read_bytes()
