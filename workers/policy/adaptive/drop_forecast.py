"""Forecasts how much memory may be taken while a step runs, from the recent samples of free memory.

A sample is exact only at its moment, and a step takes time. Does not know how much memory there is, nor what a step
needs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: Falls come in series, because a program that loads takes its memory piece by piece. After two falls another one is
#: expected; this expectation fades within `_FALL_FADES_S`. Falls by more than `_PIECE` count as such pieces. Then
#: `_MORE_THAN_LAST` times the last one's bytes are expected, up to `_MOST_FALL` of what is left. Until that has faded,
#: another piece belongs to the series even if there was a small rise between.
_FALL_FADES_S: Final = 1.0
_PIECE: Final = 0.05
_MORE_THAN_LAST: Final = 1.25
_MOST_FALL: Final = 0.3

#: After free memory rises by half or more, part of it may be taken again. This is expected for as long as after falls.
_LARGE_RISE: Final = 0.5
_FALL_AFTER_RISE: Final = 0.05

#: A step that failed because no more than this share went away while it ran: more jitter of that kind is expected.
_MOST_JITTER: Final = 0.12
_JITTER_FADES_S: Final = 120.0


class Falls(NamedTuple):
    """What is to be expected until the next sample."""

    falling: bool = False
    """Whether the last change was a fall."""
    fall: float = 0.0
    """Share of the memory that may go away, since it fell twice in a row or has just come back."""
    jitter: float = 0.0
    """The same, because a step has failed for a little that went away."""

    @property
    def share(self) -> float:
        """The larger of both."""
        return max(self.fall, self.jitter)


STILL: Final = Falls()


def fallen(falls: Falls, fell: float, passed_s: float, *, failed: bool) -> Falls:
    """Return what is to be expected after a new sample.

    Args:
        falls: Before it.
        fell: Share by which it lies below the last one; negative if above.
        passed_s: Seconds since the last one.
        failed: Whether a step ran out of memory between the two.
    """
    if fell == 0.0 and falls.fall == 0.0 and falls.jitter == 0.0:
        return falls
    fall = falls.fall * max(0.0, 1.0 - passed_s / _FALL_FADES_S)
    jitter = falls.jitter * max(0.0, 1.0 - passed_s / _JITTER_FADES_S)
    if fell > 0.0 and (falls.falling or (fall > 0.0 and fell > _PIECE)):
        fall = max(fall, _next_fall(fell))
    elif fell < -_LARGE_RISE:
        fall = max(fall, _FALL_AFTER_RISE)
    if failed and 0.0 < fell <= _MOST_JITTER:
        jitter = max(jitter, fell)
    return Falls(falling=fell > 0.0 or (fell == 0.0 and falls.falling), fall=fall, jitter=jitter)


def _next_fall(fell: float) -> float:
    """Return the share that may go away next, after a fall by `fell` that was not the first."""
    if fell <= _PIECE:
        return fell
    return min(_MOST_FALL, _MORE_THAN_LAST * fell / max(_PIECE, 1.0 - fell))
