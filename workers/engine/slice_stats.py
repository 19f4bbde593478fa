"""Counts what happens in one slice and turns it into a `Report`. Decides nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import psutil

from workers.messages import (
    NO_COUNTS,
    DeviceInfo,
    Directive,
    MemoryInfo,
    Report,
    ResumeState,
    StepCounts,
    Verdict,
    WorkerEvent,
    WorkerState,
)
from workers.readings import SensorReading
from workers.settings import Scalar, StoredLimit


@dataclass(slots=True, kw_only=True)
class SliceStats:
    """The running counts of one slice. The only mutable thing a slice owns."""

    slot: str
    directive: Directive
    state: WorkerState = WorkerState.WARMING
    reason: str = "opening the device"
    size: int | None = None
    batch: int | None = None
    counts: StepCounts = NO_COUNTS
    sensors: SensorReading | None = None
    error: str | None = None
    events: list[WorkerEvent] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    _repeated: dict[tuple[str, Scalar], tuple[int, int]] = field(default_factory=dict)
    """Place and count of the events that tell how often something happened."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the slice began."""
        return time.monotonic() - self.started_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the slice should end; 0 after that time, and when it has done all steps that it may."""
        limit = self.directive.step_limit
        if limit is not None and self.counts.steps_ok >= limit:
            return 0.0
        return max(0.0, self.directive.duration_s - self.elapsed_s)

    def event(self, name: str, **detail: Scalar) -> None:
        """Add an event for events.jsonl."""
        self.events.append(WorkerEvent(name=name, at_unix_s=time.time(), detail=detail))

    def repeated_event(self, name: str, kind: Scalar) -> None:
        """Add an event that many steps may repeat: one for each kind, whose `count` grows."""
        index, count = self._repeated.get((name, kind), (len(self.events), 0))
        self._repeated[name, kind] = index, count + 1
        if not count:
            self.event(name, kind=kind, count=1)
        else:
            self.events[index] = replace(self.events[index], detail={"kind": kind, "count": count + 1})

    def settle(self, state: WorkerState, reason: str) -> None:
        """Set the state and the reason that the table shows."""
        self.state, self.reason = state, reason

    def sensed(self, reading: SensorReading | None) -> None:
        """Keep the last reading of the sensors."""
        self.sensors = reading

    def use(self, size: int, batch: int) -> None:
        """Set the size and batch that the table shows."""
        self.size, self.batch = size, batch

    def step_done(self, flop: float, seconds: float) -> None:
        """Count a step that ended well."""
        self.counts += StepCounts(steps_ok=1, work_flop=flop, busy_s=seconds)

    def step_out_of_memory(self) -> None:
        """Count a step that ran out of memory."""
        self.counts += StepCounts(steps_oom=1, oom_count=1)

    def step_failed(self) -> None:
        """Count a step that failed by the workload's own fault."""
        self.counts += StepCounts(steps_error=1)

    def raised(self, traceback: str | None) -> None:
        """Keep the text of the workload's own exception."""
        self.error = traceback

    def out_of_memory(self, times: int = 1) -> None:
        """Count allocations that failed outside any step."""
        self.counts += StepCounts(oom_count=times)

    def emergency_done(self) -> None:
        """Count an emergency product."""
        self.counts += StepCounts(emergency_count=1)

    def checked(self, *, wrong: bool) -> None:
        """Count a check of a result."""
        self.counts += StepCounts(verify_checks=1, verify_errors=int(wrong))

    def busy(self, seconds: float) -> None:
        """Count time for which something else than a step kept the device busy."""
        self.counts += StepCounts(busy_s=seconds)

    def report(
        self,
        verdict: Verdict,
        *,
        device: DeviceInfo | None = None,
        memory: MemoryInfo | None = None,
        claim_bytes: int | None = None,
        resume: ResumeState | None = None,
        learned: StoredLimit | None = None,
    ) -> Report:
        """Close the slice."""
        return Report(
            slot=self.slot,
            incarnation=self.directive.incarnation,
            sequence=self.directive.sequence,
            verdict=verdict,
            state=self.state,
            reason=self.reason,
            device=device,
            memory=memory,
            size=self.size,
            batch=self.batch,
            claim_bytes=claim_bytes,
            counts=self.counts,
            wall_s=self.elapsed_s,
            sensors=self.sensors,
            rss_bytes=psutil.Process().memory_info().rss,
            error=self.error,
            events=tuple(self.events),
            resume=resume,
            learned=learned,
        )
