"""Time as the head sees it, and its way to wait; an argument, so that tests run in virtual time.
And its timers.

Does not say when a slot is due (`core/slices.py`) nor what happens then (`core/lifecycle.py`).
"""

from __future__ import annotations

import heapq
import time


class Clock:
    """The clock of this machine; tests derive others."""

    def monotonic_s(self) -> float:
        """Seconds that never jump back; every duration and deadline is measured in them."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Seconds since 1970, for a person to read; may jump."""
        return time.time()

    def sleep(self, duration_s: float) -> None:
        """Return after this many seconds."""
        time.sleep(duration_s)


class Timers:
    """The next moment at which each slot must be asked whether its time has come: a turn costs what
    is due in it.

    A report moves the deadline of its slot to later, at every slice. The entry in the heap stays:
    when it is due, the owner asks the slot again and sets the later moment.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._armed: dict[str, float] = {}
        """Of each slot the earliest entry that counts."""

    def set(self, slot: str, at_s: float | None) -> None:
        """Have the slot come up at `at_s` (monotonic seconds) or before.

        `None` asks for nothing.
        """
        if at_s is None:
            return
        armed_s = self._armed.get(slot)
        if armed_s is None or at_s < armed_s:
            self._armed[slot] = at_s
            heapq.heappush(self._heap, (at_s, slot))

    def due(self, now_s: float) -> list[str]:
        """Return the slots that have come up, and forget their timers."""
        slots = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, slot = heapq.heappop(self._heap)
            if self._armed.get(slot) == at_s:
                del self._armed[slot]
                slots.append(slot)
        return slots
