"""Counts what happens in one slice and turns it into a `Report`. Decides nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psutil

from workers.messages import DeviceInfo, Directive, MemoryInfo, Report, ResumeState, Verdict, WorkerEvent, WorkerState
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
    claim_bytes: int | None = None
    steps_ok: int = 0
    steps_oom: int = 0
    steps_error: int = 0
    oom_count: int = 0
    emergency_count: int = 0
    work_flop: float = 0.0
    busy_s: float = 0.0
    verify_checks: int = 0
    verify_errors: int = 0
    sensors: SensorReading | None = None
    error: str | None = None
    learned: StoredLimit | None = None
    events: list[WorkerEvent] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the slice began."""
        return time.monotonic() - self.started_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the slice should end; 0 when it should have, or has done all the steps it may."""
        limit = self.directive.step_limit
        if limit is not None and self.steps_ok >= limit:
            return 0.0
        return max(0.0, self.directive.duration_s - self.elapsed_s)

    def event(self, name: str, **detail: Scalar) -> None:
        """Note something worth a line in events.jsonl."""
        self.events.append(WorkerEvent(name=name, at_unix_s=time.time(), detail=detail))

    def settle(self, state: WorkerState, reason: str) -> None:
        """Set what the table shows."""
        self.state, self.reason = state, reason

    def report(
        self,
        verdict: Verdict,
        *,
        device: DeviceInfo | None = None,
        memory: MemoryInfo | None = None,
        resume: ResumeState | None = None,
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
            claim_bytes=self.claim_bytes,
            steps_ok=self.steps_ok,
            steps_oom=self.steps_oom,
            steps_error=self.steps_error,
            oom_count=self.oom_count,
            emergency_count=self.emergency_count,
            work_flop=self.work_flop,
            busy_s=self.busy_s,
            wall_s=self.elapsed_s,
            verify_checks=self.verify_checks,
            verify_errors=self.verify_errors,
            sensors=self.sensors,
            rss_bytes=psutil.Process().memory_info().rss,
            error=self.error,
            events=tuple(self.events),
            resume=resume,
            learned=self.learned,
        )
