"""The fixed ladder of a training."""

from __future__ import annotations

import pytest

from workers.training.ladder import Level, levels_of
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
