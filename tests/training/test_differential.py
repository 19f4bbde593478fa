"""Drawn trainings: `ElasticStep` in parts is the plain loop, or says in one sentence that it is not.

More draws by hand: `python -m tests.training.differential --hours 1 --first-seed 1000`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.training.differential import told_of

#: Some 70 seconds on one core, in blocks so that a failure ends few of them.
_DRAWS, _BLOCK = 120, 30


@pytest.mark.parametrize("first", range(0, _DRAWS, _BLOCK))
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
