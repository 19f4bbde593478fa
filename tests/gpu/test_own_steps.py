"""Users' own steps with any use of memory, on a card, as in `tests/engine/test_own_steps.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import own_steps
from tests.engine.scene import failures, own, turns
from tests.gpu.scene import ON_A_CARD, spec_of
from workers.messages import Verdict, WorkerState
from workers.settings import WorkerSpec

pytestmark = ON_A_CARD


def spec(workload: type) -> WorkerSpec:
    """Return the spec of a worker whose size is far too large."""
    return spec_of(
        name=own(workload), policy="adaptive", size=262_144, batch=1, batch_floor=1, size_floor=64
    )


@pytest.mark.parametrize("workload", [own_steps.Squares, own_steps.Deep, own_steps.KeepsError])
def test_the_size_is_found_with_three_failures(
    in_child: Callable[..., Any], workload: type
) -> None:
    statuses = in_child(turns, spec(workload), [{}] * 40)
    assert failures(statuses) <= 3
    assert failures(statuses[10:]) == 0
    assert [status.state for status in statuses[10:]] == [WorkerState.RUNNING] * 30
    assert statuses[-1].memory.peak_bytes >= 0.95 * statuses[-1].device.cap_bytes


def test_a_constructor_larger_than_the_cap_is_refused(in_child: Callable[..., Any]) -> None:
    (status, *_), _, obtained = in_child(own_steps.greedy, spec(own_steps.Greedy), "__init__")
    assert (status.verdict, obtained) == (Verdict.INCOMPATIBLE, [])
    assert "the constructor of workload" in status.reason
