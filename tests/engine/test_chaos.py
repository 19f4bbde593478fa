"""Out-of-memory errors of `run --chaos` inside a worker: torch's errors, and real recoveries."""

from __future__ import annotations

import pytest

from tests.engine.scene import events, names, turns, with_ooms
from tests.in_child import InChild
from tests.scene import spec_of
from workers.messages import Status, Verdict


def told(report: Status) -> int:
    """Return the number of faults in a report, which has at most one event for them."""
    counts = [event.detail["count"] for event in events(report, "chaos")]
    assert len(counts) <= 1
    return sum(counts)


def test_a_rate_of_oom_is_met_repeats_and_is_survived_by_real_recoveries(in_child: InChild) -> None:
    spec = with_ooms(spec_of(size=64), 0.2)
    reports, again = (in_child(turns, spec, [{}] * count) for count in (100, 20))
    failed = [told(report) for report in reports]
    assert failed[:20] == [told(report) for report in again]
    assert all(report.verdict is Verdict.OK and report.error is None for report in reports)
    for report, count in zip(reports, failed, strict=True):
        assert report.counts.steps_oom == names(report).count("oom") == count
        assert report.counts.emergency_count >= count, "the device was proven alive each time"
    evidence = {event.detail["evidence"] for event in events(reports, "oom")}
    assert evidence == {"type torch.OutOfMemoryError"}
    steps = sum(report.counts.steps_ok for report in reports)
    assert sum(failed) / (sum(failed) + steps) == pytest.approx(0.2, abs=0.1)
