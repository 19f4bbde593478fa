"""When the next checkpoint is due. Pure: no clock."""

from __future__ import annotations

from typing import Final

MOST_SHARE: Final = 0.01
"""Of the training's time that checkpoints may cost."""
EARLIER: Final = 0.8
"""A step must end before a checkpoint is taken, and writing takes time: so it is due before all of
the time has passed, and no more than that is lost."""
RETRY_S: Final = 60.0
"""After a failure the next attempt comes no later than this, however rare checkpoints are."""


def pause_s(save_every_s: float, cost_s: float, *, failed: bool) -> float:
    """Seconds from one checkpoint to the next, for one that cost the training `cost_s`."""
    wanted_s = min(save_every_s, RETRY_S) if failed else save_every_s
    return max(EARLIER * wanted_s, cost_s / MOST_SHARE)
