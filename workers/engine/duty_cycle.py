"""The duty of a worker: how long it sleeps, so that it keeps the device busy only for a share of
the time.
"""

from __future__ import annotations

import time


class DutyCycle:
    """The idle time that is due after work, and the sleep for it.

    `duty` is the share of the time for which the slot may keep the device busy; `None` does not
    limit it.
    """

    def __init__(self, duty: float | None) -> None:
        self._duty = 1.0 if duty is None else duty
        self._owed_s = 0.0

    def worked(self, busy_s: float, thermal_duty: float) -> None:
        """Owe sleep for work: busy_s x (1/d - 1), where d is `thermal_duty` of the slot's own duty."""
        duty = self._duty * thermal_duty
        if 0.0 < duty < 1.0:
            self._owed_s += busy_s * (1.0 / duty - 1.0)

    def rest(self, most_s: float) -> bool:
        """Sleep for what is owed, at most `most_s`; say whether some of it stays owed."""
        pause_s = min(self._owed_s, most_s)
        if pause_s > 0:
            time.sleep(pause_s)
            self.rested(pause_s)
        return self._owed_s > 0

    def rested(self, seconds: float) -> None:
        """Subtract idle time, whatever its cause, from what is owed."""
        self._owed_s = max(0.0, self._owed_s - seconds)
