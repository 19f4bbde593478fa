"""Alarms of a card: faults that its hardware reports, and the loss of the card.

Each alarm is raised once, and cleared after `CALM_S` without its fault. Does not read sensors, and
decides no duty (`thermal` does). Pure: the readings come with their time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from workers.readings import THROTTLE_ALARMS, SensorReading, Throttle

#: Time without the fault after which an alarm is cleared; so each alarm is raised at most once a
#: minute.
CALM_S: Final = 60.0

LOST: Final = "card lost"

_LOST_TEXT: Final = (
    "the driver no longer finds the card; look for Xid 79 in the kernel log, check its seat and "
    "power cables, then restart the computer"
)
#: Each bit's name, what it means (NVML's documentation of the clock event reasons), and what to do.
_FAULTS: Final[Mapping[Throttle, tuple[str, str]]] = {
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
    """`False`: the alarm is cleared."""
    text: str
    """What the alarm means and what the user can do."""


class CardAlarms:
    """Raises and clears the alarms of one card."""

    def __init__(self) -> None:
        self.standing: dict[str, float] = {}
        """Raised alarms, the oldest first: by name, the time at which the fault was last
        reported.
        """
        self.has_fault = False
        """Whether the last reading reported a fault; idleness and the power limit are normal."""
        self._had_slowdown = False

    def after_reading(self, reading: SensorReading, at_s: float) -> tuple[CardAlarm, ...]:
        """Return the alarms that a reading raised or cleared."""
        reported = Throttle((reading.throttle_bits or 0) & THROTTLE_ALARMS)
        # NVML may report this bit during a mere change of clocks, so alone it must appear twice in
        # a row.
        is_new = reported == Throttle.HARDWARE_SLOWDOWN and not self._had_slowdown
        self._had_slowdown = Throttle.HARDWARE_SLOWDOWN in reported
        bits = Throttle(0) if is_new else reported
        self.has_fault = bool(bits)
        faults = {name: text for bit, (name, text) in _FAULTS.items() if bits & bit}
        if reading.lost:
            faults[LOST] = _LOST_TEXT
        cleared = [
            CardAlarm(name=name, raised=False, text=f"not seen for {CALM_S:.0f} s")
            for name, reported_at_s in self.standing.items()
            if name not in faults and at_s - reported_at_s >= CALM_S
        ]
        raised = [
            CardAlarm(name=name, raised=True, text=text)
            for name, text in faults.items()
            if name not in self.standing
        ]
        for alarm in cleared:
            del self.standing[alarm.name]
        for name in faults:
            self.standing[name] = max(at_s, self.standing.get(name, at_s))
        return (*cleared, *raised)
