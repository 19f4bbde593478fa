"""What a worker does between two steps: read the sensors, check results, and rest.

Connects the thermal governor (`ThermalControl`), the checks of a workload (`ResultChecks`) and the
slot's share of the time (`DutyCycle`) to a worker. Decides nothing: the governor chooses a duty,
and a check says whether a result is wrong. After one wrong result the worker stays CORRUPT until
its process ends. Changes no settings of the card.
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

#: A duty of at least this is not reported as throttling: the governor reduces the duty slightly
#: long before a card is hot.
_UNLIMITED_DUTY: Final = 0.95


class ThermalControl:
    """The last sensor reading, and the governor's decision on it."""

    def __init__(self, spec: WorkerSpec, card: str | None) -> None:
        """Open the sensors of a worker's card or processor.

        `card` is the UUID of its card, `None` on a processor.
        """
        self._sampler = open_sampler(spec.device, card)
        # A processor at 90 C is normal and protects itself: its temperature is only displayed.
        self._governor = ThermalGovernor(spec.thermal if self._sampler.of_card else THERMAL_OFF)
        self.reading: SensorReading | None = None
        self.decision = ThermalDecision(band=None, duty=1.0, reason="")

    @property
    def slows(self) -> bool:
        """Whether the governor reduces the worker's duty."""
        return self.decision.duty < _UNLIMITED_DUTY

    @property
    def alarmed(self) -> bool:
        """Whether an alarm is raised, such as a card that is gone."""
        return bool(self._governor.alarms.standing)

    def sample(self, account: Account) -> None:
        """Read the sensors if that is due, ask the governor, and log alarms and band changes."""
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
    """Sleeps after work so that the slot keeps its share of the time.

    `duty`: share of the time for which the slot may keep the device busy; `None`: no limit.
    """

    def __init__(self, duty: float | None) -> None:
        self._duty = 1.0 if duty is None else duty
        self._owed_s = 0.0

    def worked(self, busy_s: float, thermal_duty: float) -> None:
        """Add busy_s x (1/d - 1) to the sleep due; d is the slot's duty x `thermal_duty`."""
        duty = self._duty * thermal_duty
        if 0.0 < duty < 1.0:
            self._owed_s += busy_s * (1.0 / duty - 1.0)

    def rest(self, account: Account) -> bool:
        """Sleep as long as is due, or until the turn ends; return whether some is still due."""
        pause_s = min(self._owed_s, account.remaining_s) if self._owed_s else 0.0
        if pause_s > 0:
            self.rested(account.sleep(pause_s))
        return self._owed_s > 0

    def rested(self, seconds: float) -> None:
        """Subtract idle time of any cause from the sleep that is due."""
        self._owed_s = max(0.0, self._owed_s - seconds)


#: After this many checks in a row that ran out of memory, the worker makes no more checks; any other
#: failure ends them at once.
_MAX_FAILURES_IN_A_ROW: Final = 5


class ResultChecks:
    """The checks of results in one worker process."""

    def __init__(self, share: float, where: str) -> None:
        """Limit the checks to this share of the time; 0 disables them.

        `where` names slot and card in messages, so that a faulty card can be found.
        """
        self.reason: str | None = None
        """Description of the last wrong result; `None` if there was none."""
        self._schedule = CheckSchedule(share)
        self._where = where
        self._broken = False
        self._failures = 0

    def after_step(
        self, device: Device, workload: Workload, run: Run, seconds: float, account: Account
    ) -> float:
        """Check the result of a step if a check is due; return the seconds that it kept the device
        busy.

        An out-of-memory in a check does not count as one of the worker; the check is skipped.

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
            seconds = time.perf_counter() - began_s  # includes the time to release memory
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
        # Such a check has a bug, or never has enough memory: later results are not checked.
        self._broken = failure.kind is FailureKind.OTHER or self._failures >= _MAX_FAILURES_IN_A_ROW
        if self._broken:
            account.event("checks_ended", text=failure.text)
