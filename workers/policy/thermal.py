"""The thermal governor: readings of a card's sensors in, the share of time in which a worker may
use it out.

A proportional band with automatic reset, and a pause at the critical temperature. Does not read
sensors, sleep, or set anything on the card: NVML's setters need root, a duty does not. Knows
nothing of the other workers on its card; each runs its own governor on the same temperature. Pure:
time comes with the readings.

Bands, by the guides' numbers::

    NORMAL    < 70 C    BOOST: all of the time
    WARM      70 to 78  MAINTAIN: the duty stays, or grows back; less if the card warms fast
    HOT       78 to 83  REDUCE: the duty settles where the temperature stays below 83 C
    CRITICAL  >= 83     paused until below 75

A complaint of the hardware counts as HOT at least, and takes duty as long as it stands.

The *logarithm* of the duty falls in proportion to the temperature, and is reset slowly until the
temperature is at its aim. By the logarithm workers that share a card shrink in proportion, and one
gain fits one worker as well as seven, whose heat differs by a factor of 25 for the same change of
duty. Each reading adds to it, so that clipping the sum leaves nothing to unwind. One brake looks
ahead along the slope, for the card that would pass the ceiling before the reset has acted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from workers.policy.card_alarms import AlarmState, CardAlarm
from workers.readings import SensorReading
from workers.settings import COLDEST_C, HOTTEST_C, ThermalSettings

#: Relative duty per degree, and how long the reset takes to do the same again.
_GAIN_PER_C: Final = 0.02
_RESET_S: Final = 90.0
#: Over what a reading is smoothed (twice a sensor's lag), and from what the slope is taken.
_SMOOTH_S: Final = 3.0
_SLOPE_S: Final = 12.0
#: The brake: how far it looks ahead, and how hard it acts for each degree above the ceiling there.
_AHEAD_S: Final = 60.0
_BRAKE_PER_C_S: Final = 0.01
#: The aim lies further below the ceiling the more single readings stand above the smoothed ones: by
#: half the quantum of a sensor that reports whole degrees, and this factor.
_HALF_DEGREE_C: Final = 0.5
_STANDS_OUT: Final = 1.3
_MOST_SPREAD_C: Final = 3.0
_REMEMBERED_S: Final = 600.0

#: What a complaint of the hardware takes for as long as it stands, and what a pause takes once.
_COMPLAINT_PER_S: Final = 0.1
_AFTER_PAUSE: Final = 0.8
#: What the law may take of the duty at most while the card is cool. It shows once the card is warm.
_LEAST_WHILE_COOL: Final = 0.5
#: The last reading of a silent sensor stays valid for so long; then a reduced duty grows back.
_SILENCE_S: Final = 10.0
_GROWTH_PER_S: Final = 0.02
#: After a longer gap a reading counts as if it came this much after the last one.
_LONGEST_STEP_S: Final = 5.0
#: Width of the hot band if `critical_c` is off: the guides'.
_HOT_BAND_C: Final = 5.0


class ThermalBand(StrEnum):
    """How warm a card is, in the guides' words."""

    NORMAL = "NORMAL"
    WARM = "WARM"
    HOT = "HOT"
    CRITICAL = "CRITICAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalDecision:
    """How much a worker may use its card until the next reading."""

    band: ThermalBand | None
    """`None`: the temperature is unknown, or the governor is off."""
    duty: float
    """Share of wall time in which the worker may keep the device busy, of what it may otherwise; 0
    is a pause.
    """
    reason: str
    """In words, for the health table."""
    alarms: tuple[CardAlarm, ...] = ()
    """Those that were raised or cleared by this event."""

    @property
    def paused(self) -> bool:
        """Whether no step may run."""
        return self.duty <= 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalState:
    """What the governor remembers."""

    band: ThermalBand | None = None
    """By temperature alone."""
    temperature_c: float | None = None
    """The last reading, for as long as it is valid."""
    told_at_s: float = -math.inf
    """When that was."""
    critical_at_s: float = -math.inf
    """When the temperature was critical last."""
    log_duty: float = 0.0
    """Logarithm of the duty: 0 is all of the time."""
    at_s: float | None = None
    """When the last reading came; `None` before the first one."""
    smooth_c: float | None = None
    slow_c: float = 0.0
    """The smoothed temperature, smoothed once more: their distance is the slope."""
    spread_c: float = 0.0
    """How far a single reading stood above the smoothed temperature lately."""
    alarms: AlarmState = field(default_factory=AlarmState)


