"""From a slot's plan and state to its row in the health table, and to its record in the store. Pure; draws nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field

from orchestrator.config.gpu_specs import match_profile, peak_tflops
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import HeadState, Slot
from orchestrator.core.step_accounting import steps_at_risk
from orchestrator.watch.model import Row
from orchestrator.watch.records import SlotRecord
from workers.messages import DeviceInfo, Report, WorkerState
from workers.readings import SensorReading

#: Throughput and duty are means over the reports of about this long: steady to read, quick to fall.
_WINDOW_S = 10.0

#: States in which the last throughput no longer holds: no process of the slot works.
_IDLE = frozenset({HeadState.LOST, HeadState.STARTING, HeadState.RESTARTING, HeadState.QUARANTINED})

#: Of a worker that has not looked yet.
_NO_SENSORS = SensorReading()


@dataclass(slots=True)
class Meter:
    """Throughput of one slot over its last reports."""

    best_tflops: float | None = None
    """Most that was sustained, in this run or before."""
    _reports: deque[Report] = field(default_factory=deque)

    def add(self, report: Report) -> None:
        """Take a report into the window.

        The first report of a process contains its warm-up: it is used only until there is another.
        """
        if self._reports and (_is_first(report) or _is_first(self._reports[0])):
            self._reports.clear()
        self._reports.append(report)
        while len(self._reports) > 1 and sum(r.wall_s for r in self._reports) > _WINDOW_S:
            self._reports.popleft()
        tflops = self.tflops
        if tflops is not None and not _is_first(report):
            self.best_tflops = max(self.best_tflops or 0.0, tflops)

    def remember(self, tflops: float | None) -> None:
        """Measure against what was done in earlier runs, too."""
        if tflops is not None:
            self.best_tflops = max(self.best_tflops or 0.0, tflops)

    @property
    def tflops(self) -> float | None:
        """Sustained TFLOP/s: work over wall time, pauses for the duty included; `None` if the workload counts none."""
        wall_s = sum(report.wall_s for report in self._reports)
        flop = sum(report.counts.work_flop for report in self._reports)
        return flop / wall_s / 1e12 if wall_s > 0 and flop > 0 else None

    @property
    def sm_clock_mhz(self) -> int | None:
        """Highest clock in the window: an idle card lowers its clock, and no work was done then."""
        known = [report.sensors.sm_clock_mhz for report in self._reports if report.sensors is not None]
        return max((clock for clock in known if clock is not None), default=None)

    @property
    def duty(self) -> float | None:
        """Share of wall time the device was kept busy."""
        wall_s = sum(report.wall_s for report in self._reports)
        return min(1.0, sum(report.counts.busy_s for report in self._reports) / wall_s) if wall_s > 0 else None


def _is_first(report: Report) -> bool:
    return any(event.name == "device_opened" for event in report.events)


def _temperature_of(sensors: SensorReading) -> str | None:
    if sensors.temperature_c is None:
        return None
    return "processor" if sensors.of_processor else "card"


def _peak_pct(tflops: float | None, device: DeviceInfo | None, sm_clock_mhz: int | None) -> float | None:
    """Return the share of what the card is rated for at its present clock; `None` where no rating is known."""
    if tflops is None or device is None or device.kind != "cuda":
        return None
    profile = match_profile(device.name, device.total_bytes)
    peak = None if profile is None else peak_tflops(profile, device.dtype, sm_clock_mhz)
    return 100.0 * tflops / peak if peak else None


def record(plan: SlotPlan, slot: Slot, meter: Meter, now_s: float) -> SlotRecord:
    """Return what must be known of a slot to show it, and to resume it, when this process is gone."""
    return SlotRecord(
        slot=slot.slot,
        node=plan.spec.node,
        state=slot.state.value,
        reason=slot.reason,
        incarnation=slot.incarnation,
        next_sequence=slot.next_sequence,
        steps_at_risk=steps_at_risk(slot),
        counters={
            **asdict(slot.counts),
            "restarts": slot.restarts,
            "steps_lost_upper_bound": slot.steps_lost_upper_bound,
        },
        resume=slot.resume,
        row=row(plan, slot, meter, now_s).to_dict(),
    )


def row(plan: SlotPlan, slot: Slot, meter: Meter, now_s: float) -> Row:
    """Return what the table shows of a slot at `now_s` (monotonic seconds)."""
    report = slot.report
    device = slot.device
    memory = report.memory if report is not None else None
    sensors = report.sensors if report is not None and report.sensors is not None else _NO_SENSORS
    tflops = None if slot.state in _IDLE else meter.tflops
    baseline_pct = 100.0 * tflops / meter.best_tflops if tflops is not None and meter.best_tflops else None
    return Row(
        slot=slot.slot,
        node=plan.spec.node,
        gpu_name=device.name if device is not None else plan.gpu,
        gpu_uuid=device.uuid if device is not None else None,
        device=device.kind if device is not None else plan.spec.device,
        state=slot.state,
        reason=slot.reason,
        policy=plan.spec.policy,
        size=report.size if report is not None else None,
        batch=report.batch if report is not None else None,
        dtype=device.dtype if device is not None else plan.spec.workload.dtype,
        tflops=tflops,
        peak_pct=None if slot.state is WorkerState.PAUSED else _peak_pct(tflops, device, meter.sm_clock_mhz),
        baseline_pct=baseline_pct,
        allocated_bytes=memory.allocated_bytes if memory is not None else None,
        reserved_bytes=memory.reserved_bytes if memory is not None else None,
        claim_bytes=report.claim_bytes if report is not None else None,
        cap_bytes=device.cap_bytes if device is not None else None,
        budget_bytes=plan.spec.budget_bytes,
        device_used_bytes=memory.device_used_bytes if memory is not None else None,
        device_total_bytes=memory.device_total_bytes if memory is not None else None,
        counts=slot.counts,
        alloc_retries=memory.alloc_retries if memory is not None else None,
        restarts=slot.restarts,
        duty_requested=plan.spec.duty,
        temperature_c=sensors.temperature_c,
        temperature_of=_temperature_of(sensors),
        margin_c=sensors.margin_c,
        memory_temperature_c=sensors.memory_temperature_c,
        power_w=sensors.power_w,
        power_limit_w=sensors.power_limit_w,
        sm_clock_mhz=sensors.sm_clock_mhz,
        fan_pct=sensors.fan_pct,
        throttle_pct=sensors.throttle_pct,
        duty_measured=None if slot.state in _IDLE else meter.duty,
        heartbeat_age_s=now_s - slot.heard_at_s if slot.heard_at_s is not None else None,
    )
