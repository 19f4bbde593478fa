"""What an arm does and takes, not compared with the baseline: its columns of samples, operations,
memory and seconds.

Pure. Speeds of different rounds are comparable only as far as the machine was the same, so verdicts
use ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.config.gpu_specs import match_profile, peak_tflops
from orchestrator.lab.tune.statistics import Effect
from workers.tuning.messages import Opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Absolute:
    """One arm. `None` is not known."""

    items_per_s: float | None = None
    """Samples, tokens where lengths differ, or 10^9 operations of products; the median over rounds.
    """
    tflops: float | None = None
    mfu_pct: float | None = None
    """These operations, of what the card is rated for in the arm's number type at the clock of the
    rounds.
    """
    peak_bytes: int | None = None
    host_bytes: int | None = None
    once_s: float | None = None
    """What the first step took beyond another one, such as a compilation."""

    def more_peak_bytes(self, other: Absolute) -> int | None:
        """Return how much higher the peak is than another arm's."""
        return _less(self.peak_bytes, other.peak_bytes)

    def more_host_bytes(self, other: Absolute) -> int | None:
        """Return how much more of the host's memory it takes than another arm."""
        return _less(self.host_bytes, other.host_bytes)

    def pays_after_s(self, other: Absolute, effect: Effect | None) -> float | None:
        """Return after how many seconds of training it has done as much as a slower arm that began
        faster.

        Where o are the seconds once and r the ratio of speeds, both have done as much at T with r
        (T - o1) = T - o2. `None`: it is not known to be faster.
        """
        if effect is None or effect.low <= 1.0 or self.once_s is None or other.once_s is None:
            return None
        if self.once_s <= other.once_s:
            return 0.0
        return (effect.ratio * self.once_s - other.once_s) / (effect.ratio - 1.0)


def absolute_of(
    per_item_s: Sequence[float],
    opened: Opened | None,
    dtype: str | None,
    clocks_mhz: Sequence[float],
) -> Absolute:
    """Return what is known of an arm.

    Args:
        per_item_s: Seconds an item, of each round.
        opened: Its first steps; `None`: it has not begun.
        dtype: The number type that it computes in.
        clocks_mhz: Of the card, of each round.
    """
    items_per_s = 1 / median(per_item_s) if per_item_s else None
    if opened is None:
        return Absolute(items_per_s=items_per_s)
    tflops = items_per_s * opened.flop / 1e12 if items_per_s is not None and opened.flop else None
    rated = _rated_tflops(opened, dtype, clocks_mhz)
    return Absolute(
        items_per_s=items_per_s,
        tflops=tflops,
        mfu_pct=100 * tflops / rated if tflops is not None and rated else None,
        peak_bytes=opened.peak_bytes or None,
        host_bytes=opened.host_bytes or None,
        once_s=max(0.0, opened.first_step_s - opened.step_s) if opened.first_step_s else None,
    )


def _rated_tflops(opened: Opened, dtype: str | None, clocks_mhz: Sequence[float]) -> float | None:
    if opened.card == "cpu" or dtype is None:
        return None
    profile = match_profile(opened.device_name, opened.device_bytes)
    rated = (
        None
        if profile is None
        else peak_tflops(profile, dtype, median(clocks_mhz) if clocks_mhz else None)
    )
    return rated if rated is not None and math.isfinite(rated) else None


def _less(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other
