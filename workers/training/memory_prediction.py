"""Whether a training takes the memory that its plan predicts: both figures, for an event."""

from __future__ import annotations

from workers.training.memory_plan import MemoryPlanner
from workers.training.trainer import MicroBatch


class Prediction:
    """Follows the steps of a training until they have settled at one micro-batch and level."""

    def __init__(self, planner: MemoryPlanner) -> None:
        self._planner = planner
        self._rung = (0, 0, 0)
        """Micro-batch, level and states on the host of the steps that are followed now."""
        self._part = MicroBatch(rows=0, level=0, updated=False)
        self._settled = False
        """Whether an update was done: until then libraries load what they need."""
        self._peak_bytes = 0

    def note(self, micro: int, part: MicroBatch, share_pct: int) -> None:
        """Take note of a good step, that computed at most `micro` samples with so many states on
        the host.
        """
        if self._rung != (micro, part.level, share_pct):
            self._rung, self._settled, self._peak_bytes = (micro, part.level, share_pct), False, 0
        self._part = part

    def measured(self, peak_bytes: int) -> bool:
        """Take note of the peak of that step.

        Say whether it ended a whole effective batch of settled steps.
        """
        settled, self._settled = self._settled, self._settled or self._part.updated
        self._peak_bytes = max(self._peak_bytes, peak_bytes) if settled else 0
        return settled and self._part.updated

    def told(self) -> dict[str, int]:
        """Return both figures, and of which steps they are."""
        micro, level, share_pct = self._rung
        predicted_bytes = self._planner.plan(micro, level, share_pct).total_bytes
        measured = {"predicted_bytes": predicted_bytes, "measured_bytes": self._peak_bytes}
        return {"micro_batch": micro, "memory_level": level, **measured}
