"""From a slot's plan and state to its row in the health table, and to its record in the store. Pure; draws nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import overload

from orchestrator.config.gpu_specs import match_profile, peak_tflops
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import HeadState, Slot, SlotState
from orchestrator.core.step_accounting import steps_at_risk
from orchestrator.watch.model import Brief, LazyRows, Row
from orchestrator.watch.records import SlotProgress, SlotRecord
from orchestrator.watch.store import RunStore
from workers.messages import DeviceInfo, Report, ResumeState, StepCounts, WorkerState
from workers.readings import SensorReading

#: Throughput and duty are means over the reports of about this long: steady to read, quick to fall.
_WINDOW_S = 10.0

#: States in which the last throughput no longer holds: no process of the slot works.
_IDLE = frozenset({HeadState.LOST, HeadState.STARTING, HeadState.RESTARTING, HeadState.QUARANTINED})

_counters_of = attrgetter(*StepCounts.__slots__)

#: Of a worker that has not looked yet.
_NO_SENSORS = SensorReading()


@dataclass(slots=True)
class Meter:
    """Throughput of one slot over its last reports."""

    best_tflops: float | None = None
    """Most that was sustained, in this run or before."""
    tflops: float | None = None
    """Sustained TFLOP/s: work over wall time, pauses for the duty included; `None` if the workload counts none."""
    sm_clock_mhz: int | None = None
    """Highest clock in the window: an idle card lowers its clock, and no work was done then."""
    duty: float | None = None
    """Share of wall time the device was kept busy."""
    _window: deque[tuple[float, float, float, int | None]] = field(default_factory=deque)
    """Of each report its wall time, work, busy time and clock."""
    _has_first: bool = False

    def add(self, report: Report) -> None:
        """Take a report into the window.

        The first report of a process contains its warm-up: it is used only until there is another.
        """
        is_first = _is_first(report)
        if is_first or self._has_first:
            self._window.clear()
        self._has_first = is_first
        clock_mhz = None if report.sensors is None else report.sensors.sm_clock_mhz
        self._window.append((report.wall_s, report.counts.work_flop, report.counts.busy_s, clock_mhz))
        wall_s = flop = busy_s = 0.0
        highest_mhz = None
        for took_s, did_flop, was_busy_s, clock_mhz in self._window:
            wall_s += took_s
            flop += did_flop
            busy_s += was_busy_s
            if clock_mhz is not None and (highest_mhz is None or clock_mhz > highest_mhz):
                highest_mhz = clock_mhz
        while wall_s > _WINDOW_S and len(self._window) > 1:
            took_s, did_flop, was_busy_s, clock_mhz = self._window.popleft()
            wall_s -= took_s
            flop -= did_flop
            busy_s -= was_busy_s
            if clock_mhz is not None and clock_mhz == highest_mhz:
                highest_mhz = max((clock for *_, clock in self._window if clock is not None), default=None)
        self.sm_clock_mhz = highest_mhz
        self.duty = min(1.0, busy_s / wall_s) if wall_s > 0 else None
        self.tflops = flop / wall_s / 1e12 if wall_s > 0 and flop > 0 else None
        if not is_first:
            self.remember(self.tflops)

    def remember(self, tflops: float | None) -> None:
        """Measure against what was done in earlier runs, too."""
        if tflops is not None and tflops > (self.best_tflops or 0.0):
            self.best_tflops = tflops


def _is_first(report: Report) -> bool:
    return bool(report.events) and any(event.name == "device_opened" for event in report.events)


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


class SlotRows(LazyRows):
    """The rows of all slots at one moment. Make them at once: the meters change with the next report."""

    def __init__(
        self, plans: Mapping[str, SlotPlan], slots: Mapping[str, Slot], meters: Mapping[str, Meter], now_s: float
    ) -> None:
        """Take the slots as they are at `now_s` (monotonic seconds), in the order of the plans."""
        self._plans = plans
        self._slots = tuple(slots.values())
        self._meters = meters
        self._now_s = now_s
        self._made: dict[str, Row] = {}

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        """Return a row, or some."""
        if isinstance(index, slice):
            return tuple(self.of(slot) for slot in self._slots[index])
        return self.of(self._slots[index])

    def briefs(self) -> tuple[Slot, ...]:
        """See `LazyRows.briefs`."""
        return self._slots

    def tflops(self) -> Iterator[float | None]:
        """See `LazyRows.tflops`."""
        return (None if slot.state in _IDLE else self._meters[slot.slot].tflops for slot in self._slots)

    def of(self, brief: Brief) -> Row:
        """See `LazyRows.of`."""
        assert isinstance(brief, Slot)  # noqa: S101 - one of `briefs`
        made = self._made.get(brief.slot)
        if made is None:
            made = row(self._plans[brief.slot], brief, self._meters[brief.slot], self._now_s)
            self._made[brief.slot] = made
        return made


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


def progress(slot: Slot, unix_offset_s: float) -> SlotProgress:
    """Return what a report changes in the store; `unix_offset_s` is Unix time less monotonic time."""
    counts = slot.counts
    return SlotProgress(
        slot.slot,
        slot.next_sequence,
        steps_at_risk(slot),
        None if slot.heard_at_s is None else slot.heard_at_s + unix_offset_s,
        (*_counters_of(counts), slot.restarts, slot.steps_lost_upper_bound),
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


class Recorder:
    """Puts slots that have changed into the store: all of a record only where more than its progress has changed."""

    def __init__(self, plans: Mapping[str, SlotPlan], meters: Mapping[str, Meter], store: RunStore) -> None:
        """Begin with nothing written."""
        self._plans = plans
        self._meters = meters
        self._store = store
        self._written: dict[str, tuple[SlotState, str, int, ResumeState | None]] = {}

    def take(self, changed: Collection[str], slots: Mapping[str, Slot], now_s: float, now_unix_s: float) -> None:
        """Give the store what is new of these slots at `now_s` (monotonic seconds)."""
        records, written = [], self._written
        for name in changed:
            slot = slots[name]
            told = (slot.state, slot.reason, slot.incarnation, slot.resume)
            if written.get(name) != told:
                written[name] = told
                records.append(record(self._plans[name], slot, self._meters[name], now_s))
        self._store.slots(records)
        self._store.progress(progress(slots[name], now_unix_s - now_s) for name in changed)
