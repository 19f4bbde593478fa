"""Drawn trainings: `ElasticStep` in parts is the plain loop, or says in one sentence that it is not.

`DRAWS=10000` has so many draws, and `FIRST_SEED=1000` others.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.training.differential import drawn, told_of

#: Some 70 seconds on one core, in blocks so that a failure ends few of them.
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
    """Those that have no test of their own in `test_field_cases.py`."""
    seeds = [seed for seed in range(_DRAWS) if name in {each.name for each in drawn(seed)}]
    assert len(seeds) >= 3
