"""When the next snapshot is due. Pure: no clock."""

from __future__ import annotations

from typing import Final

MOST_SHARE: Final = 0.01
"""Of the training's time that snapshots may cost."""
RETRY_S: Final = 60.0
"""After a failure the next attempt comes no later than this, however rare snapshots are."""


def pause_s(save_every_s: float, cost_s: float, *, failed: bool) -> float:
    """Seconds from the end of one snapshot to the beginning of the next.

    A snapshot that cost the training `cost_s` is followed by at least a hundred times as many seconds without one.
    """
    wanted_s = min(save_every_s, RETRY_S) if failed else save_every_s
    return max(wanted_s, cost_s / MOST_SHARE)
