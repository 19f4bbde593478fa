"""Which slots have a timer that is due: a heap, so that a turn costs what is due in it, not what exists.

Does not say when a slot is due (`core/dispatch.py`) nor what happens then (`core/lifecycle.py`).
"""

from __future__ import annotations

import heapq


class Timers:
    """The next moment at which each slot must be asked whether its time has come.

    A report moves the deadline of its slot to later, at every slice. The entry in the heap stays: when it is due, the
    owner asks the slot again and sets the later moment.
    """

    def __init__(self) -> None:
        """Begin without a timer."""
        self._heap: list[tuple[float, str]] = []
        self._armed: dict[str, float] = {}
        """Of each slot the earliest entry that counts."""

    def set(self, slot: str, at_s: float | None) -> None:
        """Have the slot come up at `at_s` (monotonic seconds) or before; `None` asks for nothing."""
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
