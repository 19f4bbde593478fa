"""From statuses to a row of the health table: throughput over a window, no unknown values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.placement import Target, plan_slots
from orchestrator.core.slot import HeadState, Phase, Slot, SlotState, UserOrders
from orchestrator.run.snapshot import Meter, row_of
from tests import factories
from tests.factories import CPU, REFERENCE, status_of
from tests.run.conftest import RunMaker
from workers.messages import Status, StepCounts, WorkerState
from workers.readings import SensorReading

PLAN = plan_slots(REFERENCE, Target())[3]

DEVICE = replace(
    CPU, kind="cuda", name="NVIDIA GeForce RTX 3090", uuid="GPU-0", cap_bytes=3, dtype="bf16"
)
MEMORY = replace(factories.MEMORY, device_used_bytes=20)
SENSORS = SensorReading(
    temperature_c=61.0, margin_c=22.0, power_w=250.0, sm_clock_mhz=1700, utilisation_pct=97.0
)


def told(**changes: Any) -> Status:
    """Return the status of a process that worked for 1 s at 10 TFLOP/s, half of the time busy."""
    second = {"work_flop": 1e13, "busy_s": 0.5, "wall_s": 1.0}
    usual = {**second, "device": DEVICE, "memory": MEMORY, "claim_bytes": 5}
    return status_of("pc1/3", **{**usual, **changes})


def slot_with(status: Status, **changes: Any) -> Slot:
    """Return a working slot with this status."""
    usual = {
        "phase": Phase.WORKING,
        "state": WorkerState.RUNNING,
        "runs": True,
        "status": status,
        "device": status.device,
    }
    return Slot(slot="pc1/3", **{**usual, **changes})


class Metered:
    """The meter of a slot whose processes report sums."""

    def __init__(self) -> None:
        self.meter = Meter()
        self._wall_s = self._busy_s = self._flop = 0.0

    def add(self, wall_s: float = 1.0, busy_s: float = 0.5, flop: float = 1e13) -> Meter:
        """Add some time of work of the process."""
        self._wall_s += wall_s
        self._busy_s += busy_s
        self._flop += flop
        sums = {"wall_s": self._wall_s, "busy_s": self._busy_s, "work_flop": self._flop}
        self.meter.add(told(**sums))
        return self.meter


def metered(seconds: int = 2) -> Meter:
    one = Metered()
    for _ in range(seconds):
        one.add()
    return one.meter


def test_what_is_older_than_the_window_is_forgotten() -> None:
    one = Metered()
    for _ in range(11):
        one.add()
    assert one.meter.tflops == pytest.approx(10.0)
    for seconds in range(1, 11):
        assert one.add(busy_s=0.0, flop=0.0).duty == pytest.approx(0.05 * (10 - seconds))
    assert one.meter.tflops is None


def test_the_baseline_is_the_best_window_and_no_warming_up() -> None:
    one = Metered()
    assert one.add(flop=9e13).best_tflops is None
    one.add()
    assert one.add(flop=0.4e13).tflops == pytest.approx(7.0)
    assert one.meter.best_tflops == pytest.approx(10.0)
    assert row_of(PLAN, slot_with(told()), one.meter, 0.0).baseline_pct == pytest.approx(70.0)


def test_a_row_shows_counters_and_the_last_statuses_facts() -> None:
    known = {"steps_ok": 6, "steps_oom": 2, "steps_error": 2, "oom_count": 3, "emergency_count": 4}
    counts = {**known, "verify_checks": 5, "verify_errors": 1}
    slot = slot_with(
        told(**{**counts, "steps_ok": 1}, sensors=SENSORS),
        state=WorkerState.BACKOFF,
        reason="down to 4096",
        heard_at_s=998.5,
        counts_before=StepCounts(steps_ok=5),
        restarts=7,
    )
    shown = row_of(PLAN, slot, metered(), 1000.0)
    expected = {
        **counts,
        "state": WorkerState.BACKOFF,
        "reason": "down to 4096",
        "gpu_name": "NVIDIA GeForce RTX 3090",
        "dtype": "bf16",
        "size": 8192,
        "cap_bytes": 3,
        "device_used_bytes": 20,
        "success_rate": 0.6,
        "restarts": 7,
        "duty_measured": 0.5,
        "heartbeat_age_s": 1.5,
        "temperature_of": "card",
        "margin_c": 22.0,
        "power_limit_w": None,
        "throttle_pct": None,
    }
    row = shown.to_dict()
    assert {name: row[name] for name in expected} == expected
    assert shown.tflops == pytest.approx(10.0)


@pytest.mark.parametrize("state", [WorkerState.BACKOFF, HeadState.RESTARTING])
def test_without_a_working_process_there_is_no_throughput(state: SlotState) -> None:
    shown = row_of(PLAN, slot_with(told(), state=state), metered(), 0.0)
    known = (shown.tflops is not None, shown.baseline_pct, shown.duty_measured)
    is_working = isinstance(state, WorkerState)
    assert known == ((True, 100.0, 0.5) if is_working else (False, None, None))


def test_a_held_slot_shows_the_memory_of_its_process() -> None:
    paused = slot_with(told(), state=HeadState.HELD, phase=Phase.HELD, heard_at_s=10.0)
    shown = row_of(PLAN, paused, Meter(), 100.0)
    assert (shown.size, shown.memory, shown.heartbeat_age_s) == (8192, MEMORY, None)
    drained = row_of(PLAN, replace(paused, runs=False), Meter(), 100.0)
    assert (drained.size, drained.memory, drained.value("reserved_bytes")) == (None,) * 3
    assert drained.cap_bytes == shown.cap_bytes
    capped = row_of(PLAN, replace(paused, orders=UserOrders(cap_bytes=2)), Meter(), 100.0)
    assert capped.cap_bytes == 2


def test_unsaved_steps_of_dead_processes_count_as_redone(new_run: RunMaker) -> None:
    scene = new_run(duration="40s", max_deaths=9)
    scene.fleet.trains = {"pc1/0", "pc2/0"}
    for at_s in (7.3, 12.9, 21.4):
        scene.fleet.at(at_s, lambda: scene.fleet.kill("pc1/0"))
    scene.fleet.at(25.2, lambda: scene.fleet.leave("pc1"))
    scene.fleet.at(27.0, lambda: scene.fleet.join("pc1"))
    rows = scene.finish()
    assert rows["pc1/0"].progress.redone_steps == scene.fleet.redone["pc1/0"] > 0
    assert rows["pc2/0"].progress.redone_steps == 0
    away = [row for row in scene.shown("pc1/0") if row.state == "LOST"]
    assert away
    assert {row.progress.train_step is not None for row in away} == {True}
