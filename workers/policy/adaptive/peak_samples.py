"""Measured peaks of the last few sizes: a library's workspace depends on the size in a way that no line follows.

A size that was measured without such a workspace is safe, even if its neighbours are not. Remembers sizes as
x = size^power, the last one first, and forgets the oldest. Does not know how much memory there is, nor what untried
sizes would take.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: So many are remembered; sizes this close are one of them.
_PLACES: Final = 16
_SAME_SIZE: Final = 0.01

#: Share of the way that one peak moves what a size is known to take; more while it was measured less often.
_FOLLOW: Final = 0.1


class Place(NamedTuple):
    """A size that is remembered."""

    x: float
    bytes: float
    """What a step took, smoothed."""
    steps: int = 1
    """How many were measured."""


def place_at(places: tuple[Place, ...], x: float) -> Place | None:
    """Return what is remembered of x, if anything is."""
    for place in places:
        if abs(place.x - x) <= _SAME_SIZE * x:
            return place
    return None


def largest_fitting(places: tuple[Place, ...], limit_bytes: float, margin: float, above_x: float) -> float:
    """Return the largest x above `above_x` that fits into `limit_bytes`, else `above_x`.

    Args:
        places: What is remembered.
        limit_bytes: What there is.
        margin: Share that a step may take beyond the mean of many steps of its size.
        above_x: Where to begin.
    """
    best = above_x
    for place in places:
        # What was measured once may be off itself, by as much as the step that comes.
        if place.x > best and place.bytes * (1.0 + margin * (1.0 + 1.0 / place.steps)) <= limit_bytes:
            best = place.x
    return best


def placed(
    places: tuple[Place, ...], known: Place | None, x: float, peak_bytes: float, unit_bytes: float
) -> tuple[Place, ...]:
    """Return the places after a step of x.

    Args:
        places: Before it.
        known: That of x among them, if what was remembered holds.
        x: The step.
        peak_bytes: What it took.
        unit_bytes: Growth per unit of x, for a size that is not quite the one that is remembered.
    """
    if known is None:
        return (Place(x, peak_bytes), *places[: _PLACES - 1])
    steps = known.steps + 1
    along = known.bytes + unit_bytes * (x - known.x)
    place = Place(x, along + max(_FOLLOW, 1.0 / steps) * (peak_bytes - along), steps)
    if known is places[0]:
        return (place, *places[1:])
    return (place, *(other for other in places if other is not known))


def without(places: tuple[Place, ...], x: float) -> tuple[Place, ...]:
    """Return the places with nothing remembered of x."""
    return tuple(place for place in places if abs(place.x - x) > _SAME_SIZE * x)
