"""Memory needed: how much a step of some size takes, and which steps take several times more.

`Footprint` is learned from the peaks of steps that ended well: a line in x = size^power (power 2
for the n of an n x n product, 1 for a batch). It goes through two measured points: the present one,
smoothed, and the farthest one. The margin of the line is what steps took beyond it: it grows when a
prediction fails and shrinks while predictions hold. A step far off the line means that the workload
has changed, and the line begins anew.

`HeavySteps` are validation every n steps, or an optimiser that steps every k-th time: such steps
come after equal numbers of ordinary ones. Once two equal gaps were seen, the next one is expected
and can be run smaller. Those that come irregularly, and more than once a minute, are reckoned with
in every step.

Does not know how much memory there is, and decides no size.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from workers.policy.memory_seen import MINUTE_S
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
_FADE_S: Final = 25 * MINUTE_S

#: What deviates by more, as no workspace does, is a step that has changed.
_JUMP: Final = 0.08

#: After a failure the margin is this much of what it was; never more than this in all.
_SURPRISED: Final = 1.3
_LARGEST_SURPRISE: Final = 0.5

#: What differs by no larger share is alike: two sizes are one place, two amounts are the same.
NEAR: Final = 0.1

#: So many times as much is no wobble. A step that takes it once is heavy, and no change of the
#: workload, unless the next one takes as much.
MUCH_MORE: Final = 1.25

#: What has happened so often is no chance any more.
TWICE: Final = 2

#: Irregular heavy steps are reckoned with after so many within two minutes.
_OFTEN: Final = 3

#: Places of heavy steps that are remembered, to find a period among irregular ones.
_REMEMBERED: Final = 6

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
        return _ratio(self.far_x, self.here_x) > 1.0 + NEAR

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
        return self.is_here(x) or (self.has_slope and not self.is_beyond(x))

    def is_here(self, x: float) -> bool:
        """Whether `x` is where the worker was last; while the slope is not known, only the very
        same size is.
        """
        near = self.has_slope and abs(x - self.here_x) <= NEAR * self.here_x
        return near or x == self.here_x

    def is_beyond(self, x: float) -> bool:
        """Whether nothing as large was ever measured."""
        return x > (1.0 + NEAR) * self._largest[0]

    def is_below(self, x: float) -> bool:
        """Whether nothing as small was ever measured."""
        return x < (1.0 - NEAR) * min(self.here_x, self.far_x)

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


def with_peak(line: Footprint | None, x: float, peak_bytes: float, at_s: float) -> Footprint:
    """Return the line after a step of `x` that took `peak_bytes` and ended at `at_s`."""
    if line is None:
        return first_footprint(x, peak_bytes, at_s)
    peak_bytes = max(1.0, peak_bytes)
    deviation = peak_bytes / max(1.0, line.bytes_at(x)) - 1.0
    stayed, predicted = line.is_here(x), line.predicts(x)
    # While the slope is not known, peaks of one size are smoothed, unless one is twice another.
    has_changed = (
        abs(deviation) > _JUMP
        if line.has_slope
        else _ratio(peak_bytes, max(1.0, line.bytes_at(x))) > 2.0
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
    if _ratio(far_x, x) > 1.0 + NEAR:
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


class HeavySteps(NamedTuple):
    """What is known of them; an immutable value, changed with `_replace`."""

    ordinary: int = 0
    """Ordinary steps so far."""
    places: tuple[int, ...] = ()
    """Where the last few heavy ones came, as the ordinary steps before each."""
    at_s: tuple[float, ...] = ()
    """When they came."""
    period: int | None = None
    """Ordinary steps between two that come regularly."""
    due: int = 0
    """Where the next of these is expected, at the latest."""
    slack: int = 0
    """Steps since the last heavy one that failed for another reason: some workloads count them, and
    some do not.
    """
    misses: int = 0
    confirmed: bool = False
    """Whether one came when it was due."""
    ratio: float = 1.0
    """A heavy step takes so many times what an ordinary one of its size takes, as far as is known.
    """
    failed: bool = False
    """Whether the last step was heavy and failed: it may be tried again at once."""
    streak: bool = False
    """Whether the last step was heavy and ended well."""

    @property
    def is_due(self) -> bool:
        """Whether the next step is expected to be heavy."""
        return self.period is not None and (
            self.failed or self.due - self.slack <= self.ordinary <= self.due
        )

    def factor(self, now_s: float) -> float:
        """Return how many times an ordinary step's memory the next one may take."""
        if self.period is not None:
            return self.ratio if self.is_due else 1.0
        often = len(self.at_s) >= _OFTEN and now_s - self.at_s[-_OFTEN] < 2 * MINUTE_S
        return self.ratio if often else 1.0

    def met(self, at_s: float, ratio: float, *, failed: bool) -> HeavySteps:
        """Return what is known after a heavy step that took, or would have taken, so many times the
        memory.
        """
        if failed:
            ratio = max(ratio, self.ratio * (2.0 if self.is_due else 1.0))
        if self.failed:  # the same one again
            return self._replace(ratio=ratio, failed=failed, streak=not failed)
        places = (*self.places, self.ordinary)[-_REMEMBERED:]
        period, due, misses, confirmed = self.period, self.due, self.misses, self.confirmed
        distance = _period(places)
        if distance is not None and (period is None or distance < period):
            period, due, misses = distance, self.ordinary + distance, 0
        elif period is not None and (self.is_due or self.ordinary - self.places[-1] == period):
            due, misses, confirmed = self.ordinary + period, 0, True
        return HeavySteps(
            ordinary=self.ordinary,
            places=places,
            at_s=(*self.at_s, at_s)[-_REMEMBERED:],
            period=period,
            due=due,
            misses=misses,
            confirmed=confirmed,
            ratio=ratio,
            failed=failed,
            streak=not failed,
        )

    def passed(self, *, failed: bool = False) -> HeavySteps:
        """Return what is known after an ordinary step.

        `failed`: for another reason than its weight.
        """
        if failed:
            return self._replace(slack=self.slack + 1, streak=False)
        if self.period is None or self.ordinary < self.due or self.failed:
            return self._replace(ordinary=self.ordinary + 1, failed=False, streak=False)
        if self.misses + 1 >= TWICE:
            return HeavySteps(ordinary=self.ordinary + 1, places=self.places, ratio=self.ratio)
        return self._replace(
            ordinary=self.ordinary + 1,
            due=self.due + self.period * (1 + (self.ordinary - self.due) // self.period),
            slack=0,
            misses=self.misses + 1,
            failed=False,
            streak=False,
        )


def _period(places: tuple[int, ...]) -> int | None:
    """Return the distance of the last place from one before it, if another one is as far before
    that.
    """
    *earlier, last = places
    return next(
        (
            last - place
            for place in reversed(earlier)
            if 2 * place - last in earlier and place < last
        ),
        None,
    )
