"""What a worker does between two steps: read the sensors, check results, and rest.

Connects the thermal governor (`ThermalControl`), a workload's own checks (`ResultChecks`) and the
slot's share of the time (`DutyCycle`) to a worker. Decides nothing: the governor gives a duty, and
a check says whether a result is wrong. One wrong result marks the worker for as long as its process
lives. Sets nothing on the card.
"""

from __future__ import annotations

import math
import time
from typing import Final

from workers import oom
from workers.devices.base import Device
from workers.engine.account import Account
from workers.messages import ContextCorruptedError, StepCounts
from workers.nvml.sensors import open_sampler
from workers.policy.base import Run
from workers.policy.thermal import ThermalDecision, ThermalGovernor
from workers.readings import SensorReading
from workers.settings import THERMAL_OFF, FailureKind, WorkerSpec
from workers.verification.check import Check, CheckSchedule
from workers.workloads.base import Workload

#: The governor reduces the duty slightly long before a card is hot; from this duty on it is not
#: reported.
_UNLIMITED_DUTY: Final = 0.95


class ThermalControl:
    """The last sensor reading, and what the governor decided on it."""

    def __init__(self, spec: WorkerSpec, card: str | None) -> None:
        """Open the sensors that belong to a worker.

        `card` is the UUID of its card, `None` on a processor.
        """
        self._sampler = open_sampler(spec.device, card)
        # A processor at 90 C is normal and protects itself, so its temperature is only shown.
        self._governor = ThermalGovernor(spec.thermal if self._sampler.of_card else THERMAL_OFF)
        self.reading: SensorReading | None = None
        self.decision = ThermalDecision(band=None, duty=1.0, reason="")

    @property
    def slows(self) -> bool:
        """Whether the heat of the card limits the worker."""
        return self.decision.duty < _UNLIMITED_DUTY

    @property
    def alarmed(self) -> bool:
        """Whether an alarm is raised, such as a card that is gone."""
        return bool(self._governor.alarms.standing)

    def sample(self, account: Account) -> None:
        """Read the sensors if that is due, and ask the governor."""
        now_s = time.monotonic()
        reading = self._sampler.sample_if_due(now_s)
        if reading is None:
            return
        self.reading = reading
        decision = self._governor.after_reading(reading, now_s)
        before, self.decision = self.decision, decision
        for alarm in decision.alarms:
            account.event(
                "alarm_raised" if alarm.raised else "alarm_cleared",
                alarm=alarm.name,
                text=alarm.text,
            )
        if decision.band is not None and before.band not in {None, decision.band}:
            account.event(
                "thermal_band",
                band=decision.band.value,
                temperature_c=reading.temperature_c,
                duty=decision.duty,
            )


class DutyCycle:
    """The idle time that is due after work, and the sleep for it.

    `duty` is the share of the time for which the slot may keep the device busy; `None` does not
    limit it.
    """

    def __init__(self, duty: float | None) -> None:
        self._duty = 1.0 if duty is None else duty
        self._owed_s = 0.0

    def worked(self, busy_s: float, thermal_duty: float) -> None:
        """Owe sleep for work: busy_s x (1/d - 1); d is `thermal_duty` of the slot's own duty."""
        duty = self._duty * thermal_duty
        if 0.0 < duty < 1.0:
            self._owed_s += busy_s * (1.0 / duty - 1.0)

    def rest(self, account: Account) -> bool:
        """Sleep for what is owed, at most until the turn ends; say whether some stays owed."""
        pause_s = min(self._owed_s, account.remaining_s) if self._owed_s else 0.0
        if pause_s > 0:
            self.rested(account.sleep(pause_s))
        return self._owed_s > 0

    def rested(self, seconds: float) -> None:
        """Subtract idle time, whatever its cause, from what is owed."""
        self._owed_s = max(0.0, self._owed_s - seconds)


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
        self, device: Device, workload: Workload, run: Run, seconds: float, account: Account
    ) -> float:
        """Check the result of a step if that is due; return the seconds for which the check kept
        the device busy.

        Out of memory within a check is no out-of-memory of the worker: then there was no check.

        Raises:
            ContextCorruptedError: The device failed.
        """
        number = self._schedule.after_step(run.size, run.batch, seconds)
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
            self._after_failure(failure, device, account)
            seconds = time.perf_counter() - began_s  # giving memory back is a part of what it cost
        else:
            self._failures = 0
        self._schedule.after_check(seconds)
        if check is not None:
            account.counts += StepCounts(verify_checks=1, verify_errors=int(not check.ok))
            if not check.ok:
                self.reason = f"wrong result on {self._where}: {check.detail}"
                worst = check.worst if math.isfinite(check.worst) else None
                account.event(
                    "corrupt", kind=check.kind, where=self._where, detail=check.detail, worst=worst
                )
        return seconds

    def _after_failure(self, failure: oom.Failure, device: Device, account: Account) -> None:
        if failure.kind is FailureKind.CONTEXT_CORRUPTED:
            raise ContextCorruptedError(failure.text)
        if not self._failures:
            account.event("check_failed", kind=failure.kind.value, text=failure.text)
        self._failures += 1
        device.release()
        # A check that cannot run is a bug of the workload, or never gets its memory: results go
        # unchecked from here on.
        self._broken = failure.kind is FailureKind.OTHER or self._failures >= _MAX_FAILURES_IN_A_ROW
        if self._broken:
            account.event("checks_ended", text=failure.text)
