"""How fast a member of a team computes, without its waits for others. Pure: times are given."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from workers.messages import TeamPace

#: The first steps load kernels, and shares are not fair before speeds are known.
_WARM_UP: Final = 3
_STEPS: Final = 20


class Pace:
    """Of the last steps since the number of members changed."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        """Since the last part, for something to compute."""
        self._began_s: float | None = None
        """When this step began."""
        self._ended_s: float | None = None
        """When the last part ended."""
        self._largest: tuple[int, float | None] = (0, None)
        """The samples of the largest part of this step, and the time of each, rests included."""
        self._steps = deque[tuple[float, float, float | None]](maxlen=_WARM_UP + _STEPS)
        """Time of the step, of its update, and of a sample; `None`: none was computed here."""

    def clear(self) -> None:
        """Forget the steps: those to come are others."""
        self._steps.clear()

    def did(self, rows: int, *, updated: bool, began_s: float, ended_s: float) -> None:
        """Take in a part of a step; the update is the last one."""
        from_s = began_s if self._ended_s is None else self._ended_s + self.waited_s
        self._ended_s, self.waited_s = ended_s, 0.0
        if rows and rows >= self._largest[0]:  # alone it would have no small ones
            self._largest = rows, (ended_s - from_s) / rows
        if not updated:
            return
        if self._began_s is not None:
            figures = ended_s - self._began_s, ended_s - began_s, self._largest[1]
            self._steps.append(figures)
        self._began_s, self._largest = ended_s, (0, None)

    def told(self, batch: int) -> TeamPace | None:
        """Return what it is of steps of so many samples; `None`: it is not known yet."""
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
