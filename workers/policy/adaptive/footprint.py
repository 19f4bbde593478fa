"""How much memory a step of some size takes, learned from the peaks of steps that ended well.

The model is a line in x = size^power (power 2 for the n of an n x n product, 1 for a batch). It
goes through two measured points: the present one, smoothed, and the farthest one. The margin of the
line is what steps took beyond it: it grows when a prediction fails and shrinks while predictions
hold. A step far off the line means that the workload has changed, and the line begins anew. Does
not know how much memory there is, nor decide anything.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from workers.settings import Learned

#: Share of the way that one peak moves the smoothed place.
_FOLLOW: Final = 0.1

#: Share of the way that one deviation moves the mean deviation.
_SPREAD_FOLLOW: Final = 0.03

#: Mean deviations that the margin covers. A step that wobbles evenly by +-w deviates by w/2 on
#: average, so 2 would just cover it; a failure costs ten times what the rest of the margin does.
_COVERS: Final = 2.5

#: What is assumed of a workload that was never measured, and the lower bound of the estimate.
_FIRST_SPREAD: Final = 0.007
_LEAST_SPREAD: Final = 0.0004

#: A surprise beyond the margin is remembered whole and fades, to the e-th part in this time.
_FADE_S: Final = 1500.0

#: What deviates by more, as no workspace does, is a step that has changed.
_JUMP: Final = 0.08

#: While the slope is not known, peaks of one size are smoothed. One so many times as high or as low
#: is a change.
_OTHER: Final = 2.0

#: After a failure the margin is this much of what it was; never more than this in all.
_SURPRISED: Final = 1.3
_LARGEST_SURPRISE: Final = 0.5

#: Two sizes this close are one place.
_SAME_PLACE: Final = 0.1

#: At least this share of a step's memory is assumed to grow with its size, so that a flat line does
#: not predict that any size fits.
_LEAST_GROWING_SHARE: Final = 0.05


class Footprint(NamedTuple):
    """Bytes of a step as a function of x = size^power.

    An immutable value, changed with `_replace`.
    """

    here_x: float
    here_bytes: float
    """Where the worker was last, smoothed over the steps there."""
    far_x: float
    far_bytes: float
    """The measured place with the largest distance from `here`; the same place while there is only
    one.
    """
    unit_bytes: float
    """Growth per unit of x."""
    spread: float = _FIRST_SPREAD
    """Mean deviation of a peak from the line, as a share."""
    surprise: float = 0.0
    """A deviation beyond the margin, fading."""
    steps: int = 1
    """Measured in a row at `here`."""
    at_s: float = 0.0
    """When the last peak was measured."""
    fits_here: bool = True
    """Whether no step has run out of memory since one ended well at `here`."""

    @property
    def has_slope(self) -> bool:
        """Whether the line goes through two places that are far enough apart."""
        return _ratio(self.far_x, self.here_x) > 1.0 + _SAME_PLACE

    @property
    def margin(self) -> float:
        """Share by which a step may take more than the line says."""
        return max(_COVERS * self.spread, self.surprise)

    @property
    def here_need_bytes(self) -> float:
        """What a step takes at the place where it was last, wobble included: no surprise is to be
        feared there.
        """
        return self.here_bytes * (1.0 + _COVERS * self.spread)

    @property
    def fixed_bytes(self) -> float:
        """What a step of size 0 would take; never negative."""
        return max(0.0, self.here_bytes - self.unit_bytes * self.here_x)

    def bytes_at(self, x: float) -> float:
        """Return the predicted peak, without the margin."""
        return max(0.0, self.here_bytes + self.unit_bytes * (x - self.here_x))

    def largest_x(self, limit_bytes: float) -> float:
        """Return the x whose predicted peak, margin included, is `limit_bytes`; negative when
        nothing fits.

        A line through small steps may be too flat, because the optimiser's memory hides theirs. A
        step that is k times as large takes at most k times as much, so the line predicts nothing
        beyond that. Where steps end well now, a surprise elsewhere says nothing.
        """
        on_the_line = self.hoped_x(limit_bytes)
        if self.fits_here and limit_bytes >= self.here_need_bytes:
            on_the_line = max(on_the_line, self.here_x)
        most_x, most_bytes = self._largest
        if on_the_line <= most_x:
            return on_the_line
        return min(
            on_the_line,
            max(most_x, most_x / max(1.0, most_bytes) * limit_bytes / (1.0 + self.margin)),
        )

    def hoped_x(self, limit_bytes: float) -> float:
        """Return the x at which the line reaches `limit_bytes`, margin included, however far away
        that is.
        """
        return self.here_x + (limit_bytes / (1.0 + self.margin) - self.here_bytes) / self.unit_bytes

    def predicts(self, x: float) -> bool:
        """Whether a peak at `x` can be compared with the line.

        Beyond all that was measured it is only a bound.
        """
        near = x == self.here_x or (
            self.has_slope and abs(x - self.here_x) <= _SAME_PLACE * self.here_x
        )
        return near or (self.has_slope and not self.is_beyond(x))

    def is_beyond(self, x: float) -> bool:
        """Whether nothing as large was ever measured."""
        return x > (1.0 + _SAME_PLACE) * self._largest[0]

    def is_below(self, x: float) -> bool:
        """Whether nothing as small was ever measured."""
        return x < (1.0 - _SAME_PLACE) * min(self.here_x, self.far_x)

    @property
    def _largest(self) -> tuple[float, float]:
        """The larger of the two places."""
        return (
            (self.here_x, self.here_bytes)
            if self.here_x >= self.far_x
            else (self.far_x, self.far_bytes)
        )

    def surprised(self, x: float, limit_bytes: float) -> Footprint:
        """Return the line after a step of `x` did not fit into `limit_bytes`, although this line
        said it would.
        """
        beyond = limit_bytes / max(1.0, self.bytes_at(x)) - 1.0
        surprise = min(_LARGEST_SURPRISE, max(self.margin, beyond) * _SURPRISED + _LEAST_SPREAD)
        return self._replace(surprise=surprise, fits_here=False)


def first_footprint(x: float, peak_bytes: float, at_s: float = 0.0) -> Footprint:
    """Draw the line through one peak and the origin: it overestimates every larger step."""
    peak_bytes = max(1.0, peak_bytes)
    return Footprint(x, peak_bytes, x, peak_bytes, unit_bytes=peak_bytes / x, at_s=at_s)


def footprint_of(learned: Learned, power: float) -> Footprint | None:
    """Return the line that was remembered; `None` if no peak was ever measured."""
    if learned.fixed_bytes is None or learned.unit_bytes is None:
        return None
    x = float(max(1, learned.size)) ** power
    here = max(1.0, learned.fixed_bytes + learned.unit_bytes * x)
    unit_bytes = max(learned.unit_bytes, _LEAST_GROWING_SHARE * here / x)
    far_x = x / 16
    return Footprint(x, here, far_x, max(1.0, here - unit_bytes * (x - far_x)), unit_bytes)


def measured(line: Footprint | None, x: float, peak_bytes: float, at_s: float) -> Footprint:
    """Return the line after a step of `x` that took `peak_bytes` and ended at `at_s`."""
    if line is None:
        return first_footprint(x, peak_bytes, at_s)
    peak_bytes = max(1.0, peak_bytes)
    deviation = peak_bytes / max(1.0, line.bytes_at(x)) - 1.0
    has_slope = line.has_slope
    # While the slope is not known, only the very same size is the same place.
    stayed = x == line.here_x or (has_slope and abs(x - line.here_x) <= _SAME_PLACE * line.here_x)
    predicted = stayed or (
        has_slope and not line.is_beyond(x)
    )  # what is larger than all before is only bounded
    has_changed = (
        abs(deviation) > _JUMP
        if has_slope
        else _ratio(peak_bytes, max(1.0, line.bytes_at(x))) > _OTHER
    )
    if predicted and has_changed:
        # The workload has changed: no point that was measured holds any more.
        return first_footprint(x, peak_bytes, at_s)._replace(spread=line.spread)
    here_bytes, far_x, far_bytes = peak_bytes, line.far_x, line.far_bytes
    if stayed:
        # Smoothed along the line, so that a place slightly larger is not mistaken for a larger
        # need.
        along = line.here_bytes + line.unit_bytes * (x - line.here_x)
        here_bytes = max(1.0, along + max(_FOLLOW, 1.0 / (line.steps + 1)) * (peak_bytes - along))
        if far_x == line.here_x:
            far_x, far_bytes = x, here_bytes
    elif _ratio(line.here_x, x) > _ratio(far_x, x):
        far_x, far_bytes = line.here_x, line.here_bytes
    unit_bytes = line.unit_bytes
    if _ratio(far_x, x) > 1.0 + _SAME_PLACE:
        unit_bytes = (here_bytes - far_bytes) / (x - far_x)
    most_x, most_bytes = (x, here_bytes) if x >= far_x else (far_x, far_bytes)
    unit_bytes = min(max(unit_bytes, _LEAST_GROWING_SHARE * most_bytes / most_x), here_bytes / x)
    spread = line.spread
    surprise = line.surprise * max(0.0, 1.0 - (at_s - line.at_s) / _FADE_S)
    if predicted:
        # One absurd peak must not widen the margin for hours.
        spread = max(
            _LEAST_SPREAD,
            spread + _SPREAD_FOLLOW * (min(abs(deviation), _LARGEST_SURPRISE) - spread),
        )
        if deviation > line.margin:
            surprise = min(_LARGEST_SURPRISE, deviation)
    steps = line.steps + 1 if stayed else 1
    return Footprint(x, here_bytes, far_x, far_bytes, unit_bytes, spread, surprise, steps, at_s)


def _ratio(one: float, other: float) -> float:
    """Return how far two places are apart, as larger over smaller."""
    return one / other if one > other else other / one
