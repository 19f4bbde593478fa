"""The control law of the thermal governor: the duty that holds a card's temperature, with unknown
cooling.

A PI law on the *logarithm* of the duty, in its incremental form. Does not know bands and pauses
(`governor`), alarms (`alarms`), nor how a duty becomes sleep (the engine). Pure: time comes with
the readings.

Theory:

- Why the logarithm. Several workers on a card run this law side by side, on the same temperature,
and share the card:
  the device is busy for 1 − Π(1 − duty) of the time when they fill each other's gaps, for their
  mean when they do not. From one worker to seven, the heat that a change of duty makes differs by a
  factor of 25; the heat that a *relative* change makes differs by 5. One gain then fits all,
  without knowing who else is there, and workers that share a card shrink in proportion.
- Why increments. Each reading adds to the duty; the bounds clip the sum, so that nothing is left to
unwind when a
  card that was cool for an hour gets hot.
- Gain and time. The gain is low enough for a card that answers within 10 s through a sensor that
lags by 3 s; the
  integral's time is long enough for one that takes 200 s. (With gain K, time constant T: damping
  (1 + K·k) / (2·√(T·K·k / Ti)), which is above 0.7 for K of 14 to 66 C, T of 10 to 200 s.)
- What a constant gain cannot do is done by three one-sided terms, none of which moves in the steady
state: two brakes
  look ahead along the slope and act when that ends above the ceiling; growth acts when it ends
  below the hot band.
- The aim is a margin below the ceiling. Sensors report whole degrees, so a margin of 1.5 C keeps
the reading flickering
  between two values of which neither is the ceiling; the more single readings stand out, the wider
  the margin.

Each term falls, or stays, when the newest reading is higher: for equal history the duty is monotone
in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

#: Relative duty per degree.
_GAIN_PER_C: Final = 0.02
_INTEGRAL_S: Final = 90.0
#: Over what a reading is smoothed: twice a sensor's lag.
_SMOOTH_S: Final = 3.0
#: The other smoothing times, whose distance from the first is the slope: for cards that answer
#: quickly, and slowly.
_QUICK_SLOPE_S: Final = 3.0
_SLOW_SLOPE_S: Final = 15.0

#: The brakes: how far they look ahead, and how hard they act for each degree above the ceiling
#: there.
_NEAR_S: Final = 6.0
_NEAR_PER_C_S: Final = 0.03
#: Half the quantum of a sensor that reports whole degrees.
_HALF_DEGREE_C: Final = 0.5
_FAR_S: Final = 60.0
_FAR_PER_C_S: Final = 0.009

#: Growth below the hot band, for each degree that is missing to it, and at the most: back from 5 %
#: within 150 s.
_GROWTH_PER_C_S: Final = 0.002
_MOST_GROWTH_PER_S: Final = 0.02
#: How far below the aim that ends.
_NEARLY_THERE_C: Final = 1.5
#: Growth on a hot card, back to what a worker had before its neighbours took its share.
_RETURN_PER_S: Final = 0.006
#: From this far above the aim the duty falls faster.
_TOLERATED_C: Final = 0.25
_PRESS_PER_C_S: Final = 0.002
#: What an alarm of the hardware takes at once (the guides' step), and for as long as it stands.
_ALARM_STEP: Final = 0.8
_ALARM_PER_S: Final = 0.05

#: What the law may take of the duty at most while the card is cool. It shows once the card is warm.
_LEAST_WHILE_COOL: Final = 0.5

#: How much of a reading that stands out counts for the margin, and for how long it is remembered.
_STANDS_OUT: Final = 1.3
_MOST_STANDING_OUT_C: Final = 3.0
_REMEMBERED_S: Final = 600.0

#: After a longer gap a reading counts as if it came this much after the last one.
_LONGEST_STEP_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DutyBounds:
    """What the law holds a card between."""

    hot_c: float
    """Below, a reduced duty grows back quickly."""
    ceiling_c: float
    """What no reading shall reach."""
    margin_c: float
    """The aim lies at least this far below the ceiling, but never below `hot_c`."""
    smallest_duty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DutyState:
    """What the law remembers of the readings so far."""

    log_duty: float = 0.0
    """Logarithm of the duty: 0 is all of the time."""
    at_s: float | None = None
    """When the last reading was taken; `None` before the first one."""
    smooth_c: float | None = None
    quick_c: float = 0.0
    """The smoothed temperature, smoothed once more; so is `slow_c`."""
    slow_c: float = 0.0
    stands_out_c: float = 0.0
    """How far a single reading stood above the smoothed temperature lately."""
    alarmed: bool = False
    """Whether the hardware complained at the last reading."""
    back_to_log_duty: float = -math.inf
    """Up to here the duty may return at the rate of growth, although the card is hot; see
    `restarted`.
    """

    @property
    def duty(self) -> float:
        """Share of wall time, above 0 and at most 1."""
        return math.exp(self.log_duty)


def aim_c(state: DutyState, bounds: DutyBounds) -> float:
    """Return the temperature that the law holds."""
    margin_c = max(bounds.margin_c, _HALF_DEGREE_C + _STANDS_OUT * state.stands_out_c)
    return max(bounds.hot_c, bounds.ceiling_c - margin_c)


def after_reading(
    state: DutyState,
    bounds: DutyBounds,
    temperature_c: float | None,
    at_s: float,
    *,
    paused: bool,
    alarmed: bool,
) -> DutyState:
    """Return the state after a reading.

    Args:
        state: Before it.
        bounds: What to hold.
        temperature_c: A finite number; `None` if it is unknown, then only the hardware's complaints
        count.
        at_s: When it was taken, in monotonic seconds; a reading from before the last one moves
        nothing but the steps
            that need no time.
        paused: Whether nothing runs, so that the temperature says nothing about the duty: it is
        followed, not answered.
        alarmed: Whether the hardware complains.
    """
    passed_s = 0.0 if state.at_s is None else min(_LONGEST_STEP_S, max(0.0, at_s - state.at_s))
    change = 0.0
    if temperature_c is not None:
        before_c = state.smooth_c
        state = _followed(state, temperature_c, passed_s)
        if before_c is not None and not paused and state.smooth_c is not None:
            change = _change(state, bounds, temperature_c, state.smooth_c - before_c, passed_s)
    elif not alarmed:
        change = _MOST_GROWTH_PER_S * passed_s
    if alarmed:
        change = min(0.0, change) - _ALARM_PER_S * passed_s
        if not state.alarmed:
            change += math.log(_ALARM_STEP)
    log_duty = _clipped(state.log_duty + change, bounds)
    latest_s = at_s if state.at_s is None else max(state.at_s, at_s)
    return replace(state, log_duty=log_duty, at_s=latest_s, alarmed=alarmed)


def lowered(state: DutyState, bounds: DutyBounds) -> DutyState:
    """Return the state after the ceiling was reached: it goes on with less when it goes on."""
    return replace(state, log_duty=_clipped(state.log_duty + math.log(_ALARM_STEP), bounds))


def restarted(state: DutyState, bounds: DutyBounds) -> DutyState:
    """Return the state of one that begins at the smallest duty on a hot card, and grows back to
    what it had.

    For a worker whose neighbours on the card continued while it was paused, and took its share:
    they reduce their duty slowly, as the temperature changes.
    """
    return replace(state, log_duty=math.log(bounds.smallest_duty), back_to_log_duty=state.log_duty)


def while_cool(state: DutyState) -> DutyState:
    """Return the state of a card so cool that it is used all of the time whatever the law says.

    What the brakes have taken meanwhile keeps a card that warms fast from going too high, but too
    much of it would be missing for minutes.
    """
    return replace(state, log_duty=max(math.log(_LEAST_WHILE_COOL), state.log_duty))


def _followed(state: DutyState, temperature_c: float, passed_s: float) -> DutyState:
    if state.smooth_c is None:
        return replace(state, smooth_c=temperature_c, quick_c=temperature_c, slow_c=temperature_c)
    smooth_c = _toward(state.smooth_c, temperature_c, passed_s, _SMOOTH_S)
    faded_c = state.stands_out_c * (1.0 - passed_s / (passed_s + _REMEMBERED_S))
    return replace(
        state,
        smooth_c=smooth_c,
        quick_c=_toward(state.quick_c, smooth_c, passed_s, _QUICK_SLOPE_S),
        slow_c=_toward(state.slow_c, smooth_c, passed_s, _SLOW_SLOPE_S),
        stands_out_c=min(_MOST_STANDING_OUT_C, max(faded_c, temperature_c - smooth_c)),
    )


def _toward(old: float, new: float, passed_s: float, time_s: float) -> float:
    return old + (new - old) * passed_s / (passed_s + time_s)


def _change(
    state: DutyState, bounds: DutyBounds, temperature_c: float, moved_c: float, passed_s: float
) -> float:
    """Return by how much the logarithm of the duty changes."""
    smooth_c = temperature_c if state.smooth_c is None else state.smooth_c
    above_aim_c = smooth_c - aim_c(state, bounds)
    quick_c_per_s = (smooth_c - state.quick_c) / _QUICK_SLOPE_S
    slow_c_per_s = (smooth_c - state.slow_c) / _SLOW_SLOPE_S

    near_c = temperature_c + _NEAR_S * quick_c_per_s - (bounds.ceiling_c - _HALF_DEGREE_C)
    far_c = smooth_c + _FAR_S * slow_c_per_s - bounds.ceiling_c
    below_c = (
        aim_c(state, bounds)
        - _NEARLY_THERE_C
        - max(smooth_c, smooth_c + _INTEGRAL_S * quick_c_per_s)
    )

    per_s = -_GAIN_PER_C / _INTEGRAL_S * above_aim_c
    per_s -= _NEAR_PER_C_S * max(0.0, near_c) + _FAR_PER_C_S * max(0.0, far_c)
    per_s -= _PRESS_PER_C_S * max(0.0, above_aim_c - _TOLERATED_C)
    per_s += min(_MOST_GROWTH_PER_S, _GROWTH_PER_C_S * max(0.0, below_c))
    if state.log_duty < state.back_to_log_duty and above_aim_c < 0.0:
        per_s += _RETURN_PER_S
    return per_s * passed_s - _GAIN_PER_C * moved_c


def _clipped(log_duty: float, bounds: DutyBounds) -> float:
    return min(0.0, max(math.log(bounds.smallest_duty), log_duty))
