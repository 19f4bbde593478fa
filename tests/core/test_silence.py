"""A silent process hangs only if it is idle, or computes for much longer than its steps took."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.silence import why_hung
from orchestrator.core.slot import Moment, Slot
from tests.factories import RULES, status_of
from workers.messages import Quiet

seconds = st.floats(0, 1e6)


def hung(
    seconds: float, *, is_up: bool = True, longest_step_s: float | None = 2.0, **seen: Any
) -> str | None:
    """Judge a silent process with steps of 2 s and a patience of 60 s."""
    run = RULES.model_copy(update={"hang_timeout_s": 60.0, "start_timeout_s": 60.0})
    quiet = Quiet(**{"seconds": seconds, "idle_s": seconds, **seen})
    status = status_of("pc1/0") if is_up else None
    slot = Slot(slot="pc1/0", runs=True, status=status, quiet=quiet, longest_step_s=longest_step_s)
    return why_hung(slot, Moment(now_s=0.0, run=run, ends_at_s=None))


@given(quiet_s=seconds, computed_s=seconds)
def test_within_its_patience_a_process_is_not_hung(quiet_s: float, computed_s: float) -> None:
    assert hung(min(quiet_s, 60.0), computed_s=computed_s) is None


def test_a_process_that_does_nothing_hangs() -> None:
    assert hung(61) == (
        "no report for 61 s, and its process used no CPU and no card; its process was ended"
    )
    assert hung(61, is_up=False, stands_at="io.py:3") == (
        "its process did not come up for 61 s, and its process used no CPU and no card, at io.py:3; "
        "its process was ended"
    )
    assert hung(1000, idle_s=59) is None


@pytest.mark.parametrize(
    ("longest_step_s", "may_compute_s"),
    [(None, 600.0), (0.1, 60.0), (2.0, 60.0), (30.0, 300.0)],
    ids=["no step yet", "short steps", "steps of 2 s", "long steps"],
)
def test_a_step_ten_times_as_long_is_not_a_hang(
    longest_step_s: float | None, may_compute_s: float
) -> None:
    for computed_s, hangs in ((may_compute_s, False), (may_compute_s + 1, True)):
        why = hung(1e4, idle_s=1.0, computed_s=computed_s, longest_step_s=longest_step_s)
        assert (why is not None) == hangs
        assert why is None or f"more than {may_compute_s:.0f} s" in why
