"""What the sampler sees of a run: the planned time, every worker, and no more samples than memory has room for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.slot import HeadState
from orchestrator.lab.burn.phases import SnapshotSampler, warnings_of
from orchestrator.record.model import Snapshot
from orchestrator.record.store import STORE_NAME, RunStore
from tests.burn.scene import ROW
from tests.factories import FACTS, with_changes
from workers.messages import WorkerState


def snapshot(elapsed_s: float, duration_s: float, **changes: object) -> Snapshot:
    other = replace(ROW, slot="pc2/0", node="pc2", temperature_c=elapsed_s, temperature_of="card")
    return Snapshot(
        run_id="20260101-000000-abcd",
        started_at=0.0,
        now_unix_s=1e9,  # may be set at any time: only the run's own clock counts
        elapsed_s=elapsed_s,
        duration_s=duration_s,
        nodes_planned=("pc1", "pc2"),
        nodes_seen=("pc1", "pc2"),
        rows=(with_changes(ROW, **changes), other),
    )


@pytest.mark.parametrize(("length_s", "most"), [(10.0, 10), (3600.0, 600), (86_400.0, 600)])
def test_a_sample_a_second_and_never_more_than_fit(length_s: float, most: int) -> None:
    sampler = SnapshotSampler(length_s)
    elapsed_s = 0.0
    while elapsed_s < length_s:
        sampler.update(snapshot(elapsed_s, length_s))
        elapsed_s += 0.25 if length_s < 100 else length_s / 5000
    for measured in sampler.measured({}, {}):
        assert most * 0.9 <= len(measured.looks) <= most
        times_s = [at_s for at_s, _ in measured.looks]
        assert times_s == sorted(times_s)
        assert times_s[-1] > 0.9 * length_s


def test_only_the_planned_time_is_sampled() -> None:
    sampler = SnapshotSampler(10.0)
    sampler.update(snapshot(0.0, 10.0, state=HeadState.STARTING))
    sampler.update(snapshot(5.0, 10.0))
    sampler.update(snapshot(10.0, 10.0, state=WorkerState.STOPPED))  # draining
    (first, _) = sampler.measured({}, {})
    assert [at_s for at_s, _ in first.looks] == [5.0]


def test_what_the_store_tells_of_alarms_and_of_checks_that_ended(tmp_path: Path) -> None:
    store = RunStore(tmp_path / STORE_NAME)
    store.begin(FACTS)
    at = "2026-01-01T00:00:00.000Z"
    for name, slot, details in (
        ("alarm_raised", "pc1/0", {"alarm": "power brake"}),
        ("checks_ended", "pc1/0", {"text": "no memory\nfor it"}),
        ("check_failed", "pc1/1", {"text": "once"}),
    ):
        store.event({"at": at, "event": name, "slot": slot, **details})
    store.commit()
    assert warnings_of(tmp_path) == ({"pc1/0": ["power brake"]}, {"pc1/0": r"no memory\nfor it"})
    assert warnings_of(None) == warnings_of(tmp_path / "nowhere") == ({}, {})


def test_a_worker_has_its_own_samples_last_row_and_alarms() -> None:
    sampler = SnapshotSampler(10.0)
    assert (sampler.last, sampler.measured({"pc1/0": ["card lost"]}, {})) == (None, ())
    sampler.update(snapshot(1.0, 10.0))
    sampler.update(snapshot(3.0, 10.0))
    sampler.close(snapshot(10.0, 10.0, steps_ok=777))
    first, second = sampler.measured(
        {"pc2/0": ["power brake", "card lost", "power brake"]}, {"pc1/0": "no memory for it"}
    )
    assert (first.row.slot, first.row.counts.steps_ok, first.alarms) == ("pc1/0", 777, ())
    assert second.alarms == ("power brake", "card lost")
    assert (first.unchecked, second.unchecked) == ("no memory for it", None)
    assert [row.temperature_c for _, row in second.looks] == [1.0, 3.0]
