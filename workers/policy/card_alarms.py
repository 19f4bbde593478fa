"""Alarms of a card: what its hardware complains of, that it is lost, and memory that got slower.

Each alarm is raised once, and cleared when its trouble has stayed away for `CALM_S`. Does not read
sensors, and decides on no duty (`thermal` does). Pure: time comes with the readings.

GDDR6X repeats a transfer that failed (GA102 whitepaper, appendix B), so a faulty memory bus shows
as slower memory, not as wrong results. A measurement is also low while another program uses the
card. So the second highest of a few is judged, against the best of this card since the process
began, at the same clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from workers.readings import THROTTLE_ALARMS, SensorReading, Throttle

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
#: Memory that moves this share less than it did raises an alarm, and half of it keeps the alarm;
#: healthy memory stays within a few percent.
_ALARMING_DROP: Final = 0.10

_LOST_TEXT: Final = (
    "the driver no longer finds the card; look for Xid 79 in the kernel log, check its seat and "
    "power cables, then restart the computer"
)
#: Each bit's name, what it means (NVML's documentation of the clock event reasons), and what to do.
_COMPLAINTS: Final[Mapping[Throttle, tuple[str, str]]] = {
    Throttle.HARDWARE_SLOWDOWN: (
        "hardware slowdown",
        (
            "clocks are halved or worse: too hot, too much power, or the power supply asked for "
            "it; check dust and airflow, then the power cables and the power supply"
        ),
    ),
    Throttle.SOFTWARE_THERMAL: (
        "thermal slowdown by the driver",
        (
            "die or memory is at its highest operating temperature; check dust, airflow and fan "
            "curve, and the thermal pads of the memory if the die is cool"
        ),
    ),
    Throttle.HARDWARE_THERMAL: (
        "thermal slowdown by the hardware",
        "too hot, so clocks are halved or worse; check dust and airflow, then the thermal paste",
    ),
    Throttle.POWER_BRAKE: (
        "power brake",
        (
            "the power supply or the board asked the card to slow down; check the power cables, "
            "one for each socket, and whether the power supply is strong enough"
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardAlarm:
    """An alarm that was raised or cleared."""

    name: str
    raised: bool
    """`False`: its trouble has stayed away for a while."""
    text: str
    """What it means and what to do, for a person."""


class CardAlarms:
    """Which alarms of a card stand, and what is known of its memory's bandwidth."""

    def __init__(self) -> None:
        self.standing: dict[str, float] = {}
        """When the trouble of each alarm that stands was last seen; the oldest alarm first."""
        self.complains = False
        """Whether the last reading showed a fault; idleness and the power limit are normal."""
        self._slowdown_seen = False
        self._recent: deque[float] = deque(maxlen=_JUDGED)
        """The last few measurements of the bandwidth, in bytes a second for each MHz of the
        memory's clock.
        """
        self._best = 0.0
        self._highest_clock_mhz = 0

    @property
    def of_hardware(self) -> bool:
        """Whether an alarm other than that of slow memory stands."""
        return bool(self.standing.keys() - {SLOW_MEMORY})

    def after_reading(self, reading: SensorReading, at_s: float) -> tuple[CardAlarm, ...]:
        """Return the alarms that a reading raised or cleared."""
        seen = Throttle((reading.throttle_bits or 0) & THROTTLE_ALARMS)
        # NVML may show this one during a mere change of clocks, so alone it must be there twice in
        # a row.
        is_new = seen == Throttle.HARDWARE_SLOWDOWN and not self._slowdown_seen
        self._slowdown_seen = Throttle.HARDWARE_SLOWDOWN in seen
        bits = Throttle(0) if is_new else seen
        self.complains = bool(bits)
        troubles = {name: text for bit, (name, text) in _COMPLAINTS.items() if bits & bit}
        if reading.lost:
            troubles[LOST] = _LOST_TEXT
        return self._judged(troubles, self.standing.keys() - {SLOW_MEMORY}, at_s)

    def after_bandwidth(
        self, bytes_per_s: float, clock_mhz: int, at_s: float
    ) -> tuple[CardAlarm, ...]:
        """Return the alarm that a measurement of the bandwidth raised or cleared.

        Args:
            bytes_per_s: What the memory of the card moved, in a measurement of a fixed kind.
            clock_mhz: Of the memory at that time; 0 is unknown, and the measurement is not judged.
            at_s: Monotonic seconds.
        """
        if not clock_mhz or bytes_per_s <= 0 or clock_mhz < _SAME_CLOCK * self._highest_clock_mhz:
            return ()
        self._highest_clock_mhz = max(clock_mhz, self._highest_clock_mhz)
        self._recent.append(bytes_per_s / clock_mhz)
        level = sorted(self._recent)[-2] if len(self._recent) == _JUDGED else 0.0
        self._best = best = max(level, self._best)
        drop = _ALARMING_DROP / 2.0 if SLOW_MEMORY in self.standing else _ALARMING_DROP
        troubles = {}
        if level < (1.0 - drop) * best:
            troubles[SLOW_MEMORY] = (
                f"the memory moves {level * clock_mhz / 1e9:.0f} GB/s, {level / best:.0%} of the "
                f"{best * clock_mhz / 1e9:.0f} GB/s that it did at this clock; a bus that repeats "
                "failed transfers looks like this: lower the memory clock and check the cooling of "
                "the memory, unless another program always uses the card"
            )
        return self._judged(troubles, self.standing.keys() & {SLOW_MEMORY}, at_s)

    def _judged(
        self, troubles: Mapping[str, str], judged: set[str], at_s: float
    ) -> tuple[CardAlarm, ...]:
        """Return what the troubles that were seen raised, or their absence cleared.

        `judged`: the alarms that stand and whose trouble would have been seen.
        """
        cleared = [
            CardAlarm(name=name, raised=False, text=f"not seen for {CALM_S:.0f} s")
            for name, seen_at_s in self.standing.items()
            if name in judged - troubles.keys() and at_s - seen_at_s >= CALM_S
        ]
        raised = [
            CardAlarm(name=name, raised=True, text=text)
            for name, text in troubles.items()
            if name not in self.standing
        ]
        for alarm in cleared:
            del self.standing[alarm.name]
        for name in troubles:
            self.standing[name] = max(at_s, self.standing.get(name, at_s))
        return (*cleared, *raised)
