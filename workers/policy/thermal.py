"""The thermal governor: readings of a card's sensors in, the share of time in which a worker may
use it out.

Covers the bands of temperature with their hysteresis, the pause at the critical one, the words for
the health table, alarms, and the law that holds a temperature. Does not read sensors, sleep, or set
anything on the card: NVML's setters need root, a duty does not. Knows nothing of the other workers
on its card; each runs its own governor on the same temperature. Nothing is kept across processes:
the first reading is enough, and a critical one pauses at once. Pure: time comes with the readings.

Bands, by the guides' numbers::

    NORMAL    < 70 C    BOOST: all of the time
    WARM      70 to 78  MAINTAIN: the duty stays, or grows back if it was reduced; less if the card
                        warms fast
    HOT       78 to 83  REDUCE: the duty settles where the temperature stays below 83, at 81.5 as a
                        rule
    CRITICAL  >= 83     paused until below 75

A complaint of the hardware (`THROTTLE_ALARMS`) counts as HOT at least, and takes duty as long as it
stands. One below 70 C has another cause than the die's heat: for `CALM_S` after it the duty only
grows back.

The law (`DutyState`) is a PI law on the *logarithm* of the duty, in its incremental form:

- Why the logarithm. Several workers on a card run this law side by side, on the same temperature,
  and share the card: the device is busy for 1 - product(1 - duty) of the time when they fill each
  other's gaps, for their mean when they do not. From one worker to seven, the heat that a change of
  duty makes differs by a factor of 25; the heat that a *relative* change makes differs by 5. One
  gain then fits all, without knowing who else is there, and workers that share a card shrink in
  proportion.
- Why increments. Each reading adds to the duty; the bounds clip the sum, so that nothing is left to
  unwind when a card that was cool for an hour gets hot.
- Gain and time. The gain is low enough for a card that answers within 10 s through a sensor that
  lags by 3 s; the integral's time is long enough for one that takes 200 s. (With gain K, time
  constant T: damping (1 + K*k) / (2*sqrt(T*K*k / Ti)), which is above 0.7 for K of 14 to 66 C, T of
  10 to 200 s.)
- What a constant gain cannot do is done by three one-sided terms, none of which moves in the steady
  state: two brakes look ahead along the slope and act when that ends above the ceiling; growth acts
  when it ends below the hot band.
- The aim is a margin below the ceiling. Sensors report whole degrees, so a margin of 1.5 C keeps
  the reading flickering between two values of which neither is the ceiling; the more single
  readings stand out, the wider the margin.

Each term falls, or stays, when the newest reading is higher: for equal history the duty is monotone
in it.

Alarms (`AlarmState`) are edges: each is raised once, and cleared when its trouble has stayed away
for `CALM_S`. GDDR6X repeats a transfer that failed (GA102 whitepaper, appendix B), so a faulty
memory bus shows as slower memory, not as wrong results. A measurement is also low while another
program uses the card, so the second highest of a few is judged, against the best value of this card
since the process began, at the same clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from workers.readings import THROTTLE_ALARMS, SensorReading, Throttle
from workers.settings import COLDEST_C, HOTTEST_C, ThermalSettings

#: For so long its trouble must stay away before an alarm is cleared: any alarm is raised once a
#: minute at the most.
CALM_S: Final = 60.0

LOST: Final = "card lost"
SLOW_MEMORY: Final = "memory bandwidth"

#: Measurements of the bandwidth that are judged together.
_JUDGED: Final = 8
#: A measurement at less than this share of the highest memory clock seen was taken while the card
#: rested.
_SAME_CLOCK: Final = 0.95

#: Each bit's name, what it means (NVML's documentation of the clock event reasons), and what to do.
_COMPLAINTS: Final[Mapping[Throttle, tuple[str, str]]] = {
    Throttle.HARDWARE_SLOWDOWN: (
        "hardware slowdown",
        (
            "clocks are halved or worse: too hot, too much power, or the power supply asked for "
            "it; "
            "check dust and airflow, then the power cables and the power supply"
        ),
    ),
    Throttle.SOFTWARE_THERMAL: (
        "thermal slowdown by the driver",
        (
            "die or memory is at its highest operating temperature; "
            "check dust, airflow and fan curve, and the thermal pads of the memory if the die is "
            "cool"
        ),
    ),
    Throttle.HARDWARE_THERMAL: (
        "thermal slowdown by the hardware",
        "too hot, so clocks are halved or worse; check dust and airflow, then the thermal paste",
    ),
    Throttle.POWER_BRAKE: (
        "power brake",
        (
            "the power supply or the board asked the card to slow down; "
            "check the power cables, one for each socket, and whether the power supply is strong "
            "enough"
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalAlarm:
    """An alarm that was raised or cleared."""

    name: str
    raised: bool
    """`False`: its trouble has stayed away for a while."""
    text: str
    """What it means and what to do, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmState:
    """Which alarms stand, and what is known of the memory's bandwidth."""

    standing: Mapping[str, float] = field(default_factory=dict)
    """When the trouble of each alarm that was raised and not cleared was last seen; the oldest
    alarm first.
    """
    recent_bytes_per_mhz: tuple[float, ...] = ()
    """The last few measurements, each divided by the memory clock in MHz."""
    best_bytes_per_mhz: float = 0.0
    highest_clock_mhz: int = 0
    slowdown_seen: bool = False
    """Whether the last reading showed `HARDWARE_SLOWDOWN`."""
    complains: bool = False
    """Whether the last reading showed a fault; idleness and the power limit are normal."""

    def after_reading(
        self, reading: SensorReading, at_s: float
    ) -> tuple[AlarmState, tuple[ThermalAlarm, ...]]:
        """Return the state after a reading, and the alarms it raised or cleared."""
        seen = Throttle((reading.throttle_bits or 0) & THROTTLE_ALARMS)
        # NVML may show this one during a mere change of clocks, so alone it must be there twice in
        # a row.
        bits = seen if self.slowdown_seen or seen != Throttle.HARDWARE_SLOWDOWN else Throttle(0)
        state = replace(
            self, slowdown_seen=Throttle.HARDWARE_SLOWDOWN in seen, complains=bool(bits)
        )
        troubles = {name: text for bit, (name, text) in _COMPLAINTS.items() if bits & bit}
        if reading.lost:
            troubles[LOST] = (
                "the driver no longer finds the card; look for Xid 79 in the kernel log, check its "
                "seat and power "
                "cables, then restart the computer"
            )
        over = [
            name
            for name, last_at_s in state.standing.items()
            if name not in troubles and name != SLOW_MEMORY and at_s - last_at_s >= CALM_S
        ]
        new = [name for name in troubles if name not in state.standing]
        standing = {
            name: last_at_s for name, last_at_s in state.standing.items() if name not in over
        }
        standing |= {name: max(at_s, standing.get(name, at_s)) for name in troubles}
        cleared = [_cleared(name, f"not seen for {CALM_S:.0f} s") for name in over]
        raised = [ThermalAlarm(name=name, raised=True, text=troubles[name]) for name in new]
        return replace(state, standing=standing), (*cleared, *raised)

    def after_bandwidth(
        self, bytes_per_s: float, clock_mhz: int, at_s: float, alarming_drop: float
    ) -> tuple[AlarmState, tuple[ThermalAlarm, ...]]:
        """Return the state after a measurement of the bandwidth, and the alarm it raised or
        cleared.

        Args:
            bytes_per_s: What the memory of the card moved, in a measurement of a fixed kind.
            clock_mhz: Of the memory at that time; 0 is unknown, and the measurement is not judged.
            at_s: Monotonic seconds.
            alarming_drop: This share less than the best raises the alarm; half of it clears it.
        """
        if not clock_mhz or bytes_per_s <= 0 or clock_mhz < _SAME_CLOCK * self.highest_clock_mhz:
            return self, ()
        recent = (*self.recent_bytes_per_mhz, bytes_per_s / clock_mhz)[-_JUDGED:]
        state = replace(
            self,
            recent_bytes_per_mhz=recent,
            highest_clock_mhz=max(clock_mhz, self.highest_clock_mhz),
        )
        if len(recent) < _JUDGED:
            return state, ()
        level = sorted(recent)[-2]
        best = max(level, state.best_bytes_per_mhz)
        state = replace(state, best_bytes_per_mhz=best)
        figures = (
            f"{level * clock_mhz / 1e9:.0f} GB/s, {level / best:.0%} of the "
            f"{best * clock_mhz / 1e9:.0f} GB/s "
            "that it did at this clock"
        )
        since_s = state.standing.get(SLOW_MEMORY)
        if since_s is None and level < (1.0 - alarming_drop) * best:
            text = (
                f"the memory moves {figures}; a bus that repeats failed transfers looks like this: "
                "lower the memory clock "
                "and check the cooling of the memory, unless another program always uses the card"
            )
            standing = {**state.standing, SLOW_MEMORY: at_s}
            return replace(state, standing=standing), (
                ThermalAlarm(name=SLOW_MEMORY, raised=True, text=text),
            )
        calm = since_s is not None and at_s - since_s >= CALM_S
        if calm and level >= (1.0 - alarming_drop / 2.0) * best:
            standing = {
                name: last_at_s for name, last_at_s in state.standing.items() if name != SLOW_MEMORY
            }
            return replace(state, standing=standing), (
                _cleared(SLOW_MEMORY, f"the memory moves {figures}"),
            )
        return state, ()


