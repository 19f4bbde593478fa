"""The duty of a worker: how long it sleeps, so that it keeps the device busy only for a share of the time."""

from __future__ import annotations

import time


class DutyCycle:
    """The idle time that is due after work, and the sleep for it."""

    def __init__(self, duty: float | None) -> None:
        """Begin with no sleep owed.

        Args:
            duty: Share of the time for which the slot may keep the device busy; `None` does not limit it.
        """
        self._duty = 1.0 if duty is None else duty
        self._owed_s = 0.0

    @property
    def must_rest(self) -> bool:
        """Whether sleep is owed."""
        return self._owed_s > 0

    def worked(self, busy_s: float, thermal_duty: float) -> None:
        """Owe sleep for work: `busy_s` at duty d owes busy_s x (1/d - 1).

        Args:
            busy_s: Time for which the device was kept busy.
            thermal_duty: Share that the thermal governor leaves of the slot's own duty.
        """
        duty = self._duty * thermal_duty
        if 0.0 < duty < 1.0:
            self._owed_s += busy_s * (1.0 / duty - 1.0)

    def rest(self, most_s: float) -> None:
        """Sleep for what is owed, at most `most_s`; the rest stays owed."""
        pause_s = min(self._owed_s, most_s)
        if pause_s > 0:
            time.sleep(pause_s)
            self.rested(pause_s)

    def rested(self, seconds: float) -> None:
        """Subtract idle time, whatever its cause, from what is owed."""
        self._owed_s = max(0.0, self._owed_s - seconds)