_OFF: Final = ThermalDecision(band=None, duty=1.0, reason="thermal limits are off")


class ThermalGovernor:
    """Turns sensor readings into a duty; a pure reducer, like the memory policies."""

    def __init__(self, settings: ThermalSettings) -> None:
        self._settings = settings
        self._resume_c = settings.resume_c
        if settings.critical_c is not None and settings.resume_c is None:
            self._resume_c = settings.critical_c - settings.hysteresis_c
        self._hot_c = HOTTEST_C if settings.hot_c is None else settings.hot_c
        self._ceiling_c = settings.critical_c or self._hot_c + _HOT_BAND_C
        # Without a hot band the duty is never reduced.
        self._smallest_duty = 1.0 if settings.hot_c is None else settings.smallest_duty

    def initial(self) -> ThermalState:
        """Return the state before the first reading."""
        return ThermalState()

    def after_bandwidth(
        self, state: ThermalState, bytes_per_s: float, clock_mhz: int, at_s: float
    ) -> tuple[ThermalState, ThermalDecision]:
        """Return the state after a measurement of the memory's bandwidth, and what to do.

        See `after_reading`.
        """
        if self._settings.off:
            return state, _OFF
        drop = self._settings.alarming_bandwidth_drop
        alarm_state, alarms = state.alarms.after_bandwidth(bytes_per_s, clock_mhz, at_s, drop)
        state = replace(state, alarms=alarm_state)
        return state, self._decision(state, alarms)

    def after_reading(
        self, state: ThermalState, reading: SensorReading, at_s: float
    ) -> tuple[ThermalState, ThermalDecision]:
        """Return the state after a reading at `at_s` (monotonic seconds), and what to do until the
        next one.

        Equal arguments give equal results.
        """
        if self._settings.off:
            return state, _OFF
        passed_s = 0.0 if state.at_s is None else min(_LONGEST_STEP_S, max(0.0, at_s - state.at_s))
        alarm_state, alarms = state.alarms.after_reading(reading, at_s)
        state = replace(state, alarms=alarm_state, at_s=max(at_s, state.at_s or at_s))
        told_c = reading.temperature_c
        # A temperature that no running card can have, NaN included, is unknown.
        if told_c is not None and COLDEST_C < told_c < HOTTEST_C:
            state = self._followed(self._in_band(state, told_c, at_s), told_c, passed_s)
        elif at_s - state.told_at_s >= _SILENCE_S:
            log_duty = state.log_duty + _GROWTH_PER_S * passed_s
            if state.band is ThermalBand.CRITICAL:  # and may still be
                log_duty = math.log(self._smallest_duty)
            state = replace(state, band=None, temperature_c=None, smooth_c=None, log_duty=log_duty)
        log_duty = state.log_duty
        if alarm_state.complains:
            log_duty -= _COMPLAINT_PER_S * max(1.0, passed_s)
        least = _LEAST_WHILE_COOL if self._cool(state) else 0.0
        log_duty = min(0.0, max(math.log(max(least, self._smallest_duty)), log_duty))
        state = replace(state, log_duty=log_duty)
        return state, self._decision(state, alarms)

    def _in_band(self, state: ThermalState, temperature_c: float, at_s: float) -> ThermalState:
        """Return the state with the band of a new temperature."""
        settings, before = self._settings, state.band
        state = replace(state, temperature_c=temperature_c, told_at_s=at_s)
        if settings.critical_c is not None and temperature_c >= settings.critical_c:
            taken = 0.0 if before is ThermalBand.CRITICAL else math.log(_AFTER_PAUSE)
            return replace(
                state,
                band=ThermalBand.CRITICAL,
                critical_at_s=at_s,
                log_duty=state.log_duty + taken,
            )
        if before is ThermalBand.CRITICAL and self._resume_c is not None:
            patience_s = settings.longest_pause_s
            waits = patience_s is None or at_s - state.critical_at_s < patience_s
            if temperature_c >= self._resume_c and waits:
                return state
        for band, from_c, stays in (
            (ThermalBand.HOT, settings.hot_c, before is ThermalBand.HOT),
            (ThermalBand.WARM, settings.warm_c, before in {ThermalBand.HOT, ThermalBand.WARM}),
        ):
            if from_c is not None and temperature_c >= from_c - stays * settings.hysteresis_c:
                return replace(state, band=band)
        return replace(state, band=ThermalBand.NORMAL)

    def _followed(self, state: ThermalState, temperature_c: float, passed_s: float) -> ThermalState:
        """Return the state that has followed a temperature and, unless paused, answered it."""
        if state.smooth_c is None:
            return replace(state, smooth_c=temperature_c, slow_c=temperature_c)
        smooth_c = _toward(state.smooth_c, temperature_c, passed_s, _SMOOTH_S)
        slow_c = _toward(state.slow_c, smooth_c, passed_s, _SLOPE_S)
        spread_c = max(
            _toward(state.spread_c, 0.0, passed_s, _REMEMBERED_S), temperature_c - smooth_c
        )
        followed = replace(
            state, smooth_c=smooth_c, slow_c=slow_c, spread_c=min(_MOST_SPREAD_C, spread_c)
        )
        if state.band is ThermalBand.CRITICAL:  # nothing runs: it says nothing about the duty
            return followed
        per_s = _GAIN_PER_C / _RESET_S * (smooth_c - self._aim_c(followed))
        ahead_c = smooth_c + _AHEAD_S * (smooth_c - slow_c) / _SLOPE_S
        per_s += _BRAKE_PER_C_S * max(0.0, ahead_c - self._ceiling_c)
        taken = _GAIN_PER_C * (smooth_c - state.smooth_c) + per_s * passed_s
        return replace(followed, log_duty=state.log_duty - taken)

    def _aim_c(self, state: ThermalState) -> float:
        """Return the temperature that is held."""
        noise_c = _HALF_DEGREE_C + _STANDS_OUT * state.spread_c
        return max(self._hot_c, self._ceiling_c - max(self._settings.margin_c, noise_c))

    def _cool(self, state: ThermalState) -> bool:
        """Whether the card may be used all of the time, whatever the law says."""
        warm_c, told_c = self._settings.warm_c, state.temperature_c
        cool = warm_c is not None and told_c is not None and told_c < warm_c
        # A complaint below `warm_c` has another cause than the die's heat.
        return cool and not state.alarms.of_hardware

    def _decision(self, state: ThermalState, alarms: tuple[CardAlarm, ...]) -> ThermalDecision:
        band, duty = state.band, 1.0 if self._cool(state) else math.exp(state.log_duty)
        told = "temperature unknown"
        if state.temperature_c is not None:
            told = f"{state.temperature_c:.0f} C"
        if band is ThermalBand.CRITICAL:
            duty, words = 0.0, f"paused at {told}, goes on below {self._resume_c:g} C"
        else:
            band = ThermalBand.HOT if state.alarms.complains else band
            words = told if band is None else f"{told}, {_action(band, duty)}"
            if duty <= 1.001 * self._smallest_duty < 1.0:
                words += f", at the smallest duty of {duty:.0%}: other work heats the card, or "
                words += "its cooling fails"
            elif duty < 1.0:
                words += f", duty {duty:.0%}"
                if state.temperature_c is not None:
                    words += f" to hold {self._aim_c(state):.1f} C"
        reason = "; ".join((words, *state.alarms.standing))
        return ThermalDecision(band=band, duty=duty, reason=reason, alarms=alarms)


def _toward(old: float, new: float, passed_s: float, time_s: float) -> float:
    return old + (new - old) * passed_s / (passed_s + time_s)


def _action(band: ThermalBand, duty: float) -> str:
    """Return the guides' word for what is done."""
    if band is ThermalBand.HOT:
        return "REDUCE"
    return "BOOST" if band is ThermalBand.NORMAL and duty >= 1.0 else "MAINTAIN"
