"""Bounds the size by experience: nothing as large as what failed lately, until that is forgotten.

It bisects between the largest good size and the smallest bad one. After a bad size is forgotten, it grows in
increasing steps. Probes above the largest good size may fail, so their number is limited. Uses neither needed nor free
memory: without a free-memory signal this is the only bound, and it holds also when the signal is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from workers.policy.adaptive.bounds import Bounds

#: Share of a good size that is kept after it fails, by the number of failures in a row. Each further failure is
#: costly, so the share falls fast.
_KEPT_AFTER: Final = (0.8, 0.6, 0.45, 0.3, 0.15)

#: A known-bad size is forgotten after so long; found bad again at about the same size, it is remembered longer.
_FORGET_S: Final = 20.0
_FORGET_LONGER: Final = 1.5
_FORGET_LATEST_S: Final = 90.0
_ABOUT_THE_SAME: Final = 0.12

#: Bisection ends when the gap between good and bad is this share of the good size.
_CLOSE_ENOUGH: Final = 0.03

#: The first probe beyond a forgotten limit is this share larger, each next one so much bolder, at most doubling.
_FIRST_PROBE: Final = 0.06
_GALLOP: Final = 1.8
_DOUBLING: Final = 1.0

#: Probes that may fail: one for so long, saved up to a few.
_PROBE_EVERY_S: Final = 50.0
_PROBES_SAVED: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """What was good and what was bad."""

    good: int | None = None
    """The size of the last step that ended well, or what is hoped for after that failed."""
    bad: int | None = None
    """The smallest size that failed lately."""
    bad_until_s: float = 0.0
    forget_s: float = _FORGET_S
    gallop: float = _DOUBLING
    """The next probe beyond all that is known is this share larger."""
    probes: float = _PROBES_SAVED
    """Probes that may still fail, as of `probes_at_s`."""
    probes_at_s: float = 0.0
    in_row: int = 0
    """Failures since a step ended well."""
    untried: bool = False
    """Whether `good` is only remembered from an earlier run."""

    def may_probe(self, now_s: float) -> bool:
        """Whether a failure above what is known to be good can be afforded."""
        return self.probes + max(0.0, now_s - self.probes_at_s) / _PROBE_EVERY_S >= 1.0


def allowed(bracket: Bracket, good: int, bounds: Bounds, now_s: float, *, promised: bool) -> int:
    """Return the largest size to try now.

    Args:
        bracket: So far.
        good: `bracket.good`, which must be known.
        bounds: The sizes there are.
        now_s: The time of the question.
        promised: Whether something else bounds the size from above: then what is not forbidden is allowed, and between
            good and bad it is no probe that must be earned.
    """
    if bracket.in_row or bracket.untried:
        return good
    bad = bracket.bad
    if bad is None or now_s >= bracket.bad_until_s:
        if promised:
            return bounds.largest
        bolder = max(bounds.up(good), bounds.down(good * (1.0 + bracket.gallop)))
        return bolder if bracket.may_probe(now_s) else good
    below = bounds.down(bad - 1)
    if good >= bad:
        return below
    if bad - good <= _CLOSE_ENOUGH * good or not (promised or bracket.may_probe(now_s)):
        return good
    return min(below, max(bounds.up(good), bounds.down((good * bad) ** 0.5)))


def ended_well(bracket: Bracket, size: int, now_s: float) -> Bracket:
    """Return the bracket after a step that ended well."""
    if size == bracket.good and bracket.bad is None and not (bracket.in_row or bracket.untried):
        return bracket
    bad, gallop, forget_s = bracket.bad, bracket.gallop, bracket.forget_s
    grew = bracket.good is None or size > bracket.good
    if bad is not None and (size >= bad or now_s >= bracket.bad_until_s):
        bad = None
        if grew:
            forget_s = _FORGET_S
    if grew and bad is None:
        gallop = min(_DOUBLING, gallop * _GALLOP)
    return Bracket(
        good=size,
        bad=bad,
        bad_until_s=bracket.bad_until_s,
        forget_s=forget_s,
        gallop=gallop,
        probes=bracket.probes,
        probes_at_s=bracket.probes_at_s,
    )


def ran_out(bracket: Bracket, bounds: Bounds, size: int, now_s: float) -> Bracket:
    """Return the bracket after a step that ran out of memory."""
    probe = bracket.good is not None and size > bracket.good and bracket.in_row == 0
    again = bracket.bad is not None and abs(size - bracket.bad) <= _ABOUT_THE_SAME * bracket.bad
    forget_s = min(_FORGET_LATEST_S, bracket.forget_s * _FORGET_LONGER) if probe and again else _FORGET_S
    kept = _KEPT_AFTER[min(bracket.in_row, len(_KEPT_AFTER) - 1)]
    saved = min(_PROBES_SAVED, bracket.probes + max(0.0, now_s - bracket.probes_at_s) / _PROBE_EVERY_S)
    return Bracket(
        good=bracket.good if probe else bounds.down(min(size * kept, size - 1)),
        bad=size,
        bad_until_s=now_s + forget_s,
        forget_s=forget_s,
        gallop=_FIRST_PROBE,
        probes=max(0.0, saved - 1.0),
        probes_at_s=now_s,
        in_row=bracket.in_row + 1,
    )


def forgiven(bracket: Bracket) -> Bracket:
    """Return the bracket without its bad size: memory was taken, the size itself is not to blame."""
    return Bracket(
        good=bracket.good,
        bad_until_s=bracket.bad_until_s,
        forget_s=bracket.forget_s,
        gallop=bracket.gallop,
        probes=bracket.probes,
        probes_at_s=bracket.probes_at_s,
        in_row=bracket.in_row,
    )


def started_at(size: int) -> Bracket:
    """Return the bracket of a worker that remembers this size from an earlier run."""
    return Bracket(good=size, gallop=_FIRST_PROBE, untried=True)


def rested(bracket: Bracket, rest_s: float) -> Bracket:
    """Return the bracket after a time in which nothing ran: nothing was forgotten in it, and no probe earned."""
    return replace(bracket, bad_until_s=bracket.bad_until_s + rest_s, probes_at_s=bracket.probes_at_s + rest_s)
