"""Alarms of a card: what its hardware complains of, and that it is lost.

Each alarm is raised once, and cleared when its trouble has stayed away for `CALM_S`. Does not read
sensors, and decides on no duty (`thermal` does). Pure: time comes with the readings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from workers.readings import THROTTLE_ALARMS, SensorReading, Throttle

#: For so long its trouble must stay away before an alarm is cleared: any alarm is raised once a
#: minute at the most.
CALM_S: Final = 60.0

LOST: Final = "card lost"

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
    """Which alarms of a card stand."""

    def __init__(self) -> None:
        self.standing: dict[str, float] = {}
        """When the trouble of each alarm that stands was last seen; the oldest alarm first."""
        self.complains = False
        """Whether the last reading showed a fault; idleness and the power limit are normal."""
        self._slowdown_seen = False

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
        cleared = [
            CardAlarm(name=name, raised=False, text=f"not seen for {CALM_S:.0f} s")
            for name, seen_at_s in self.standing.items()
            if name not in troubles and at_s - seen_at_s >= CALM_S
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
