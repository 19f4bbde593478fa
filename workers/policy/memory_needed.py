"""Memory needed: how much memory a step of each size takes, and which steps take far more.

`Footprint` is learned from the peaks of successful steps: a line in x = size^power (power 2 for the
n of an n x n product, 1 for a batch). The line goes through two measured points: the present one,
smoothed, and the farthest one. Its margin covers what steps took beyond the line: it grows when a
prediction fails and shrinks while predictions hold. A step far off the line means that the workload
has changed; then learning starts again.

`HeavySteps` tracks steps such as validation every n steps, or an optimiser that updates every k-th
step: they come after equal numbers of ordinary steps. After two equal gaps the next heavy step is
predicted and can run at a smaller size. If heavy steps come irregularly and more than once a
minute, every step is sized for them.

Does not know how much memory is available, and decides no size.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from workers.policy.memory_seen import MINUTE_S
from workers.settings import Learned

#: Smoothing factor of peaks: the share of a deviation by which one peak moves the present point.
_FOLLOW: Final = 0.1

#: Smoothing factor of the mean deviation.
_SPREAD_FOLLOW: Final = 0.03

#: The margin in mean deviations. A step that varies uniformly by +-w deviates by w/2 on average, so
#: 2 would just cover it; a failure costs ten times as much as the rest of the margin.
_COVERS: Final = 2.5

#: Mean deviation assumed before any measurement, and the lower bound of its estimate.
_FIRST_SPREAD: Final = 0.007
_LEAST_SPREAD: Final = 0.0004

#: Time in which a surprise beyond the margin decays, to 1/e.
_FADE_S: Final = 25 * MINUTE_S

#: A larger deviation means that the step has changed: no workspace causes so much.
_JUMP: Final = 0.08

#: An unexplained failure multiplies the margin by the first, up to the second.
_SURPRISED: Final = 1.3
_LARGEST_SURPRISE: Final = 0.5

#: Two sizes, or two amounts of memory, count as equal if they differ by at most this share.
NEAR: Final = 0.1

#: A step that takes this many times the predicted memory is heavy. If the next one takes as much,
#: the workload has changed.
MUCH_MORE: Final = 1.25

#: This many equal observations count as a fact, not as chance.
CONFIRMATIONS: Final = 2

#: Irregular heavy steps within two minutes after which every step is sized for them.
_OFTEN: Final = 3

#: Number of recent heavy steps that are searched for a period.
_REMEMBERED: Final = 6

#: Least share of a step's memory that is assumed to grow with its size, so that a flat line does
#: not predict that every size fits.
_LEAST_GROWING_SHARE: Final = 0.05


class Footprint(NamedTuple):
    """Bytes of a step as a function of x = size^power.

    An immutable value, changed with `_replace`.
    """

    here_x: float
    here_bytes: float
    """The present point: where the worker was last, smoothed over the steps there."""
    far_x: float
    far_bytes: float
    """The measured point farthest from `here`; `here` itself while there is only one."""
    unit_bytes: float
    """Growth per unit of x."""
    spread: float = _FIRST_SPREAD
    """Mean deviation of a peak from the line, as a share."""
    surprise: float = 0.0
    """The last deviation beyond the margin, as a share; it decays."""
    steps: int = 1
    """Steps measured in a row at `here`."""
    at_s: float = 0.0
    """Time of the last measured peak."""
    fits_here: bool = True
    """Whether no step has run out of memory since the last success at `here`."""

    @property
    def has_slope(self) -> bool:
        """Whether the line goes through two points that are far enough apart."""
        return _ratio(self.far_x, self.here_x) > 1.0 + NEAR

    @property
    def margin(self) -> float:
        """Share by which a step may exceed the line."""
        return max(_COVERS * self.spread, self.surprise)

    @property
    def here_need_bytes(self) -> float:
        """Memory of a step at `here`, ordinary variation included. Surprises elsewhere do not
        count, because steps at `here` were measured.
        """
        return self.here_bytes * (1.0 + _COVERS * self.spread)

    @property
    def fixed_bytes(self) -> float:
        """Predicted memory of a step of size 0; never negative."""
        return max(0.0, self.here_bytes - self.unit_bytes * self.here_x)

    def bytes_at(self, x: float) -> float:
        """Return the predicted peak, without the margin."""
        return max(0.0, self.here_bytes + self.unit_bytes * (x - self.here_x))

    def largest_x(self, limit_bytes: float) -> float:
        """Return the x whose predicted peak, margin included, is `limit_bytes`; negative if nothing
        fits.

        A line through small steps may be too flat, because the optimiser's memory hides theirs. A
        step k times as large takes at most k times the memory; beyond the measured points the
        prediction uses that bound. At `here`, where steps succeed, a surprise elsewhere does not
        count.
        """
        on_the_line = self.extrapolated_x(limit_bytes)
        if self.fits_here and limit_bytes >= self.here_need_bytes:
            on_the_line = max(on_the_line, self.here_x)
        most_x, most_bytes = self._largest
        if on_the_line <= most_x:
            return on_the_line
        return min(
            on_the_line,
            max(most_x, most_x / max(1.0, most_bytes) * limit_bytes / (1.0 + self.margin)),
        )

    def extrapolated_x(self, limit_bytes: float) -> float:
        """Return the x at which the line plus margin reaches `limit_bytes`, at any distance."""
        return self.here_x + (limit_bytes / (1.0 + self.margin) - self.here_bytes) / self.unit_bytes

    def predicts(self, x: float) -> bool:
        """Return whether a peak at `x` can be compared with the line.

        Beyond the measured points the line is only a bound.
        """
        return self.is_here(x) or (self.has_slope and not self.is_beyond(x))

    def is_here(self, x: float) -> bool:
        """Return whether `x` is near `here`, or equal to it while the slope is unknown."""
        near = self.has_slope and abs(x - self.here_x) <= NEAR * self.here_x
        return near or x == self.here_x

    def is_beyond(self, x: float) -> bool:
        """Return whether no size as large was measured."""
        return x > (1.0 + NEAR) * self._largest[0]

    def is_below(self, x: float) -> bool:
        """Return whether no size as small was measured."""
        return x < (1.0 - NEAR) * min(self.here_x, self.far_x)

    @property
    def _largest(self) -> tuple[float, float]:
        """The larger of the two points."""
        return (
            (self.here_x, self.here_bytes)
            if self.here_x >= self.far_x
            else (self.far_x, self.far_bytes)
        )

    def after_surprise(self, x: float, limit_bytes: float) -> Footprint:
        """Return the line after a step of `x` did not fit into `limit_bytes` against its
        prediction.
        """
        beyond = limit_bytes / max(1.0, self.bytes_at(x)) - 1.0
        surprise = min(_LARGEST_SURPRISE, max(self.margin, beyond) * _SURPRISED + _LEAST_SPREAD)
        return self._replace(surprise=surprise, fits_here=False)


def first_footprint(x: float, peak_bytes: float, at_s: float = 0.0) -> Footprint:
    """Return the line through one peak and the origin: it overestimates every larger step."""
    peak_bytes = max(1.0, peak_bytes)
    return Footprint(x, peak_bytes, x, peak_bytes, unit_bytes=peak_bytes / x, at_s=at_s)


def footprint_of(learned: Learned, power: float) -> Footprint | None:
    """Return the line that an earlier run learned; `None` if it measured no peak."""
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
    # While the slope is unknown, peaks of one size are smoothed unless one is twice another.
    has_changed = (
        abs(deviation) > _JUMP
        if line.has_slope
        else _ratio(peak_bytes, max(1.0, line.bytes_at(x))) > 2.0
    )
    if predicted and has_changed:
        # The workload has changed: no measured point is valid any more.
        return first_footprint(x, peak_bytes, at_s)._replace(spread=line.spread)
    here_bytes, far_x, far_bytes = peak_bytes, line.far_x, line.far_bytes
    if stayed:
        # Smoothed along the line, so that a slightly larger size does not look like a larger need.
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
        # Bounded, so that one extreme peak does not widen the margin for hours.
        spread = max(
            _LEAST_SPREAD,
            spread + _SPREAD_FOLLOW * (min(abs(deviation), _LARGEST_SURPRISE) - spread),
        )
        if deviation > line.margin:
            surprise = min(_LARGEST_SURPRISE, deviation)
    steps = line.steps + 1 if stayed else 1
    return Footprint(x, here_bytes, far_x, far_bytes, unit_bytes, spread, surprise, steps, at_s)


def _ratio(one: float, other: float) -> float:
    """Return the larger of two numbers divided by the smaller."""
    return one / other if one > other else other / one


class HeavySteps(NamedTuple):
    """The heavy steps so far and their period; an immutable value, changed with `_replace`."""

    ordinary: int = 0
    """Number of ordinary steps so far."""
    places: tuple[int, ...] = ()
    """Positions of the last heavy steps, as the number of ordinary steps before each."""
    at_s: tuple[float, ...] = ()
    """Times of these heavy steps."""
    period: int | None = None
    """Ordinary steps between two heavy ones that come regularly."""
    due: int = 0
    """Latest position of the next regular heavy step."""
    slack: int = 0
    """Ordinary steps that failed since the last heavy one. Some workloads count them towards the
    period and some do not, so the next heavy step may come this much earlier.
    """
    misses: int = 0
    confirmed: bool = False
    """Whether a heavy step came when it was due."""
    ratio: float = 1.0
    """Memory of a heavy step as a multiple of an ordinary one of the same size, as far as known."""
    failed: bool = False
    """Whether the last step was heavy and failed; the workload may retry it at once."""
    streak: bool = False
    """Whether the last step was heavy and succeeded."""

    @property
    def is_due(self) -> bool:
        """Whether the next step is expected to be heavy."""
        return self.period is not None and (
            self.failed or self.due - self.slack <= self.ordinary <= self.due
        )

    def factor(self, now_s: float) -> float:
        """Return the memory that the next step may take, as a multiple of an ordinary step's."""
        if self.period is not None:
            return self.ratio if self.is_due else 1.0
        often = len(self.at_s) >= _OFTEN and now_s - self.at_s[-_OFTEN] < 2 * MINUTE_S
        return self.ratio if often else 1.0

    def after_heavy(self, at_s: float, ratio: float, *, failed: bool) -> HeavySteps:
        """Return the state after a heavy step; `ratio`: its memory as a multiple of an ordinary
        step's.
        """
        if failed:
            ratio = max(ratio, self.ratio * (2.0 if self.is_due else 1.0))
        if self.failed:  # a retry of the same step
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

    def after_ordinary(self, *, failed: bool = False) -> HeavySteps:
        """Return the state after an ordinary step.

        `failed`: it failed without being heavy.
        """
        if failed:
            return self._replace(slack=self.slack + 1, streak=False)
        if self.period is None or self.ordinary < self.due or self.failed:
            return self._replace(ordinary=self.ordinary + 1, failed=False, streak=False)
        if self.misses + 1 >= CONFIRMATIONS:
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
    """Return the distance from an earlier place to the last one, if another place lies at the same
    distance before the earlier one; else `None`.
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
