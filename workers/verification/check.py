"""What a check of a result found, and when the next check is due, so that checks take about a given
share of the time.

Pure: it gets as arguments how long steps and checks took, and has no clock. Does not check
anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Checks before the share is kept to: of the first results after the start and after each change,
#: one of each kind.
_AT_ONCE: Final = 2

#: At most the share of so much working time may be spent in advance on checks after changes of
#: size. Otherwise a size that changes all the time would take far more than the share.
_ADVANCE_S: Final = 60.0

#: Weight of the latest check in what a check is expected to take.
_NEWEST: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of one result."""

    kind: str
    """`freivalds` or `repeat`; a workload of the user's may have a word of its own."""
    ok: bool
    worst: float
    """Largest ratio of an error to what is tolerated; `inf` where bits differ or a number is not
    finite.
    """
    detail: str
    """Size and element type, and where it failed, in words."""


class CheckSchedule:
    """Hands out the number of each check; two that follow each other are of different kinds.

    A check is due once the steps since the last one have earned what it will probably take. The
    first two after the start and after each change of size are due at once, one of each kind: a new
    size uses other kernels, and its first check says what one takes. What they took is earned
    afterwards like any other.
    """

    def __init__(self, share: float = 0.01) -> None:
        """Let checks take this share of the time in steps and checks, from 0 (none) to below 1."""
        self._share = share
        self._number = 0
        self._earned_s = 0.0
        self._expected_s: float | None = None
        self._at_once = _AT_ONCE
        self._run: tuple[int, int] | None = None

    def after_step(self, size: int, batch: int, seconds: float) -> int | None:
        """Count a good step, and return the number of the check that is due now, for
        `Workload.check`; else `None`.

        The caller reports it to `after_check`; until then it stays due.
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
        """Count a check that took so long, whatever it found, or if there was nothing to find."""
        self._number += 1
        self._at_once = max(0, self._at_once - 1)
        self._earned_s -= seconds
        # The two kinds differ, and so do two checks of a busy card: a running mean.
        before_s = seconds if self._expected_s is None else self._expected_s
        self._expected_s = before_s + _NEWEST * (seconds - before_s)
