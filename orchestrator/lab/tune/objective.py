"""What the chosen settings are to be best at: speed, memory, or speed for each byte. Pure.

Makes one interval of a speed and two peaks of memory, so that stacking, leaving out and choosing
follow one rule for all objectives. Does not measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from orchestrator.lab.tune.statistics import Effect

Objective: TypeAlias = Literal["speed", "memory", "balanced"]

_WORDS: Final = {"speed": "speed", "balanced": "speed for each byte of its peak"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How many times better one set of settings is than another, with its interval.

    1.0 is no difference.
    """

    ratio: float
    low: float
    high: float
    """Infinite with too few rounds for an interval."""
    narrows: bool = True
    """Whether more rounds would narrow the interval."""


def gain_of(
    objective: Objective,
    effect: Effect | None,
    peak_bytes: int | None,
    against_bytes: int | None,
    peak_noise: float,
) -> Gain | None:
    """Return what one arm gains over another; `None` where something of it was not measured.

    Args:
        objective: What counts.
        effect: The speed of the one against the other.
        peak_bytes: Of the one.
        against_bytes: Of the other.
        peak_noise: The share by which peaks of equal arms differ.
    """
    speed = None if effect is None else Gain(ratio=effect.ratio, low=effect.low, high=effect.high)
    if objective == "speed":
        return speed
    if not peak_bytes or not against_bytes:
        return None
    fewer = against_bytes / peak_bytes
    bytes_gain = Gain(
        ratio=fewer, low=fewer / (1 + peak_noise), high=fewer * (1 + peak_noise), narrows=False
    )
    if objective == "memory":
        return bytes_gain
    if speed is None:
        return None
    return Gain(
        ratio=speed.ratio * fewer, low=speed.low * bytes_gain.low, high=speed.high * bytes_gain.high
    )


def told(objective: Objective, name: str, gain: Gain) -> str:
    """Return how a set compares with the user's file, in words."""
    if objective == "memory":
        few, most = 1 / gain.high, 1 / gain.low
        return (
            f"{name} takes {1 / gain.ratio:.3f} x your file's peak memory, {few:.3f} to {most:.3f}"
        )
    return (
        f"{name} has {gain.ratio:.3f} x your file's {_WORDS[objective]}, {gain.low:.3f} to "
        f"{gain.high:.3f}"
    )
