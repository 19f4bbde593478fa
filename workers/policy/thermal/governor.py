"""The thermal governor: readings of a card's sensors in, the share of time in which a worker may
use it out.

Covers the bands of temperature with their hysteresis, the pause at the critical one, and the words
for the health table. The law that holds a temperature is in `duty`, alarms are in `alarms`. Does
not read sensors, sleep, or set anything on the card: NVML's setters need root, a duty does not.
Knows nothing of the other workers on its card; each runs its own governor on the same temperature.
Nothing is kept across processes: the first reading is enough, and a critical one pauses at once.

Bands, by the guides' numbers::

    NORMAL    < 70 C    BOOST: all of the time WARM      70 to 78  MAINTAIN: the duty stays, or
    grows back if it was reduced; less if the card warms fast HOT       78 to 83  REDUCE: the duty
    settles where the temperature stays below 83, at 81.5 as a rule CRITICAL  >= 83     paused until
    below 75

A complaint of the hardware (`THROTTLE_ALARMS`) counts as HOT at least, and takes duty as long as it
stands. One below 70 C has another cause than the die's heat: for `CALM_S` after it the duty only
grows back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from workers.policy.thermal import alarms as alarm_rules
from workers.policy.thermal import duty as duty_law
from workers.policy.thermal.alarms import AlarmState, ThermalAlarm
from workers.policy.thermal.duty import DutyBounds, DutyState
from workers.readings import SensorReading
from workers.settings import COLDEST_C, HOTTEST_C, ThermalSettings

#: The last reading of a silent sensor stays valid for so long: a missed reading ends no pause.
_SILENCE_S: Final = 10.0
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
    alarms: tuple[ThermalAlarm, ...] = ()
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
    duty: DutyState = field(default_factory=DutyState)
    alarms: AlarmState = field(default_factory=AlarmState)
    temperature_c: float | None = None
    """The last reading, for as long as it is valid."""
    told_at_s: float | None = None
    """When that was."""
    critical_at_s: float = -math.inf
    """When the temperature was critical last."""
    cool: bool = False
    """Whether the card may be used all of the time, whatever the law says: it is below `warm_c`."""
    complained_at_s: float = -math.inf
    """When the hardware complained last below `warm_c`."""


class ThermalGovernor:
    """Turns sensor readings into a duty; a pure reducer, like the memory policies."""

    def __init__(self, settings: ThermalSettings) -> None:
        self._settings = settings
        self._resume_c = settings.resume_c
        if settings.critical_c is not None and settings.resume_c is None:
            self._resume_c = settings.critical_c - settings.hysteresis_c
        self._bounds = _bounds(settings)

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
        known, alarms = alarm_rules.after_bandwidth(
            state.alarms, bytes_per_s, clock_mhz, at_s, drop
        )
        state = replace(state, alarms=known)
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
        known, alarms = alarm_rules.after_reading(state.alarms, reading, at_s)
        bounds, told_c = self._bounds, reading.temperature_c
        # A temperature that no running card can have, NaN included, is unknown.
        temperature_c = told_c if told_c is not None and COLDEST_C < told_c < HOTTEST_C else None
        if temperature_c is not None:
            before = state.band
            state = self._in_band(state, temperature_c, at_s)
            if state.band is ThermalBand.CRITICAL and before is not ThermalBand.CRITICAL:
                state = replace(state, duty=duty_law.lowered(state.duty, bounds))
        elif state.told_at_s is not None and at_s - state.told_at_s >= _SILENCE_S:
            # The sensor has gone silent, and a hot card may still be hot.
            hot = state.band is ThermalBand.CRITICAL
            duty = duty_law.restarted(state.duty, bounds) if hot else state.duty
            state = ThermalState(duty=replace(duty, smooth_c=None))
        if temperature_c is not None or state.temperature_c is None:
            paused = state.band is ThermalBand.CRITICAL
            duty = duty_law.after_reading(
                state.duty, bounds, temperature_c, at_s, paused=paused, alarmed=known.complains
            )
            state = replace(state, duty=duty)
        if temperature_c is not None:
            below = self._settings.warm_c is not None and temperature_c < self._settings.warm_c
            complained_at_s = at_s if below and known.complains else state.complained_at_s
            cool = below and at_s - complained_at_s >= alarm_rules.CALM_S
            state = replace(state, cool=cool, complained_at_s=complained_at_s)
            if cool:
                state = replace(state, duty=duty_law.while_cool(state.duty))
        state = replace(state, alarms=known)
        return state, self._decision(state, alarms)

    def _in_band(self, state: ThermalState, temperature_c: float, at_s: float) -> ThermalState:
        """Return the state with the band of a new temperature."""
        settings = self._settings
        state = replace(state, temperature_c=temperature_c, told_at_s=at_s)
        if settings.critical_c is not None and temperature_c >= settings.critical_c:
            return replace(state, band=ThermalBand.CRITICAL, critical_at_s=at_s)
        if (
            state.band is ThermalBand.CRITICAL
            and self._resume_c is not None
            and temperature_c >= self._resume_c
        ):
            patience_s = settings.longest_pause_s
            if patience_s is None or at_s - state.critical_at_s < patience_s:
                return state
            state = replace(state, duty=duty_law.restarted(state.duty, self._bounds))
        hot, warm = state.band is ThermalBand.HOT, state.band is ThermalBand.WARM
        for band, from_c, stays in (
            (ThermalBand.HOT, settings.hot_c, hot),
            (ThermalBand.WARM, settings.warm_c, hot or warm),
        ):
            if from_c is not None and temperature_c >= from_c - (
                settings.hysteresis_c if stays else 0.0
            ):
                return replace(state, band=band)
        return replace(state, band=ThermalBand.NORMAL)

    def _decision(self, state: ThermalState, alarms: tuple[ThermalAlarm, ...]) -> ThermalDecision:
        band = state.band
        duty = 0.0 if band is ThermalBand.CRITICAL else 1.0 if state.cool else state.duty.duty
        if state.alarms.complains and band is not ThermalBand.CRITICAL:
            band = ThermalBand.HOT
        return ThermalDecision(
            band=band, duty=duty, reason=self._reason(state, band, duty), alarms=alarms
        )

    def _reason(self, state: ThermalState, band: ThermalBand | None, duty: float) -> str:
        settings = self._settings
        told = (
            "temperature unknown" if state.temperature_c is None else f"{state.temperature_c:.0f} C"
        )
        if band is not None:
            told = f"{told}, {_action(band, duty)}"
        words = told
        if state.band is ThermalBand.CRITICAL:
            words = f"paused at {state.temperature_c:.0f} C, goes on below {self._resume_c:g} C"
        elif duty <= 1.001 * settings.smallest_duty < 1.0:
            words = (
                f"{told}, at the smallest duty of {duty:.0%}: other work heats the card, or "
                "its cooling fails"
            )
        elif duty < 1.0 and state.temperature_c is not None:
            words = (
                f"{told}, duty {duty:.0%} to hold {duty_law.aim_c(state.duty, self._bounds):.1f} C"
            )
        elif duty < 1.0:
            words = f"{told}, duty {duty:.0%}"
        return "; ".join((words, *state.alarms.standing))


def _action(band: ThermalBand, duty: float) -> str:
    """Return the guides' word for what is done."""
    if band in {ThermalBand.HOT, ThermalBand.CRITICAL}:
        return "REDUCE"
    return "BOOST" if band is ThermalBand.NORMAL and duty >= 1.0 else "MAINTAIN"


_OFF: Final = ThermalDecision(band=None, duty=1.0, reason="thermal limits are off")


def _bounds(settings: ThermalSettings) -> DutyBounds:
    """Return what to hold.

    Where the duty is never reduced, its smallest value is all of the time.
    """
    hot_c = HOTTEST_C if settings.hot_c is None else settings.hot_c
    return DutyBounds(
        hot_c=hot_c,
        ceiling_c=hot_c + _HOT_BAND_C if settings.critical_c is None else settings.critical_c,
        margin_c=settings.margin_c,
        smallest_duty=1.0 if settings.hot_c is None else settings.smallest_duty,
    )
