"""The finding of a check of a result, and when the next check is due, so that checks take about a
given share of the time.

Pure: the durations of steps and checks are arguments. Does not check anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Checks due at once after the start and after each change of size, before the share applies: one
#: of each kind.
_AT_ONCE: Final = 2

#: Checks after changes of size may run in advance, for at most the share of this much working time.
#: Otherwise a size that changes all the time would take far more than the share.
_ADVANCE_S: Final = 60.0

#: Weight of the latest check in the expected duration of a check.
_NEWEST: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of one result."""

    kind: str
    """`freivalds` or `repeat`; a user's workload may use its own word."""
    ok: bool
    worst: float
    """Largest ratio of an error to its tolerance; `inf` if bits differ or a number is not finite.
    """
    detail: str
    """Size and element type, and where the check failed, in words."""


class CheckSchedule:
    """Decides when a check is due, and numbers the checks; successive ones are of different kinds.

    A check is due once the steps since the last one have earned its expected duration. The first
    two after the start and after each change of size are due at once, one of each kind: a new size
    uses other kernels, and its first check shows how long a check takes. Their time is earned
    afterwards like any other.
    """

    def __init__(self, share: float = 0.01) -> None:
        """Let checks take this share of the time of steps and checks, from 0 (none) to below 1."""
        self._share = share
        self._number = 0
        self._earned_s = 0.0
        self._expected_s: float | None = None
        self._at_once = _AT_ONCE
        self._run: tuple[int, int] | None = None

    def after_step(self, size: int, batch: int, seconds: float) -> int | None:
        """Count a good step; return the number for `Workload.check` if a check is due now, else
        `None`.

        The check stays due until the caller reports it to `after_check`.
        """
        if self._share == 0.0:
            return None
        if (size, batch) != self._run:
            self._run = (size, batch)
            self._at_once = _AT_ONCE
            self._expected_s = None
        # share = checks / (checks + steps), so a second of steps earns share / (1 - share) seconds
        # of checks.
        self._earned_s += seconds * self._share / (1.0 - self._share)
        in_advance = self._number < _AT_ONCE or self._earned_s > -_ADVANCE_S * self._share
        if (self._at_once and in_advance) or (
            self._expected_s is not None and self._earned_s >= self._expected_s
        ):
            return self._number
        return None

    def after_check(self, seconds: float) -> None:
        """Count a check of `seconds`, whatever it found, and if there was nothing to check."""
        self._number += 1
        self._at_once = max(0, self._at_once - 1)
        self._earned_s -= seconds
        # A running mean, because the two kinds differ, as do two checks on a busy card.
        before_s = seconds if self._expected_s is None else self._expected_s
        self._expected_s = before_s + _NEWEST * (seconds - before_s)
