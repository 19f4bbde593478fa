"""The ladder of micro-batch, recomputed blocks and states on the host, ordered by a rule, then by measured speeds."""

from __future__ import annotations

import itertools
import random

import pytest

from workers.training.ladder import MemoryLadder, Point, Speeds, offered_shares, points_of
from workers.training.settings import TrainSettings

BATCH, LEVELS, STATES = 16, 4, 400.0
AUTO = TrainSettings(batch=BATCH, states_on_host="auto")
POINTS = points_of(AUTO, [1, 2, 4, 8, 16], LEVELS, [0, 25, 50, 75, 100])


def planned_bytes(point: Point) -> float:
    """Return KiB of a made-up training."""
    blocks = 1 - 0.8 * point.level / LEVELS
    return 1024 * (STATES * (1 - point.share_pct / 100) + point.micro * (10 + 60 * blocks))


def seconds_with(part: float, again: float, host: float, best_s: float = 0.2):  # noqa: ANN201 - a function
    """Return how fast a made-up machine is."""

    def seconds(point: Point) -> float:
        return best_s * (
            1 + part / point.micro + again * point.level / LEVELS + host * point.share_pct / 100
        )

    return seconds


def walked(ladder: MemoryLadder, machine, points: list[Point], batches: int = 4) -> list[dict]:  # noqa: ANN001
    """Train for some batches at each point; return the moves that were told."""
    told = []
    for point, _ in itertools.product(points, range(batches)):
        parts = BATCH // point.micro
        for part in range(parts):
            events = ladder.note(
                point,
                machine(point) * point.micro,
                round(planned_bytes(point)),
                updated=part == parts - 1,
            )
            told += [figures for name, figures in events if name == "memory_moved"]
    return told


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


def test_a_few_measured_points_tell_of_all_others() -> None:
    drawn = random.Random(1)  # noqa: S311 - repeatable
    machine = seconds_with(part=0.5, again=0.2, host=0.05)
    visited = [Point(16), Point(4), Point(4, LEVELS), Point(8, 2, 50), Point(2, 0, 100)]
    speeds = Speeds(
        BATCH, LEVELS, {point: machine(point) * drawn.gauss(1, 0.01) for point in visited}
    )
    for point in POINTS:
        assert speeds.seconds(point) == pytest.approx(machine(point), rel=0.1), point


def test_a_disturbed_machine_keeps_its_largest_steps() -> None:
    ladder = MemoryLadder(POINTS, LEVELS, BATCH, planned_bytes)
    walked(ladder, lambda point: 0.2 + 0.1 * point.micro - 0.001 * point.share_pct, on(ladder)[::4])
    ladder.reordered()
    assert on(ladder)[-1] == Point(16, 0, 0)


def test_a_fast_host_comes_first_in_the_ladder() -> None:
    ladder = MemoryLadder(POINTS, LEVELS, BATCH, planned_bytes)
    machine = seconds_with(part=0.16, again=0.9, host=0.01)
    first = on(ladder)
    assert ladder.reordered() is None
    walked(ladder, machine, first[::3])
    assert ladder.reordered() is not None
    assert ladder.reordered() is None, "told once"

    def lost_s(chosen: list[Point]) -> float:
        """Return the seconds that a sample takes too long, summed over all amounts of memory."""
        amounts = [
            planned_bytes(each)
            for each in POINTS
            if planned_bytes(each) >= planned_bytes(chosen[0])
        ]
        best = [
            min(machine(each) for each in POINTS if planned_bytes(each) <= room) for room in amounts
        ]
        taken = [[each for each in chosen if planned_bytes(each) <= room][-1] for room in amounts]
        return sum(machine(each) - fastest for each, fastest in zip(taken, best, strict=True))

    assert lost_s(on(ladder)) < 0.1 * lost_s(first)


def test_a_move_is_told_with_its_bytes_and_its_time() -> None:
    ladder = MemoryLadder(POINTS, LEVELS, BATCH, planned_bytes)
    machine = seconds_with(part=0, again=0, host=0.5)
    (moved,) = walked(ladder, machine, [Point(16), Point(8, 0, 100)])
    assert moved["bought_bytes"] == planned_bytes(Point(16)) - planned_bytes(Point(8, 0, 100))
    assert moved["time_cost_pct"] == pytest.approx(50)
    assert (moved["from_micro_batch"], moved["from_states_on_host_pct"]) == (16, 0)
    assert (moved["micro_batch"], moved["states_on_host_pct"]) == (8, 100)
    (back,) = walked(ladder, machine, [Point(4), Point(16)], batches=1) or [{}]
    assert back == {}, "what did not last for a whole batch is told with the next one that does"
    (back,) = walked(ladder, machine, [Point(16)], batches=1)
    assert (back["bought_bytes"], back["time_cost_pct"]) == (
        -moved["bought_bytes"],
        pytest.approx(-100 / 3, abs=0.01),
    )


def test_states_go_to_a_host_that_has_room_for_them() -> None:
    assert offered_shares(AUTO, 100, 1000) == [0, 25, 50, 75, 100]
    assert offered_shares(AUTO, 100, 100) == [0, 25, 50]
    assert offered_shares(AUTO, 100, 0) == [0]
    assert offered_shares(TrainSettings(states_on_host=30), 100, 0) == [30]
