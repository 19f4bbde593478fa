"""Memory available: how much one step may use now, from samples of the device's free memory.

Samples may come before every step, once a second, or never; the caller says whether they are exact.
An exact sample taken for the present step is used unchanged, less a reserve for memory that may
vanish during the step. All other samples are smoothed, and some standard errors of the smoothed
level are kept in reserve. Does not know how much a step needs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: The time unit for which the adaptive policy remembers observations.
MINUTE_S: Final = 60.0

#: Smoothing factor (gain) of the level. At the best gain, consecutive misses are uncorrelated (Muth
#: 1960, Mehra 1970): two misses in the same direction raise the gain, two in opposite directions
#: lower it.
_FIRST_GAIN: Final = 0.2
_LEAST_GAIN: Final = 0.04
_MOST_GAIN: Final = 0.7
_GAIN_FOLLOW: Final = 0.008

#: Mean miss assumed before the first sample, as a share; also the largest miss that never counts as
#: a cut.
_NOISE: Final = 0.03

#: Smoothing factor of the mean miss.
_SPREAD_FOLLOW: Final = 0.05

#: Standard deviation of a normal distribution, in mean deviations.
_SIGMA: Final = 1.25

#: A sample this many mean misses away from the level is not noise: memory was taken or freed.
_CUT: Final = 4.0

#: Reserve in standard errors of the level.
_RESERVE: Final = 2.0

#: A program that loads takes memory in pieces. After two falls by more than the first share, within
#: the time below, a third one is expected: a quarter larger, up to the second share of the
#: remaining memory. The expectation fades within the same time.
_PIECE: Final = 0.05
_LARGEST_PIECE: Final = 0.3
_FALL_FADES_S: Final = 1.0

#: If a step failed because at most this share of the memory vanished while it ran, as much is kept
#: in reserve for two minutes.
_LARGEST_JITTER: Final = 0.12

#: After memory fell at once by more than this share, such a fall may recur between two samples for
#: five minutes.
_DROP: Final = 0.2


class FreeMemory(NamedTuple):
    """The estimate of the available memory; an immutable value, changed with `_replace`."""

    level_bytes: float
    """The smoothed samples."""
    sample_bytes: float
    """The last one."""
    at_s: float = 0.0
    """Time of the last sample."""
    spread: float = _NOISE
    """Mean miss. A miss is the difference of a sample from the level before it, as a share."""
    miss: float = 0.0
    """The last miss, signed; 0 after a cut."""
    gain: float = _FIRST_GAIN
    samples: int = 1
    """Samples in the smoothed level, since the last cut."""
    exact: bool = False
    """Whether the last sample is exact and was taken for the next step, so that it is used
    unchanged.
    """
    fell_at_s: float | None = None
    """Time of the last fall by a piece."""
    fall: float = 0.0
    """Share of the memory that may vanish during the next step, because a program loads."""
    jitter: float = 0.0
    """As `fall`, after a step failed because this share of the memory vanished."""
    jitter_until_s: float = 0.0
    low_bytes: float | None = None
    """The lowest sample of the recent sudden falls."""
    low_until_s: float = 0.0

    @property
    def error(self) -> float:
        """Standard error of the smoothed level, as a share."""
        gain = max(self.gain, 1.0 / self.samples)
        return _SIGMA * self.spread * float((gain * (1.0 - self.gain)) ** 0.5)

    @property
    def likely_bytes(self) -> float:
        """The most likely available memory, without any reserve."""
        return self.sample_bytes if self.exact else self.level_bytes

    @property
    def most_bytes(self) -> float:
        """The upper bound of the available memory, given the noise of the samples."""
        return self.likely_bytes * (1.0 if self.exact else 1.0 + _RESERVE * self.error)

    @property
    def usable_bytes(self) -> float:
        """The memory that a step can rely on."""
        kept = 1.0 if self.exact else max(0.0, 1.0 - _RESERVE * self.error)
        return self.likely_bytes * kept * (1.0 - max(self.fall, self.jitter))


def with_sample(
    level: FreeMemory | None,
    sample_bytes: float,
    at_s: float = 0.0,
    *,
    exact: bool = False,
    failed: bool = False,
) -> FreeMemory:
    """Return the estimate after a new sample; `level` is `None` before the first one.

    `exact`: the sample is exact to the byte. `failed`: a step ran out of memory since the last one.
    """
    if level is None:
        return FreeMemory(sample_bytes, sample_bytes, at_s, exact=exact)

    miss = sample_bytes / max(1.0, level.level_bytes) - 1.0
    cut = max(_NOISE, _CUT * level.spread)
    spread, gain, samples = level.spread, level.gain, level.samples + 1
    if abs(miss) > cut:
        follow, samples, last = 1.0, 1, 0.0  # memory was taken or freed for good
    else:
        last = miss
        spread += _SPREAD_FOLLOW * (abs(miss) - spread)
        sigma = _SIGMA * spread
        if sigma > 0.0:
            product = max(-_CUT, min(_CUT, (miss / sigma) * (level.miss / sigma)))
            gain = max(_LEAST_GAIN, min(_MOST_GAIN, gain + _GAIN_FOLLOW * product))
        follow = max(gain, 1.0 / samples)

    # Memory that came back at once belonged to another program; the falls before were its loading.
    came_back = miss > max(cut, _DROP)
    fell = 1.0 - sample_bytes / max(1.0, level.sample_bytes)
    fading = max(0.0, 1.0 - (at_s - level.at_s) / _FALL_FADES_S)
    fall = 0.0 if came_back else level.fall * fading
    is_piece = exact and fell > _PIECE
    if is_piece and level.fell_at_s is not None and at_s < level.fell_at_s + _FALL_FADES_S:
        fall = max(fall, min(_LARGEST_PIECE, 1.25 * fell / max(_PIECE, 1.0 - fell)))

    jitter, jitter_until_s = level.jitter, level.jitter_until_s
    if came_back or at_s >= jitter_until_s:
        jitter = 0.0
    if exact and failed and jitter < fell <= _LARGEST_JITTER:
        jitter, jitter_until_s = fell, at_s + 2 * MINUTE_S

    low_bytes = level.low_bytes if at_s < level.low_until_s else None
    low_until_s = level.low_until_s
    if miss < -max(cut, _DROP):
        low_bytes, low_until_s = min(sample_bytes, low_bytes or sample_bytes), at_s + 5 * MINUTE_S
    return FreeMemory(
        level_bytes=level.level_bytes + follow * (sample_bytes - level.level_bytes),
        sample_bytes=sample_bytes,
        at_s=at_s,
        spread=spread,
        miss=last,
        gain=gain,
        samples=samples,
        exact=exact,
        fell_at_s=at_s if is_piece else level.fell_at_s,
        fall=fall,
        jitter=jitter,
        jitter_until_s=jitter_until_s,
        low_bytes=low_bytes,
        low_until_s=low_until_s,
    )
