"""How fast a member of a team computes, without its waits for others. Pure: times are arguments."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from workers.messages import TeamPace

#: These first steps do not count: they load kernels, and rows are not yet divided by speed.
_WARM_UP: Final = 3
_STEPS: Final = 20


class Pace:
    """The times of this member's last steps with an unchanged number of members."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        """Seconds that the computing thread has waited for work since the last part."""
        self._began_s: float | None = None
        """When this step began."""
        self._ended_s: float | None = None
        """When the last part ended."""
        self._largest: tuple[int, float | None] = (0, None)
        """Samples of this step's largest part; seconds per sample, rests of the slot included."""
        self._steps = deque[tuple[float, float, float | None]](maxlen=_WARM_UP + _STEPS)
        """Seconds of each step, of its update, and per sample (`None`: it computed no samples)."""

    def clear(self) -> None:
        """Forget all steps, because the number of members has changed."""
        self._steps.clear()

    def record_part(self, rows: int, *, updated: bool, began_s: float, ended_s: float) -> None:
        """Record one part of a step. `updated`: it was the update, which ends the step."""
        from_s = began_s if self._ended_s is None else self._ended_s + self.waited_s
        self._ended_s, self.waited_s = ended_s, 0.0
        if rows and rows >= self._largest[0]:  # a member that trains alone computes no small parts
            self._largest = rows, (ended_s - from_s) / rows
        if not updated:
            return
        if self._began_s is not None:
            step = ended_s - self._began_s, ended_s - began_s, self._largest[1]
            self._steps.append(step)
        self._began_s, self._largest = ended_s, (0, None)

    def summary(self, batch: int) -> TeamPace | None:
        """Return the pace for steps of `batch` samples; `None`: too few steps are recorded."""
        steps = list(self._steps)[_WARM_UP:]
        samples_s = [sample_s for _, _, sample_s in steps if sample_s is not None]
        if not samples_s:
            return None
        update_s = median(each for _, each, _ in steps)
        return TeamPace(
            steps=len(steps),
            step_s=median(each for each, _, _ in steps),
            alone_s=batch * median(samples_s) + update_s,
            update_s=update_s,
        )