def _cleared(name: str, text: str) -> ThermalAlarm:
    return ThermalAlarm(name=name, raised=False, text=text)


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

    def aim_c(self, bounds: DutyBounds) -> float:
        """Return the temperature that the law holds."""
        margin_c = max(bounds.margin_c, _HALF_DEGREE_C + _STANDS_OUT * self.stands_out_c)
        return max(bounds.hot_c, bounds.ceiling_c - margin_c)

    def after_reading(
        self,
        bounds: DutyBounds,
        temperature_c: float | None,
        at_s: float,
        *,
        paused: bool,
        alarmed: bool,
    ) -> DutyState:
        """Return the state after a reading.

        Args:
            bounds: What to hold.
            temperature_c: A finite number; `None` if it is unknown, then only the hardware's
                complaints count.
            at_s: When it was taken, in monotonic seconds; a reading from before the last one moves
                nothing but the steps that need no time.
            paused: Whether nothing runs, so that the temperature says nothing about the duty: it is
                followed, not answered.
            alarmed: Whether the hardware complains.
        """
        passed_s = 0.0 if self.at_s is None else min(_LONGEST_STEP_S, max(0.0, at_s - self.at_s))
        state, change = self, 0.0
        if temperature_c is not None:
            state = self._followed(temperature_c, passed_s)
            if self.smooth_c is not None and not paused and state.smooth_c is not None:
                moved_c = state.smooth_c - self.smooth_c
                change = state._change(bounds, temperature_c, moved_c, passed_s)
        elif not alarmed:
            change = _MOST_GROWTH_PER_S * passed_s
        if alarmed:
            change = min(0.0, change) - _ALARM_PER_S * passed_s
            if not self.alarmed:
                change += math.log(_ALARM_STEP)
        log_duty = _clipped(self.log_duty + change, bounds)
        latest_s = at_s if self.at_s is None else max(self.at_s, at_s)
        return replace(state, log_duty=log_duty, at_s=latest_s, alarmed=alarmed)

    def lowered(self, bounds: DutyBounds) -> DutyState:
        """Return the state after the ceiling was reached: it goes on with less when it goes on."""
        return replace(self, log_duty=_clipped(self.log_duty + math.log(_ALARM_STEP), bounds))

    def restarted(self, bounds: DutyBounds) -> DutyState:
        """Return the state of one that begins at the smallest duty on a hot card, and grows back to
        what it had.

        For a worker whose neighbours on the card continued while it was paused, and took its share:
        they reduce their duty slowly, as the temperature changes.
        """
        return replace(
            self, log_duty=math.log(bounds.smallest_duty), back_to_log_duty=self.log_duty
        )

    def while_cool(self) -> DutyState:
        """Return the state of a card so cool that it is used all of the time whatever the law says.

        What the brakes have taken meanwhile keeps a card that warms fast from going too high, but
        too much of it would be missing for minutes.
        """
        return replace(self, log_duty=max(math.log(_LEAST_WHILE_COOL), self.log_duty))

    def _followed(self, temperature_c: float, passed_s: float) -> DutyState:
        if self.smooth_c is None:
            return replace(
                self, smooth_c=temperature_c, quick_c=temperature_c, slow_c=temperature_c
            )
        smooth_c = _toward(self.smooth_c, temperature_c, passed_s, _SMOOTH_S)
        faded_c = self.stands_out_c * (1.0 - passed_s / (passed_s + _REMEMBERED_S))
        return replace(
            self,
            smooth_c=smooth_c,
            quick_c=_toward(self.quick_c, smooth_c, passed_s, _QUICK_SLOPE_S),
            slow_c=_toward(self.slow_c, smooth_c, passed_s, _SLOW_SLOPE_S),
            stands_out_c=min(_MOST_STANDING_OUT_C, max(faded_c, temperature_c - smooth_c)),
        )

    def _change(
        self, bounds: DutyBounds, temperature_c: float, moved_c: float, passed_s: float
    ) -> float:
        """Return by how much the logarithm of the duty changes."""
        smooth_c = temperature_c if self.smooth_c is None else self.smooth_c
        above_aim_c = smooth_c - self.aim_c(bounds)
        quick_c_per_s = (smooth_c - self.quick_c) / _QUICK_SLOPE_S
        slow_c_per_s = (smooth_c - self.slow_c) / _SLOW_SLOPE_S

        near_c = temperature_c + _NEAR_S * quick_c_per_s - (bounds.ceiling_c - _HALF_DEGREE_C)
        far_c = smooth_c + _FAR_S * slow_c_per_s - bounds.ceiling_c
        below_c = (
            self.aim_c(bounds)
            - _NEARLY_THERE_C
            - max(smooth_c, smooth_c + _INTEGRAL_S * quick_c_per_s)
        )

        per_s = -_GAIN_PER_C / _INTEGRAL_S * above_aim_c
        per_s -= _NEAR_PER_C_S * max(0.0, near_c) + _FAR_PER_C_S * max(0.0, far_c)
        per_s -= _PRESS_PER_C_S * max(0.0, above_aim_c - _TOLERATED_C)
        per_s += min(_MOST_GROWTH_PER_S, _GROWTH_PER_C_S * max(0.0, below_c))
        if self.log_duty < self.back_to_log_duty and above_aim_c < 0.0:
            per_s += _RETURN_PER_S
        return per_s * passed_s - _GAIN_PER_C * moved_c


