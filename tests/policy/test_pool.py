"""Workers on one simulated card: with leases they share it, at rest and in full.

Without, they do not.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from benches import pool
from benches.pool_card import SCENES, scenes

pytestmark = pytest.mark.slow


#: None of them was looked at while the constants of the leases were chosen.
SEEDS = (2001, 2002, 2003)
MINUTES = 6.0

HABITS: dict[str, dict[str, bool]] = {
    "as shipped": {},
    "gives back": {"keeps_pool": False},
    "looks once a slice": {"looks_every_step": False},
}


class Watched(pool.Play):
    """Notes how little was free."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen_bytes: list[int] = []

    def _sample(self) -> None:
        self.seen_bytes.append(self.card.free_bytes)
        super()._sample()


@cache
def played(
    name: str, seed: int, *, workers: int = 4, leasing: bool = True, habits: str = "as shipped"
) -> tuple[Watched, dict[str, float]]:
    """Play a scene once for all tests; nothing that is not there may be taken in any of them."""
    scene = next(scene for scene in scenes(seed, workers, 60 * MINUTES) if scene.name == name)
    play = Watched(scene, seed=seed, workers=workers, leasing=leasing, **HABITS[habits])
    figures = play.run()
    assert len(play.seen_bytes) > 4 * 60
    assert min(play.seen_bytes) >= 0
    return play, figures


#: All scenes with four workers as shipped, and those in which other habits or numbers matter most.
COURSES = [
    *((name, "as shipped", 4) for name in SCENES),
    *(
        (name, habits, 4)
        for name in ("crowded", "neighbour", "visits")
        for habits in ("gives back", "looks once a slice")
    ),
    *((name, "as shipped", workers) for name in ("crowded", "restart") for workers in (2, 7)),
]


@pytest.mark.parametrize(("name", "habits", "workers"), COURSES)
def test_workers_share_a_card_fairly_at_rest_and_in_full(
    name: str, habits: str, workers: int
) -> None:
    # A worker that samples only once a second fails more often, and is careful for a while each
    # time.
    fair = 0.95 if HABITS[habits].get("looks_every_step", True) else 0.9
    _, found = played(name, SEEDS[list(HABITS).index(habits)], workers=workers, habits=habits)
    assert found["jain_bytes"] >= fair
    assert found["jain_work"] >= fair
    assert found["used"] >= 0.92
    assert found["quiet_changes_per_minute"] <= 6.0
    assert found["failures_per_minute"] <= 6.0, "of all workers together"
    assert found["quiet_minutes"] > 1.0, "or nothing was judged"


def test_without_leases_the_scenes_are_unfair_and_never_at_rest() -> None:
    """Otherwise they would be too easy to prove anything."""
    assert min(played("crowded", seed, leasing=False)[1]["jain_bytes"] for seed in SEEDS) < 0.9
    assert played("neighbour", SEEDS[0], leasing=False)[1]["quiet_changes_per_minute"] > 10.0


def test_a_game_that_comes_back_gets_its_memory_within_seconds() -> None:
    # It comes once while the workers hold the card, in six minutes.
    waited = [played("game", seed)[1]["tenants_waited_s_per_minute"] * MINUTES for seed in SEEDS]
    assert max(waited) < 30.0


def test_the_same_seed_is_the_same_play() -> None:
    assert played.__wrapped__("crowded", SEEDS[0])[1] == played("crowded", SEEDS[0])[1]
    assert played("crowded", SEEDS[0])[1] != played("crowded", SEEDS[1])[1]


def test_a_run_judges_its_rows() -> None:
    result = pool.run(SEEDS[0], minutes=0.5).figures
    rows: list[dict[str, Any]] = result["pool"]
    assert {(row["scene"], row["memory"], row["leases"]) for row in rows} == {
        (name, memory, leases)
        for name in SCENES
        for memory in ("kept", "given back")
        for leases in ("yes", "no")
    }
    targets = {target["target"]: target for target in result["pool_targets"]}
    with_leases = [row for row in rows if row["leases"] == "yes"]
    assert float(targets["used"]["found"]) == pytest.approx(
        min(row["used"] for row in with_leases), rel=1e-3
    )
    assert targets["used"]["asked"] == ">= 0.92"
    assert set(targets) == {"jain_bytes", "jain_work", "used", "quiet_changes_per_minute"}
    assert {target["met"] for target in targets.values()} <= {"yes", "NO"}


@pytest.mark.parametrize(
    ("values", "index"),
    [([1.0, 1.0, 1.0, 1.0], 1.0), ([4.0, 0.0, 0.0, 0.0], 0.25), ([0.0, 0.0], 1.0), ([1, 3], 0.8)],
)
def test_jain(values: list[float], index: float) -> None:
    assert pool.jain(values) == pytest.approx(index)
