"""Runs a workload's own checks of its results when they are due, and keeps what they found.

Does not know how a result is checked. One wrong result marks the worker for as long as its process
lives.
"""

from __future__ import annotations

import math
import time
from typing import Final

from workers import oom
from workers.devices.base import Device
from workers.engine.slice_stats import SliceStats
from workers.messages import ContextCorruptedError, StepCounts
from workers.policy.base import StepOk
from workers.settings import FailureKind
from workers.verification.check import Check, CheckSchedule
from workers.workloads.base import Workload

#: After this many checks in a row that ran out of memory, no more are tried.
_MAX_FAILURES_IN_A_ROW: Final = 5


class ResultChecks:
    """The checks of one worker process."""

    def __init__(self, share: float, where: str) -> None:
        """Let checks take this share of the time, 0 for none.

        `where` is slot and card, to find a faulty one.
        """
        self.reason: str | None = None
        """The last wrong result, in words; `None` if there was none."""
        self._schedule = CheckSchedule(share)
        self._where = where
        self._broken = False
        self._failures = 0

    def after_step(
        self, device: Device, workload: Workload, step: StepOk, stats: SliceStats
    ) -> float:
        """Check the result of a step if that is due; return the seconds for which the check kept
        the device busy.

        Out of memory within a check is no out-of-memory of the worker: then there was no check.

        Raises:
            ContextCorruptedError: The device failed.
        """
        number = self._schedule.after_step(step.size, step.batch, step.seconds)
        if number is None or self._broken:
            return 0.0
        failure: oom.Failure | None = None
        check: Check | None = None
        began_s = time.perf_counter()
        try:
            check, seconds = device.timed(lambda: workload.check(number))
        except Exception as error:  # noqa: BLE001 - classified below, outside the handler
            failure = oom.classify(error)
        if failure is not None:
            self._after_failure(failure, device, stats)
            seconds = time.perf_counter() - began_s  # giving memory back is a part of what it cost
        else:
            self._failures = 0
        self._schedule.after_check(seconds)
        if check is not None:
            stats.count(StepCounts(verify_checks=1, verify_errors=int(not check.ok)))
            if not check.ok:
                self.reason = f"wrong result on {self._where}: {check.detail}"
                worst = check.worst if math.isfinite(check.worst) else None
                stats.event(
                    "corrupt", kind=check.kind, where=self._where, detail=check.detail, worst=worst
                )
        return seconds

    def _after_failure(self, failure: oom.Failure, device: Device, stats: SliceStats) -> None:
        if failure.kind is FailureKind.CONTEXT_CORRUPTED:
            raise ContextCorruptedError(failure.text)
        if not self._failures:
            stats.event("check_failed", kind=failure.kind.value, text=failure.text)
        self._failures += 1
        device.release()
        # A check that cannot run is a bug of the workload, or never gets its memory: results go
        # unchecked from here on.
        self._broken = failure.kind is FailureKind.OTHER or self._failures >= _MAX_FAILURES_IN_A_ROW
        if self._broken:
            stats.event("checks_ended", text=failure.text)
