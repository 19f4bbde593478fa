"""The clocks of the supervisor and its way to wait; an argument, so that tests run in virtual time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as the supervisor sees it."""

    def monotonic_s(self) -> float:
        """Seconds that never jump back; every duration and deadline is measured in them."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970, for a person to read; may jump."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Return after this many seconds."""
        ...


class SystemClock:
    """The clock of this machine."""

    def monotonic_s(self) -> float:
        """Return `time.monotonic`."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Return `time.time`."""
        return time.time()

    def sleep(self, duration_s: float) -> None:
        """Block for this many seconds."""
        time.sleep(duration_s)
