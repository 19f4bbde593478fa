"""Random trainings: `ElasticStep` in parts equals the plain loop, or refuses in one sentence.

`DRAWS=10000` sets the number of draws, and `FIRST_SEED=1000` chooses others.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.training.differential import drawn, told_of

#: About 70 s on one core, in blocks, so that a failure ends only the draws of its block.
_DRAWS, _BLOCK = 120, 30
_FIRST = int(os.environ.get("FIRST_SEED", "0"))
_END = _FIRST + int(os.environ.get("DRAWS", _DRAWS))


@pytest.mark.parametrize("first", range(_FIRST, _END, _BLOCK))
def test_a_drawn_training_is_equal_or_refused(first: int) -> None:
    outcomes: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + _BLOCK):
        result, description = told_of(seed)
        outcomes[result.outcome] += 1
        if not result.fine:
            failures.append(description)
    assert not failures, "\n".join(failures)
    assert outcomes["equal"] >= _BLOCK // 2, outcomes


@pytest.mark.parametrize(
    "name", ["outside", "changing", "added-group", "joint", "heads-by-step", "clamping-hook"]
)
def test_cases_of_users_are_drawn(name: str) -> None:
    """These are the cases without a separate test in `test_field_cases.py`."""
    seeds = [seed for seed in range(_DRAWS) if name in {each.name for each in drawn(seed)}]
    assert len(seeds) >= 3
