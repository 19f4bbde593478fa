"""Whatever a user's own step does with memory, on a card: as `tests/engine/test_own_steps.py` on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import own_steps
from tests.engine.scene import own, slices
from tests.gpu.scene import ON_A_CARD, spec_of
from workers.messages import Report, Verdict, WorkerState
from workers.settings import WorkerSpec

pytestmark = ON_A_CARD


def spec(workload: type) -> WorkerSpec:
    """A worker that is asked for far more than fits."""
    return spec_of(
        name=own(workload), policy="adaptive", size=262_144, batch=1, batch_floor=1, size_floor=64
    )


def failures(reports: list[Report]) -> int:
    return sum(report.counts.steps_oom for report in reports)


@pytest.mark.parametrize("workload", [own_steps.Squares, own_steps.Deep, own_steps.KeepsError])
def test_the_size_is_found_with_three_failures(
    in_child: Callable[..., Any], workload: type
) -> None:
    reports = in_child(slices, spec(workload), [{}] * 40)
    assert failures(reports) <= 3
    assert failures(reports[10:]) == 0
    assert [report.state for report in reports[10:]] == [WorkerState.RUNNING] * 30
    assert reports[-1].memory.peak_bytes >= 0.95 * reports[-1].device.cap_bytes


def test_a_heavy_step_every_17th_time_is_expected(in_child: Callable[..., Any]) -> None:
    reports = in_child(slices, spec(own_steps.Uneven), [{}] * (17 * 24))
    sizes = [(number, report.size) for number, report in enumerate(reports)]
    failed = [sizes[number] for number, report in enumerate(reports) if failures([report])]
    assert failures(reports) <= 12, failed
    assert failures(reports[17 * 14 :]) == 0, failed


def test_what_stays_is_reported_long_before_nothing_fits(in_child: Callable[..., Any]) -> None:
    leaking = spec_of(
        name=own(own_steps.Leaking),
        policy="adaptive",
        size=262_144,
        batch=1,
        batch_floor=1,
        budget_bytes=2 * 2**30,
    )
    reports = in_child(slices, leaking, [{}] * 300)  # of one step each
    in_time = next(
        report
        for report in reports
        if (report.memory.kept_bytes or 0) >= report.device.cap_bytes / 3
    )
    assert in_time.state is WorkerState.RUNNING


def test_a_constructor_larger_than_the_cap_is_refused(in_child: Callable[..., Any]) -> None:
    (report, *_), _, obtained = in_child(own_steps.greedy, spec(own_steps.Greedy), "__init__")
    assert (report.verdict, obtained) == (Verdict.INCOMPATIBLE, [])
    assert "the constructor of workload" in report.reason