def _toward(old: float, new: float, passed_s: float, time_s: float) -> float:
    return old + (new - old) * passed_s / (passed_s + time_s)


def _clipped(log_duty: float, bounds: DutyBounds) -> float:
    return min(0.0, max(math.log(bounds.smallest_duty), log_duty))


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
        alarm_state, alarms = state.alarms.after_reading(reading, at_s)
        bounds, told_c = self._bounds, reading.temperature_c
        # A temperature that no running card can have, NaN included, is unknown.
        temperature_c = told_c if told_c is not None and COLDEST_C < told_c < HOTTEST_C else None
        if temperature_c is not None:
            before = state.band
            state = self._in_band(state, temperature_c, at_s)
            if state.band is ThermalBand.CRITICAL and before is not ThermalBand.CRITICAL:
                state = replace(state, duty=state.duty.lowered(bounds))
        elif state.told_at_s is not None and at_s - state.told_at_s >= _SILENCE_S:
            # The sensor has gone silent, and a hot card may still be hot.
            hot = state.band is ThermalBand.CRITICAL
            duty = state.duty.restarted(bounds) if hot else state.duty
            state = ThermalState(duty=replace(duty, smooth_c=None))
        if temperature_c is not None or state.temperature_c is None:
            paused = state.band is ThermalBand.CRITICAL
            duty = state.duty.after_reading(
                bounds, temperature_c, at_s, paused=paused, alarmed=alarm_state.complains
            )
            state = replace(state, duty=duty)
        if temperature_c is not None:
            below = self._settings.warm_c is not None and temperature_c < self._settings.warm_c
            complained_at_s = at_s if below and alarm_state.complains else state.complained_at_s
            cool = below and at_s - complained_at_s >= CALM_S
            state = replace(state, cool=cool, complained_at_s=complained_at_s)
            if cool:
                state = replace(state, duty=state.duty.while_cool())
        state = replace(state, alarms=alarm_state)
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
            state = replace(state, duty=state.duty.restarted(self._bounds))
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
            words = f"{told}, duty {duty:.0%} to hold {state.duty.aim_c(self._bounds):.1f} C"
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
