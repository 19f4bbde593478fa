"""The thermal governor: turns readings of a card's sensors into a duty, the share of time in which
a worker may use the card.

A proportional band with automatic reset (a PI controller), and a pause at the critical temperature.
Does not read sensors, sleep, or change settings of the card: NVML's setters need root, a duty does
not. Each worker on a card runs its own governor on the same temperature. Pure: the readings come
with their time.

Bands, by the guides' numbers::

    NORMAL    < 70 C    BOOST: all of the time
    WARM      70 to 78  MAINTAIN: the duty stays, or grows back; less if the card warms fast
    HOT       78 to 83  REDUCE: the duty settles where the temperature stays below 83 C
    CRITICAL  >= 83     paused until below 75

A fault that the hardware reports counts at least as HOT, and reduces the duty as long as it lasts.

The *logarithm* of the duty falls in proportion to the temperature, and is reset slowly until the
temperature is at its target. With the logarithm, workers that share a card shrink in proportion,
and one gain fits both one worker and seven, whose heat differs by a factor of 25 for the same
change of duty. Each reading adds an increment, so that clipping the sum causes no windup. A brake
extrapolates the slope, for a card that would pass the ceiling before the reset has acted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from workers.policy.card_alarms import CardAlarm, CardAlarms
from workers.readings import SensorReading
from workers.settings import COLDEST_C, HOTTEST_C, ThermalSettings

#: Hysteresis: a band is left only this far below its threshold.
_HYSTERESIS_C: Final = 2.0
#: The duty settles this far below `critical_c`, so that a reading in whole degrees does not reach
#: it by chance.
_MARGIN_C: Final = 1.5
#: Lowest duty of a hot card, unless it is paused.
_SMALLEST_DUTY: Final = 0.05
#: A pause also ends after the card was below `critical_c` for this time without reaching
#: `resume_c`: if other workers keep it warm, the pause would never end.
_LONGEST_PAUSE_S: Final = 120.0
#: Relative change of duty per degree, and the time in which the reset repeats it (integral time).
_GAIN_PER_C: Final = 0.02
_RESET_S: Final = 90.0
#: Time constants of the smoothed reading (twice a sensor's lag) and of the slope.
_SMOOTH_S: Final = 3.0
_SLOPE_S: Final = 12.0
#: The brake: how far it extrapolates, and its strength for each degree above the ceiling there.
_AHEAD_S: Final = 60.0
_BRAKE_PER_C_S: Final = 0.01

#: Reduction of the log duty per second of a hardware fault, and the factor that a pause applies
#: once.
_FAULT_PER_S: Final = 0.1
_AFTER_PAUSE: Final = 0.8
#: Lower bound of the stored duty while the card is cool; it is applied once the card is warm.
_LEAST_DUTY_WHILE_COOL: Final = 0.5
#: The last reading stays valid for this time if the sensor fails; then a reduced duty grows back.
_SILENCE_S: Final = 10.0
_GROWTH_PER_S: Final = 0.02
#: A longer gap between readings counts as this much.
_LONGEST_STEP_S: Final = 5.0
#: Width of the hot band if `critical_c` is off, as in the guides.
_HOT_BAND_C: Final = 5.0


class ThermalBand(StrEnum):
    """How warm a card is, with the names of the guides."""

    NORMAL = "NORMAL"
    WARM = "WARM"
    HOT = "HOT"
    CRITICAL = "CRITICAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalDecision:
    """How much a worker may use its card until the next reading."""

    band: ThermalBand | None
    """`None` if the temperature is unknown or the governor is off."""
    duty: float
    """Factor on the share of wall time in which the worker may keep the device busy; 0: pause."""
    reason: str
    """Text for the health table."""
    alarms: tuple[CardAlarm, ...] = ()
    """Alarms that this reading raised or cleared."""

    @property
    def paused(self) -> bool:
        """Whether no step may run."""
        return self.duty <= 0.0


_OFF: Final = ThermalDecision(band=None, duty=1.0, reason="thermal limits are off")


class ThermalGovernor:
    """Turns sensor readings into a duty. Equal readings at equal times give equal duties."""

    def __init__(self, settings: ThermalSettings) -> None:
        self._settings = settings
        self._resume_c = settings.resume_c
        if settings.critical_c is not None and settings.resume_c is None:
            self._resume_c = settings.critical_c - _HYSTERESIS_C
        hot_c = HOTTEST_C if settings.hot_c is None else settings.hot_c
        self._ceiling_c = settings.critical_c or hot_c + _HOT_BAND_C
        self._aim_c = max(hot_c, self._ceiling_c - _MARGIN_C)
        """The target temperature."""
        # Without a hot band the duty is never reduced.
        self._smallest_duty = 1.0 if settings.hot_c is None else _SMALLEST_DUTY
        self.alarms = CardAlarms()
        self._band: ThermalBand | None = None
        """The band by temperature alone."""
        self._temperature_c: float | None = None
        """The last reading, for as long as it is valid."""
        self._read_at_s = -math.inf
        """Time of that reading."""
        self._critical_at_s = -math.inf
        """Time of the last critical reading."""
        self._log_duty = 0.0
        """Natural logarithm of the duty; 0 is a duty of 1."""
        self._at_s: float | None = None
        """Time of the last reading; `None` before the first one."""
        self._smooth_c: float | None = None
        self._slow_c = 0.0
        """The smoothed temperature, smoothed again; their difference gives the slope."""

    def after_reading(self, reading: SensorReading, at_s: float) -> ThermalDecision:
        """Process a reading at `at_s` (monotonic seconds); return what to do until the next."""
        if self._settings.off:
            return _OFF
        last_s = at_s if self._at_s is None else self._at_s
        passed_s, self._at_s = min(_LONGEST_STEP_S, max(0.0, at_s - last_s)), max(at_s, last_s)
        alarms = self.alarms.after_reading(reading, at_s)
        reading_c = reading.temperature_c
        # A temperature that no running card can have, NaN included, counts as unknown.
        if reading_c is not None and COLDEST_C < reading_c < HOTTEST_C:
            self._temperature_c, self._read_at_s = reading_c, at_s
            self._band = self._band_of(reading_c, at_s)
            self._follow(reading_c, passed_s)
        elif at_s - self._read_at_s >= _SILENCE_S:
            self._log_duty += _GROWTH_PER_S * passed_s
            if self._band is ThermalBand.CRITICAL:  # it may still be critical
                self._log_duty = math.log(self._smallest_duty)
            self._band = self._temperature_c = self._smooth_c = None
        if self.alarms.has_fault:
            self._log_duty -= _FAULT_PER_S * max(1.0, passed_s)
        least = max(_LEAST_DUTY_WHILE_COOL if self._is_cool else 0.0, self._smallest_duty)
        self._log_duty = min(0.0, max(math.log(least), self._log_duty))
        return self._decision(alarms)

    def _band_of(self, temperature_c: float, at_s: float) -> ThermalBand:
        """Return the band of a new temperature. The start of a pause reduces the duty once."""
        settings, before = self._settings, self._band
        if settings.critical_c is not None and temperature_c >= settings.critical_c:
            self._critical_at_s = at_s
            if before is not ThermalBand.CRITICAL:
                self._log_duty += math.log(_AFTER_PAUSE)
            return ThermalBand.CRITICAL
        if before is ThermalBand.CRITICAL and self._resume_c is not None:
            waits = at_s - self._critical_at_s < _LONGEST_PAUSE_S
            if temperature_c >= self._resume_c and waits:
                return ThermalBand.CRITICAL
        for band, from_c, stays in (
            (ThermalBand.HOT, settings.hot_c, before is ThermalBand.HOT),
            (ThermalBand.WARM, settings.warm_c, before in {ThermalBand.HOT, ThermalBand.WARM}),
        ):
            if from_c is not None and temperature_c >= from_c - stays * _HYSTERESIS_C:
                return band
        return ThermalBand.NORMAL

    def _follow(self, temperature_c: float, passed_s: float) -> None:
        """Smooth a temperature and, unless paused, adjust the duty."""
        before_c = self._smooth_c
        if before_c is None:
            self._smooth_c = self._slow_c = temperature_c
            return
        smooth_c = _toward(before_c, temperature_c, passed_s, _SMOOTH_S)
        self._smooth_c = smooth_c
        self._slow_c = _toward(self._slow_c, smooth_c, passed_s, _SLOPE_S)
        if self._band is ThermalBand.CRITICAL:  # nothing runs, whatever the duty is
            return
        per_s = _GAIN_PER_C / _RESET_S * (smooth_c - self._aim_c)
        ahead_c = smooth_c + _AHEAD_S * (smooth_c - self._slow_c) / _SLOPE_S
        per_s += _BRAKE_PER_C_S * max(0.0, ahead_c - self._ceiling_c)
        self._log_duty -= _GAIN_PER_C * (smooth_c - before_c) + per_s * passed_s

    @property
    def _is_cool(self) -> bool:
        """Whether the card may be used all of the time, whatever the stored duty is."""
        warm_c, reading_c = self._settings.warm_c, self._temperature_c
        cool = warm_c is not None and reading_c is not None and reading_c < warm_c
        # A fault below `warm_c` has another cause than the heat of the die.
        return cool and not self.alarms.standing

    def _decision(self, alarms: tuple[CardAlarm, ...]) -> ThermalDecision:
        band, duty = self._band, 1.0 if self._is_cool else math.exp(self._log_duty)
        reading_c = self._temperature_c
        shown = "temperature unknown" if reading_c is None else f"{reading_c:.0f} C"
        if band is ThermalBand.CRITICAL:
            duty, words = 0.0, f"paused at {shown}, resumes below {self._resume_c:g} C"
        else:
            band = ThermalBand.HOT if self.alarms.has_fault else band
            boosts = band is ThermalBand.NORMAL and duty >= 1.0
            action = "REDUCE" if band is ThermalBand.HOT else "BOOST" if boosts else "MAINTAIN"
            words = shown if band is None else f"{shown}, {action}"  # terms of the guides
            if duty <= 1.001 * self._smallest_duty < 1.0:
                words += f", at the smallest duty of {duty:.0%}: other work heats the card, or "
                words += "its cooling fails"
            elif duty < 1.0:
                words += f", duty {duty:.0%}"
                words += "" if reading_c is None else f" to hold {self._aim_c:.1f} C"
        reason = "; ".join((words, *self.alarms.standing))
        return ThermalDecision(band=band, duty=duty, reason=reason, alarms=alarms)


def _toward(old: float, new: float, passed_s: float, time_s: float) -> float:
    return old + (new - old) * passed_s / (passed_s + time_s)
