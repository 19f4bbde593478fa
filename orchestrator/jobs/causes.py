"""How an attempt ended, and whether and where it is started again. Pure."""

from __future__ import annotations

from enum import Enum

from orchestrator.jobs.model import Cause, Standing


class Retry(Enum):
    """Whether and where an attempt is made again."""

    AS_IS = "as is"
    COUNTED = "counted"
    LARGER = "larger"
    NEVER = "never"


def retry_of(cause: Cause, standing: Standing, text: str, step: int | None = None) -> Retry:
    """Return what follows from a cause: a stand-in."""
    if cause is Cause.OUT_OF_MEMORY:
        return Retry.LARGER
    if cause in {Cause.NAN_LOSS, Cause.BAD_CONFIG, Cause.TIME_LIMIT, Cause.NOT_STARTED}:
        return Retry.NEVER
    if cause is not Cause.EXCEPTION:
        return Retry.AS_IS
    is_same = step is not None and (text, step) == (standing.last_error, standing.step)
    return Retry.NEVER if is_same else Retry.COUNTED


def least_room_bytes(peak_bytes: int | None, budget_bytes: int) -> int:
    """Return the room that a program needs that ran out of memory: a stand-in."""
    return max(budget_bytes + 1, int(1.25 * (peak_bytes or 0)))
