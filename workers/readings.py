"""What the sensors of a card say at one moment, as a value that may cross processes.

Does not read sensors (`nvml` does) and does not judge (`policy.thermal` does). Imports neither
torch, Ray nor NVML.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Final


class Throttle(IntFlag):
    """Troubles for which a card runs below its highest clock.

    Of NVML's `nvmlClocksEventReason…` bits, of which several may be set. The others are normal,
    such as 0x1 (idle) and 0x4 (at its power limit, as a busy card is expected to be), by NVML's
    documentation of the reasons.
    """

    HARDWARE_SLOWDOWN = 0x8
    SOFTWARE_THERMAL = 0x20
    HARDWARE_THERMAL = 0x40
    #: The board or the power supply asked for less.
    POWER_BRAKE = 0x80


#: All bits that mean trouble.
THROTTLE_ALARMS: Final = sum(Throttle)


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorReading:
    """The sensors of one card at one moment, or of a computer without one. `None`: unknown."""

    temperature_c: float | None = None
    """Of the die; of the processor on a computer without a card."""
    margin_c: float | None = None
    """How much warmer the die may get before the hardware slows itself down."""
    memory_temperature_c: float | None = None
    """Of the VRAM; GeForce cards do not report it."""
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    utilisation_pct: float | None = None
    """Share of the last moment in which any kernel ran."""
    throttle_bits: int | None = None
    """Sum of all reasons of NVML at this moment, normal and unknown ones included."""
    throttle_pct: float | None = None
    """Share of the samples of the last minute in which one of `THROTTLE_ALARMS` was set."""
    fan_pct: float | None = None
    of_processor: bool = False
    """Whether this is a computer without a card: temperatures that are hot for a card are normal
    for it.
    """
    lost: bool = False
    """The driver answered before and now says that the card is gone."""
