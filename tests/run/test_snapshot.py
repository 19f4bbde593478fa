"""From reports to what the health table says of a slot: throughput over a window, and nothing that is not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.load import load_config
from orchestrator.core.placement import Target, plan_slots
from orchestrator.core.slot import HeadState, Phase, Slot
from orchestrator.run.snapshot import Meter, row
from tests.counting import with_counts
from workers.messages import DeviceInfo, MemoryInfo, Report, StepCounts, Verdict, WorkerEvent, WorkerState

PLAN = plan_slots(load_config(str(Path(__file__).parents[2] / "cluster.yaml")), Target())[3]

OPENED = (WorkerEvent(name="device_opened", at_unix_s=0.0),)

DEVICE = DeviceInfo(
    kind="cuda",
    name="NVIDIA GeForce RTX 3090",
    uuid="GPU-0",
    total_bytes=24,
    context_bytes=1,
    context_source="measured",
    cap_bytes=3,
    dtype="bf16",
    threads=1,
    pid=1,
    hostname="pc1",
    torch_version="2",
)
MEMORY = MemoryInfo(
    device_total_bytes=24,
    device_used_bytes=20,
    free_bytes=1,
    allocated_bytes=2,
    reserved_bytes=3,
    peak_bytes=3,
    alloc_retries=7,
)


def report(**changes: Any) -> Report:  # noqa: ANN401 - any field
    """Return the report of a slice of one second at 10 TFLOP/s, half of it busy."""
    usual: dict[str, Any] = {
        "slot": "pc1/3",
        "incarnation": 0,
        "sequence": 0,
        "verdict": Verdict.OK,
        "state": WorkerState.RUNNING,
        "reason": "steady",
        "device": DEVICE,
        "memory": MEMORY,
        "size": 8192,
        "batch": 128,
        "claim_bytes": 5,
        "work_flop": 1e13,
        "busy_s": 0.5,
        "wall_s": 1.0,
    }
    return Report(**with_counts({**usual, **changes}))


def metered(*reports: Report) -> Meter:
    meter = Meter()
    for one in reports:
        meter.add(one)
    return meter


def test_throughput_is_work_over_wall_time_and_duty_is_busy_over_wall_time() -> None:
    meter = metered(report(), report(work_flop=2e13, busy_s=1.5, wall_s=2.0))
    assert meter.tflops == pytest.approx(10.0)
    assert meter.duty == pytest.approx(2.0 / 3.0)


def test_the_first_report_of_a_process_serves_only_until_there_is_another() -> None:
    meter = metered(report(work_flop=1e12, events=OPENED))
    assert meter.tflops == pytest.approx(1.0)
    meter.add(report())
    assert meter.tflops == pytest.approx(10.0)


def test_a_new_process_begins_a_new_window_and_its_warming_up_is_dropped_too() -> None:
    meter = metered(report(), report(), report(work_flop=1e12, events=OPENED))
    assert meter.tflops == pytest.approx(1.0)
    meter.add(report(work_flop=8e12))
    assert meter.tflops == pytest.approx(8.0)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    meter = metered(*[report() for _ in range(10)])
    assert meter.tflops == pytest.approx(10.0)
    for seconds in range(1, 11):
        meter.add(report(work_flop=0.0, busy_s=0.0))
        assert meter.duty == pytest.approx(0.05 * (10 - seconds))
    assert meter.tflops is None


def test_a_report_longer_than_the_window_is_a_window_of_its_own() -> None:
    meter = metered(report(), report(wall_s=100.0, busy_s=50.0))
    assert meter.tflops == pytest.approx(0.1)


def test_the_baseline_is_the_best_window_and_no_warming_up() -> None:
    meter = metered(report(work_flop=9e13, events=OPENED))
    assert meter.best_tflops is None
    meter.add(report())
    meter.add(report(work_flop=0.4e13))
    assert meter.tflops == pytest.approx(7.0)
    assert meter.best_tflops == pytest.approx(10.0)
    shown = row(
        PLAN, Slot(slot="pc1/3", state=WorkerState.RUNNING, report=report(), device=report().device), meter, 0.0
    )
    assert shown.baseline_pct == pytest.approx(70.0)


@pytest.mark.parametrize("nothing", [{"wall_s": 0.0}, {"work_flop": 0.0}], ids=["no time", "no work counted"])
def test_throughput_is_unknown_where_nothing_was_counted(nothing: dict[str, float]) -> None:
    meter = metered(report(**nothing))
    assert (meter.tflops, meter.best_tflops) == (None, None)


def test_a_meter_without_reports_knows_nothing() -> None:
    meter = Meter()
    assert (meter.tflops, meter.duty, meter.best_tflops) == (None, None, None)


@given(
    st.lists(
        st.builds(
            report,
            work_flop=st.just(0.0) | st.floats(1.0, 1e15),
            busy_s=st.floats(0, 100),
            wall_s=st.just(0.0) | st.floats(1e-6, 100),
            events=st.sampled_from([(), (), (), OPENED]),
        ),
        max_size=30,
    )
)
def test_whatever_is_reported_the_numbers_stay_in_their_bounds(reports: list[Report]) -> None:
    meter = Meter()
    best = 0.0
    for one in reports:
        meter.add(one)
        assert meter.duty is None or 0.0 <= meter.duty <= 1.0
        assert meter.tflops is None or meter.tflops > 0.0
        assert (meter.best_tflops or 0.0) >= best, "the baseline never falls"
        best = meter.best_tflops or 0.0
        if meter.tflops is not None and one.events == ():
            assert best >= meter.tflops


def test_before_the_first_report_only_the_plan_is_known() -> None:
    shown = row(PLAN, Slot(slot="pc1/3"), Meter(), 1000.0).to_dict()
    known = {name: value for name, value in shown.items() if value is not None}
    assert known == {
        "slot": "pc1/3",
        "node": "pc1",
        "gpu_name": "rtx-3090",
        "device": "cuda",
        "state": "STARTING",
        "reason": "waiting for its node",
        "policy": "adaptive",
        "dtype": "fp16",
        "budget_bytes": PLAN.spec.budget_bytes,
        "duty_requested": 0.6,
        **dict.fromkeys(["steps_ok", "steps_oom", "steps_error", "oom_count", "emergency_count", "restarts"], 0),
        **dict.fromkeys(["verify_checks", "verify_errors"], 0),
    }


def test_a_row_shows_the_counters_of_the_slot_and_the_facts_of_the_last_report() -> None:
    slot = Slot(
        slot="pc1/3",
        phase=Phase.WORKING,
        state=WorkerState.BACKOFF,
        reason="down to 4096",
        heard_at_s=998.5,
        report=report(steps_ok=1),
        device=report().device,
        counts=StepCounts(
            steps_ok=6,
            steps_oom=2,
            steps_error=2,
            oom_count=3,
            emergency_count=4,
            verify_checks=5,
            verify_errors=1,
        ),
        restarts=7,
    )
    shown = row(PLAN, slot, metered(report()), 1000.0)
    expected = {
        "state": WorkerState.BACKOFF,
        "reason": "down to 4096",
        "gpu_name": "NVIDIA GeForce RTX 3090",
        "gpu_uuid": "GPU-0",
        "dtype": "bf16",
        "size": 8192,
        "batch": 128,
        "allocated_bytes": 2,
        "reserved_bytes": 3,
        "claim_bytes": 5,
        "cap_bytes": 3,
        "device_used_bytes": 20,
        "device_total_bytes": 24,
        "alloc_retries": 7,
        "steps_ok": 6,
        "steps_oom": 2,
        "steps_error": 2,
        "success_rate": 0.6,
        "oom_count": 3,
        "emergency_count": 4,
        "verify_checks": 5,
        "verify_errors": 1,
        "restarts": 7,
        "duty_measured": 0.5,
        "heartbeat_age_s": 1.5,
    }
    told = shown.to_dict()
    assert {name: told[name] for name in expected} == expected
    assert shown.tflops == pytest.approx(10.0)


def test_a_report_without_device_and_memory_leaves_them_unknown() -> None:
    bare = report(device=None, memory=None, size=None, batch=None, claim_bytes=None)
    shown = row(PLAN, Slot(slot="pc1/3", state=WorkerState.RUNNING, report=bare), Meter(), 0.0)
    assert (shown.gpu_name, shown.dtype, shown.device) == ("rtx-3090", "fp16", "cuda")
    assert (shown.cap_bytes, shown.allocated_bytes, shown.size, shown.gpu_uuid) == (None, None, None, None)


@pytest.mark.parametrize("state", list(WorkerState))
def test_a_slot_without_a_working_process_has_no_throughput_and_no_duty(state: WorkerState) -> None:
    idle = {HeadState.LOST, HeadState.STARTING, HeadState.RESTARTING, HeadState.QUARANTINED}
    slot = Slot(slot="pc1/3", state=state, report=report(), device=report().device)
    shown = row(PLAN, slot, metered(report()), 0.0)
    if state in idle:
        assert (shown.tflops, shown.baseline_pct, shown.duty_measured) == (None, None, None)
    else:
        assert (shown.tflops, shown.baseline_pct, shown.duty_measured) == (pytest.approx(10.0), 100.0, 0.5)


def test_what_was_last_known_of_a_lost_worker_stays_in_its_row() -> None:
    slot = Slot(
        slot="pc1/3",
        state=HeadState.LOST,
        heard_at_s=10.0,
        report=report(),
        device=report().device,
        counts=StepCounts(steps_ok=5),
    )
    shown = row(PLAN, slot, Meter(), 100.0)
    assert (shown.size, shown.counts.steps_ok, shown.heartbeat_age_s, shown.gpu_uuid) == (8192, 5, 90.0, "GPU-0")
    again = row(PLAN, replace(slot, state=HeadState.STARTING, heard_at_s=None), Meter(), 100.0)
    assert (again.counts.steps_ok, again.heartbeat_age_s) == (5, None)
