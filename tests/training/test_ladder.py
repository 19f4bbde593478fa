"""The ladder of micro-batch, recomputed blocks and states on the host: the fastest for each amount of memory."""

from __future__ import annotations

from workers.training.ladder import MemoryLadder, Point, Speeds, offered_shares, points_of
from workers.training.settings import TrainSettings

BATCH, LEVELS, STATES = 16, 4, 400.0
AUTO = TrainSettings(batch=BATCH, states_on_host="auto")
POINTS = points_of(AUTO, [1, 2, 4, 8, 16], LEVELS, [0, 25, 50, 75, 100])


def planned_bytes(point: Point) -> float:
    """Return KiB of a made-up training."""
    blocks = 1 - 0.8 * point.level / LEVELS
    return 1024 * (STATES * (1 - point.share_pct / 100) + point.micro * (10 + 60 * blocks))


def on(ladder: MemoryLadder) -> list[Point]:
    return [Point.of(rung.batch, rung.level) for rung in ladder.rungs]


def test_each_rung_is_the_fastest_for_its_memory() -> None:
    ladder = MemoryLadder(POINTS, LEVELS, BATCH, planned_bytes)
    rule = Speeds(BATCH, LEVELS)
    chosen = on(ladder)
    for place, point in enumerate(chosen):
        cheaper = [each for each in POINTS if planned_bytes(each) <= planned_bytes(point)]
        assert rule.seconds(point) == min(map(rule.seconds, cheaper)), place
    assert chosen[0] == Point(1, LEVELS, 100)
    assert chosen[-1] == Point(16, 0, 0)
    assert {
        len({getattr(each, name) for each in chosen}) > 1
        for name in ("micro", "level", "share_pct")
    } == {True}


def test_states_go_to_a_host_that_has_room_for_them() -> None:
    assert offered_shares(AUTO, 100, 1000) == [0, 25, 50, 75, 100]
    assert offered_shares(AUTO, 100, 100) == [0, 25, 50]
    assert offered_shares(AUTO, 100, 0) == [0]
    assert offered_shares(TrainSettings(states_on_host=30), 100, 0) == [30]
