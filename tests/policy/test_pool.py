"""Workers on one simulated card: with leases they share it, at rest and in full; without, they do not."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from benches import pool
from benches.pool_card import SCENES, Habits, Scene, scenes

pytestmark = pytest.mark.slow


#: None of them was looked at while the constants of the leases were chosen.
SEEDS = (2001, 2002, 2003)
MINUTES = 6.0

HABITS = {
    "as shipped": Habits(),
    "gives back": Habits(keeps_pool=False),
    "looks once a slice": Habits(looks_every_step=False),
}


def scene_of(name: str, seed: int, workers: int = 4) -> Scene:
    return next(scene for scene in scenes(seed, workers, 60 * MINUTES) if scene.name == name)


def played(
    name: str, seed: int, *, workers: int = 4, leasing: bool = True, habits: str = "as shipped"
) -> dict[str, float]:
    scene = scene_of(name, seed, workers)
    return pool.Play(scene, seed=seed, workers=workers, habits=HABITS[habits], leasing=leasing).run()


@pytest.mark.parametrize("habits", HABITS)
@pytest.mark.parametrize("name", SCENES)
def test_four_workers_share_a_card_fairly_at_rest_and_in_full(name: str, habits: str) -> None:
    # Who looks but once a second fails more often, and is careful for a while each time.
    fair = 0.95 if HABITS[habits].looks_every_step else 0.9
    found = played(name, SEEDS[list(HABITS).index(habits)], habits=habits)
    assert found["jain_bytes"] >= fair
    assert found["jain_work"] >= fair
    assert found["used"] >= 0.92
    assert found["quiet_changes_per_minute"] <= 6.0
    assert found["failures_per_minute"] <= 6.0, "of all four together"
    assert found["quiet_minutes"] > 1.0, "or nothing was judged"


@pytest.mark.parametrize("workers", [2, 7])
@pytest.mark.parametrize("name", ["crowded", "game", "restart"])
def test_so_do_fewer_and_more(name: str, workers: int) -> None:
    found = played(name, SEEDS[0], workers=workers)
    assert found["jain_bytes"] >= 0.95
    assert found["used"] >= 0.92
    assert found["quiet_changes_per_minute"] <= 6.0


def test_without_leases_those_who_come_first_keep_what_they_have() -> None:
    fair = [played("crowded", seed)["jain_bytes"] for seed in SEEDS]
    unfair = [played("crowded", seed, leasing=False)["jain_bytes"] for seed in SEEDS]
    assert min(fair) > 0.99
    assert min(unfair) < 0.9


def test_without_leases_a_neighbours_noise_never_lets_them_rest() -> None:
    key = "quiet_changes_per_minute"
    for habits in ("as shipped", "gives back"):
        at_rest = [played("neighbour", seed, habits=habits)[key] for seed in SEEDS]
        restless = [played("neighbour", seed, habits=habits, leasing=False)[key] for seed in SEEDS]
        assert max(at_rest) < 3.0
        assert statistics.fmean(restless) > 10.0


def test_where_the_budgets_fit_leases_change_nothing() -> None:
    for seed in SEEDS:
        play = pool.Play(scene_of("constant", seed), seed=seed, workers=4, habits=Habits(), leasing=True)
        with_leases, without = play.run(), played("constant", seed, leasing=False)
        assert all(set(worker.leases) == {worker.cap_bytes} for worker in play.workers)
        assert with_leases["used"] == pytest.approx(without["used"], abs=0.002)
        assert with_leases["work"] == pytest.approx(without["work"], abs=0.002)


def test_a_game_that_comes_back_gets_its_memory_within_seconds() -> None:
    # It comes once while the workers hold the card, in six minutes.
    assert max(played("game", seed)["tenants_waited_s_per_minute"] * MINUTES for seed in SEEDS) < 30.0


@pytest.mark.parametrize("leasing", [True, False])
@pytest.mark.parametrize("name", SCENES)
def test_nobody_takes_what_is_not_there(name: str, leasing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    sample = pool.Play._sample

    def watched(play: pool.Play) -> None:
        looks.append(play.card.free_bytes)
        sample(play)

    monkeypatch.setattr(pool.Play, "_sample", watched)
    played(name, SEEDS[0], leasing=leasing)
    assert len(looks) > 4 * 60
    assert min(looks) >= 0


def test_the_same_seed_is_the_same_play() -> None:
    assert played("visits", SEEDS[0]) == played("visits", SEEDS[0])
    assert played("visits", SEEDS[0]) != played("visits", SEEDS[1])


def test_a_run_judges_its_rows() -> None:
    result = pool.run(SEEDS[0], minutes=1.5).figures
    rows: list[dict[str, Any]] = result["pool"]
    assert {(row["scene"], row["memory"], row["leases"]) for row in rows} == {
        (name, memory, leases) for name in SCENES for memory in ("kept", "given back") for leases in ("yes", "no")
    }
    targets = {target["target"]: target for target in result["pool_targets"]}
    with_leases = [row for row in rows if row["leases"] == "yes"]
    assert float(targets["used"]["found"]) == pytest.approx(min(row["used"] for row in with_leases), rel=1e-3)
    assert targets["used"]["asked"] == ">= 0.92"
    assert set(targets) == {"jain_bytes", "jain_work", "used", "quiet_changes_per_minute"}
    assert {target["met"] for target in targets.values()} <= {"yes", "NO"}


@pytest.mark.parametrize(
    ("values", "index"), [([1.0, 1.0, 1.0, 1.0], 1.0), ([4.0, 0.0, 0.0, 0.0], 0.25), ([0.0, 0.0], 1.0), ([1, 3], 0.8)]
)
def test_jain(values: list[float], index: float) -> None:
    assert pool.jain(values) == pytest.approx(index)
