"""Alarms of a card besides its temperature: throttle reasons of the hardware, a card that is gone, slow memory.

Alarms are edges: each is raised once, and cleared when its trouble has stayed away for `CALM_S`. Does not decide what
to do about one (`thermal` lowers the duty) and does not measure. Pure: time comes with the events.

Falling bandwidth: GDDR6X repeats a transfer that failed (GA102 whitepaper, appendix B), so a faulty memory bus shows as
slower memory, not as wrong results. A measurement is also low while another program uses the card, so the second
highest of a few is judged. It is compared with the best value of this card since the process began, at the same clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from workers.readings import THROTTLE_ALARMS, SensorReading, Throttle

#: For so long its trouble must stay away before an alarm is cleared: any alarm is raised once a minute at the most.
CALM_S: Final = 60.0

LOST: Final = "card lost"
SLOW_MEMORY: Final = "memory bandwidth"

#: Measurements of the bandwidth that are judged together.
_JUDGED: Final = 8
#: A measurement at less than this share of the highest memory clock seen was taken while the card rested.
_SAME_CLOCK: Final = 0.95

#: Each bit's name, what it means (NVML's documentation of the clock event reasons), and what to do.
_COMPLAINTS: Final[Mapping[Throttle, tuple[str, str]]] = MappingProxyType(
    {
        Throttle.HARDWARE_SLOWDOWN: (
            "hardware slowdown",
            (
                "clocks are halved or worse: too hot, too much power, or the power supply asked for it; "
                "check dust and airflow, then the power cables and the power supply"
            ),
        ),
        Throttle.SOFTWARE_THERMAL: (
            "thermal slowdown by the driver",
            (
                "die or memory is at its highest operating temperature; "
                "check dust, airflow and fan curve, and the thermal pads of the memory if the die is cool"
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
                "check the power cables, one for each socket, and whether the power supply is strong enough"
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthMeasured:
    """What the memory of the card moved, in a measurement of a fixed kind."""

    at_s: float
    """Monotonic seconds."""
    bytes_per_s: float
    memory_clock_mhz: int | None
    """At that time; `None`: the measurement cannot be compared with another, and is not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalAlarm:
    """An alarm that was raised or cleared."""

    name: str
    raised: bool
    """`False`: its trouble has stayed away for a while."""
    text: str
    """What it means and what to do, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An alarm that was raised and not cleared."""

    name: str
    last_at_s: float
    """When its trouble was last seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmState:
    """Which alarms stand, and what is known of the memory's bandwidth."""

    standing: tuple[Standing, ...] = ()
    recent_bytes_per_mhz: tuple[float, ...] = ()
    """The last few measurements, each divided by the memory clock in MHz."""
    best_bytes_per_mhz: float = 0.0
    highest_clock_mhz: int = 0
    slowdown_seen: bool = False
    """Whether the last reading showed `HARDWARE_SLOWDOWN`."""
    complains: bool = False
    """Whether the last reading showed a fault; idleness and the power limit are normal."""

    @property
    def names(self) -> tuple[str, ...]:
        """The alarms that stand, the oldest first."""
        return tuple(alarm.name for alarm in self.standing)


def after_reading(
    state: AlarmState, reading: SensorReading, at_s: float
) -> tuple[AlarmState, tuple[ThermalAlarm, ...]]:
    """Return the state after a reading, and the alarms it raised or cleared."""
    seen = Throttle((reading.throttle_bits or 0) & THROTTLE_ALARMS)
    # NVML may show this one during a mere change of clocks, so alone it must be there twice in a row.
    bits = seen if state.slowdown_seen or seen != Throttle.HARDWARE_SLOWDOWN else Throttle(0)
    state = replace(state, slowdown_seen=Throttle.HARDWARE_SLOWDOWN in seen, complains=bool(bits))
    troubles = {name: text for bit, (name, text) in _COMPLAINTS.items() if bits & bit}
    if reading.lost:
        troubles[LOST] = (
            "the driver no longer finds the card; look for Xid 79 in the kernel log, check its seat and power "
            "cables, then restart the computer"
        )
    standing: list[Standing] = []
    alarms: list[ThermalAlarm] = []
    for alarm in state.standing:
        if alarm.name in troubles:
            standing.append(replace(alarm, last_at_s=max(at_s, alarm.last_at_s)))
        elif alarm.name == SLOW_MEMORY or at_s - alarm.last_at_s < CALM_S:
            standing.append(alarm)
        else:
            alarms.append(_cleared(alarm.name, f"not seen for {CALM_S:.0f} s"))
    for name, text in troubles.items():
        if name not in state.names:
            standing.append(Standing(name=name, last_at_s=at_s))
            alarms.append(ThermalAlarm(name=name, raised=True, text=text))
    return replace(state, standing=tuple(standing)), tuple(alarms)


def after_bandwidth(
    state: AlarmState, measured: BandwidthMeasured, alarming_drop: float
) -> tuple[AlarmState, tuple[ThermalAlarm, ...]]:
    """Return the state after a measurement of the bandwidth, and the alarm it raised or cleared.

    Args:
        state: Before it.
        measured: The measurement.
        alarming_drop: This share less than the best raises the alarm; half of it clears it.

    """
    clock_mhz = measured.memory_clock_mhz
    if not clock_mhz or not 0.0 < measured.bytes_per_s < float("inf"):
        return state, ()
    if clock_mhz < _SAME_CLOCK * state.highest_clock_mhz:
        return state, ()
    recent = (*state.recent_bytes_per_mhz, measured.bytes_per_s / clock_mhz)[-_JUDGED:]
    state = replace(state, recent_bytes_per_mhz=recent, highest_clock_mhz=max(clock_mhz, state.highest_clock_mhz))
    if len(recent) < _JUDGED:
        return state, ()
    level = sorted(recent)[-2]
    best = max(level, state.best_bytes_per_mhz)
    state = replace(state, best_bytes_per_mhz=best)
    figures = (
        f"{level * clock_mhz / 1e9:.0f} GB/s, {level / best:.0%} of the {best * clock_mhz / 1e9:.0f} GB/s "
        "that it did at this clock"
    )
    others = tuple(alarm for alarm in state.standing if alarm.name != SLOW_MEMORY)
    stands = len(others) < len(state.standing)
    if not stands and level < (1.0 - alarming_drop) * best:
        text = (
            f"the memory moves {figures}; a bus that repeats failed transfers looks like this: lower the memory clock "
            "and check the cooling of the memory, unless another program always uses the card"
        )
        standing = (*others, Standing(name=SLOW_MEMORY, last_at_s=measured.at_s))
        return replace(state, standing=standing), (ThermalAlarm(name=SLOW_MEMORY, raised=True, text=text),)
    if stands and level >= (1.0 - alarming_drop / 2.0) * best and measured.at_s - _since(state) >= CALM_S:
        return replace(state, standing=others), (_cleared(SLOW_MEMORY, f"the memory moves {figures}"),)
    return state, ()


def _since(state: AlarmState) -> float:
    return next(alarm.last_at_s for alarm in state.standing if alarm.name == SLOW_MEMORY)


def _cleared(name: str, text: str) -> ThermalAlarm:
    return ThermalAlarm(name=name, raised=False, text=text)
