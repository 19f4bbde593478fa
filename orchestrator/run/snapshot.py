"""Makes the row of a slot in the health table from its plan and its state.

Pure; draws nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from orchestrator.config.gpu_specs import match_profile
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import HeadState, Phase, Slot
from orchestrator.record.model import Row
from workers.messages import DeviceInfo, Progress, Status, WorkerState
from workers.readings import SensorReading

#: Throughput and duty are means over about this time: steady to read, quick to fall.
_WINDOW_S = 10.0

#: Fields that a row and a status have under the same name.
_OF_STATUS = ("size", "batch", "claim_bytes")
#: Fields of progress that hold only while a process works.
_SPEEDS = (
    "samples_per_s",
    "tokens_per_s",
    "data_wait_pct",
    "copies_pct",
    "optimizer_pct",
    "mfu_pct",
    "eta_s",
)


@dataclass(slots=True)
class Meter:
    """Measures the throughput of one slot over its last statuses."""

    best_tflops: float | None = None
    """The highest sustained throughput of this run."""
    tflops: float | None = None
    """Sustained TFLOP/s: work over wall time, which includes the pauses for the duty; `None` if the
    workload counts no work.
    """
    duty: float | None = None
    """Share of wall time in which the device was busy."""
    _window: deque[tuple[float, float, float, int | None]] = field(default_factory=deque)
    """For each status: wall time, work and busy time at the one before it, and the card's clock."""
    _before: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Wall time, work and busy time of the process at its last status."""
    _incarnation: int | None = None
    _has_first: bool = False

    def add(self, status: Status) -> None:
        """Add a status to the window.

        The first status of a process includes its warm-up: it is dropped when the next one comes.
        """
        is_first = status.incarnation != self._incarnation
        if is_first or self._has_first:
            self._window.clear()
        if is_first:
            self._before = (0.0, 0.0, 0.0)
        self._has_first, self._incarnation = is_first, status.incarnation
        clock_mhz = None if status.sensors is None else status.sensors.sm_clock_mhz
        self._window.append((*self._before, clock_mhz))
        counts = status.counts
        self._before = (status.wall_s, counts.work_flop, counts.busy_s)
        while status.wall_s - self._window[0][0] > _WINDOW_S and len(self._window) > 1:
            self._window.popleft()
        began_s, flop_before, busy_before_s, _ = self._window[0]
        wall_s, flop = status.wall_s - began_s, counts.work_flop - flop_before
        self.duty = min(1.0, (counts.busy_s - busy_before_s) / wall_s) if wall_s > 0 else None
        self.tflops = flop / wall_s / 1e12 if wall_s > 0 and flop > 0 else None
        if not is_first and self.tflops is not None:
            self.best_tflops = max(self.tflops, self.best_tflops or 0.0)

    @property
    def sm_clock_mhz(self) -> int | None:
        """Highest clock in the window: while a card does no work, its clock is lower."""
        return max((clock for *_, clock in self._window if clock is not None), default=None)


def _is_at_work(slot: Slot) -> bool:
    # Without a process, the last throughput is no longer true.
    return not isinstance(slot.state, HeadState) and slot.phase is not Phase.DONE


def _progress(slot: Slot, peak_pct: float | None) -> Progress:
    """Return the progress of the slot; without a process it has no speed.

    A training counts only the operations of its model, so their share of the card's rating is its
    MFU.
    """
    progress = slot.training.progress
    if progress.train_step is None:
        return progress
    if isinstance(slot.state, HeadState):
        return replace(progress, **dict.fromkeys(_SPEEDS))
    return replace(progress, mfu_pct=peak_pct if progress.mfu_pct is None else progress.mfu_pct)


def _heartbeat_age_s(slot: Slot, now_s: float) -> float | None:
    """Return the age of the last status while another one is expected."""
    is_awaited = slot.phase not in {Phase.DONE, Phase.HELD}
    return now_s - slot.heard_at_s if is_awaited and slot.heard_at_s is not None else None


def _peak_pct(
    tflops: float | None, device: DeviceInfo | None, sm_clock_mhz: int | None
) -> float | None:
    """Return the throughput in percent of the card's rating at its present clock; `None` if no
    rating is known.
    """
    if tflops is None or device is None or device.kind != "cuda":
        return None
    profile = match_profile(device.name, device.total_bytes)
    peak = None if profile is None else profile.peak_tflops(device.dtype, sm_clock_mhz)
    return 100.0 * tflops / peak if peak else None


def row_of(plan: SlotPlan, slot: Slot, meter: Meter, now_s: float) -> Row:
    """Return the row of a slot at `now_s` (monotonic seconds)."""
    # If a held slot has no process, what its last process held is free.
    is_free = slot.phase is Phase.HELD and not slot.ready
    status, device = None if is_free else slot.status, slot.device
    team = None if status is None or isinstance(slot.state, HeadState) else status.team
    sensors = None if status is None else status.sensors
    tflops = meter.tflops if _is_at_work(slot) else None
    peak_pct = (
        None if slot.state is WorkerState.PAUSED else _peak_pct(tflops, device, meter.sm_clock_mhz)
    )
    temperature_of = None
    if sensors is not None and sensors.temperature_c is not None:
        temperature_of = "processor" if sensors.of_processor else "card"
    return Row(
        slot=slot.slot,
        node=plan.spec.node,
        gpu_name=device.name if device is not None else plan.gpu,
        gpu_uuid=device.uuid if device is not None else None,
        device=device.kind if device is not None else plan.spec.device,
        state=slot.state,
        reason=slot.reason,
        policy=plan.spec.policy,
        dtype=device.dtype if device is not None else plan.spec.workload.dtype,
        tflops=tflops,
        peak_pct=peak_pct,
        baseline_pct=100.0 * tflops / meter.best_tflops
        if tflops is not None and meter.best_tflops
        else None,
        cap_bytes=slot.orders.within_cap(device.cap_bytes) if device is not None else None,
        budget_bytes=plan.spec.budget_bytes,
        counts=slot.counts,
        restarts=slot.restarts,
        duty_requested=plan.spec.duty,
        duty_measured=meter.duty if _is_at_work(slot) else None,
        temperature_of=temperature_of,
        heartbeat_age_s=_heartbeat_age_s(slot, now_s),
        progress=_progress(slot, peak_pct),
        shares_steps=plan.spec.team is not None,
        team_state=None if team is None else team.state,
        team_share_pct=None if team is None else team.share_pct,
        team_wire_s=None if team is None else team.wire_s,
        memory=None if status is None else status.memory,
        sensors=sensors or SensorReading(),
        **{name: getattr(status, name, None) for name in _OF_STATUS},
    )
