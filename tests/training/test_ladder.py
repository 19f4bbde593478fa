"""The fixed ladder of a training, and what is told of moves on it."""

from __future__ import annotations

import pytest

from workers.training.ladder import Level, Moves, levels_of
from workers.training.settings import TrainSettings


@pytest.mark.parametrize(
    ("keys", "levels"),
    [
        ({}, [Level(), Level(recomputes=True)]),
        ({"recompute": "none"}, [Level()]),
        (
            {"states_on_host": "auto"},
            [
                Level(),
                Level(recomputes=True),
                Level(recomputes=True, states_on_host_pct=100),
            ],
        ),
        (
            {"states_on_host": "auto", "recompute": "all"},
            [Level(), Level(states_on_host_pct=100)],
        ),
    ],
)
def test_what_the_settings_fix_is_on_no_level(keys: dict[str, object], levels: list[Level]) -> None:
    assert levels_of(TrainSettings.model_validate(keys)) == levels


def told(moves: Moves, seconds: float, peak_bytes: int, parts: int = 2) -> list[dict[str, object]]:
    """Compute a batch in so many parts, and return what is told."""
    return [
        figures
        for part in range(parts)
        for _, figures in moves.note(seconds, peak_bytes, is_whole=part == parts - 1)
    ]


def test_a_move_is_told_when_it_has_lasted_for_a_whole_batch() -> None:
    moves = Moves()
    moves.at(8, 0, 0)
    assert [told(moves, 1.0, 1000) for _ in range(3)] == [[]] * 3
    moves.at(4, 6, 0)
    told(moves, 9.0, 10)  # the first batch there was begun elsewhere, or has compiled
    moves.at(2, 6, 0)
    assert told(moves, 1.0, 300) == [], "the place between did not last"
    (figures,) = told(moves, 1.5, 400)
    assert figures == {
        "micro_batch": 2,
        "memory_level": 6,
        "states_on_host_pct": 0,
        "from_micro_batch": 8,
        "from_memory_level": 0,
        "from_states_on_host_pct": 0,
        "bought_bytes": 600,
        "time_cost_pct": 50.0,
    }
    assert told(moves, 1.5, 400) == []
