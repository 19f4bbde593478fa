"""The sensor readings of a card at one moment, as a value that can be sent between processes.

Does not read sensors (`nvml` does) and does not judge them (`policy.thermal` does). Imports neither
torch, Ray nor NVML.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Final


class Throttle(IntFlag):
    """Faults that make a card run below its highest clock.

    A subset of NVML's `nvmlClocksEventReason…` bits; several may be set. By NVML's documentation
    the other bits are normal, such as 0x1 (idle) and 0x4 (at the power limit, as expected of a busy
    card).
    """

    HARDWARE_SLOWDOWN = 0x8
    SOFTWARE_THERMAL = 0x20
    HARDWARE_THERMAL = 0x40
    #: The board or the power supply requested a lower clock.
    POWER_BRAKE = 0x80


#: All bits that mean a fault.
THROTTLE_ALARMS: Final = sum(Throttle)


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorReading:
    """The sensors of one card, or of a computer without a card, at one moment. `None`: unknown."""

    temperature_c: float | None = None
    """Temperature of the die; of the processor on a computer without a card."""
    margin_c: float | None = None
    """Degrees below the temperature at which the hardware slows itself down."""
    memory_temperature_c: float | None = None
    """Temperature of the VRAM; GeForce cards do not report it."""
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    utilisation_pct: float | None = None
    """Share of NVML's last sampling period in which any kernel ran."""
    throttle_bits: int | None = None
    """All reason bits of NVML at this moment, including normal and unknown ones."""
    throttle_pct: float | None = None
    """Share of the samples of the last minute in which one of `THROTTLE_ALARMS` was set."""
    fan_pct: float | None = None
    of_processor: bool = False
    """Whether this is a computer without a card, for which temperatures that are hot for a card are
    normal.
    """
    lost: bool = False
    """Whether the driver answered before and now reports that the card is gone."""
