"""Counts what happens in one slice. Decides nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from workers.messages import NO_COUNTS, Directive, StepCounts, WorkerEvent, WorkerState
from workers.settings import Scalar


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
    longest_step_s: float = 0.0
    """Of its good steps."""
    error: str | None = None
    events: list[WorkerEvent] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the slice began."""
        return time.monotonic() - self.started_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the slice should end.

        0 after that time, and when it has done all steps that it may.
        """
        limit = self.directive.step_limit
        if limit is not None and self.counts.steps_ok >= limit:
            return 0.0
        return max(0.0, self.directive.duration_s - self.elapsed_s)

    def event(self, name: str, **detail: Scalar) -> None:
        """Add an event for events.jsonl."""
        self.events.append(WorkerEvent(name=name, at_unix_s=time.time(), detail=detail))

    def settle(self, state: WorkerState, reason: str) -> None:
        """Set the state and the reason that the table shows."""
        self.state, self.reason = state, reason

    def use(self, size: int, batch: int) -> None:
        """Set the size and batch that the table shows."""
        self.size, self.batch = size, batch

    def count(self, counts: StepCounts) -> None:
        """Add to the counters of the slice."""
        self.counts += counts

    def took(self, step_s: float) -> None:
        """Note how long a good step took."""
        self.longest_step_s = max(self.longest_step_s, step_s)

    def raised(self, traceback: str) -> None:
        """Keep the text of the workload's own exception."""
        self.error = traceback
