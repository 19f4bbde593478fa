"""Memory seen: how much one step may use now, from samples of the device's free memory.

Samples may be taken before every step, once a second, or never. The caller says whether they are
exact. An exact sample taken for this step is used as it is, less what may go away while the step
runs. All others are smoothed, and some standard errors of the smoothed level are kept in reserve.
Does not know what a step needs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: What the adaptive policy remembers, it remembers for some of these.
MINUTE_S: Final = 60.0

#: Share of the way that one sample moves the smoothed level. At the best share, one miss says
#: nothing about the next (Muth 1960, Mehra 1970); misses that go the same way twice raise it,
#: misses that go to and fro lower it.
_FIRST_GAIN: Final = 0.2
_LEAST_GAIN: Final = 0.04
_MOST_GAIN: Final = 0.7
_GAIN_FOLLOW: Final = 0.008

#: The mean miss that is assumed until there are some, as a share; also the largest miss that is
#: never a cut.
_NOISE: Final = 0.03

#: Share of the way that one miss moves the mean miss.
_SPREAD_FOLLOW: Final = 0.05

#: Standard deviation of a normal variable, in mean deviations.
_SIGMA: Final = 1.25

#: A sample this many mean misses away from the level is no noise: memory was taken, or given.
_CUT: Final = 4.0

#: Standard errors of the level that are kept in reserve.
_RESERVE: Final = 2.0

#: A program that loads takes its memory in pieces. After a second fall by more than this share,
#: another one is expected, a quarter larger and up to the second share of what is left. That fades
#: within this time, and falls that are farther apart do not belong together.
_PIECE: Final = 0.05
_LARGEST_PIECE: Final = 0.3
_FALL_FADES_S: Final = 1.0

#: A step that failed because no more than this share went away while it ran: as much is expected
#: again for two minutes.
_LARGEST_JITTER: Final = 0.12

#: Memory that fell at once by more than this share may do so again, and come back between two
#: samples, for five minutes.
_DROP: Final = 0.2


class FreeMemory(NamedTuple):
    """What the samples so far say; an immutable value, changed with `_replace`."""

    level_bytes: float
    """Smoothed."""
    sample_bytes: float
    """The last one."""
    at_s: float = 0.0
    """When it was taken."""
    spread: float = _NOISE
    """Mean miss: what a sample differs from the level before it, as a share."""
    miss: float = 0.0
    """The last one, signed; 0 after a cut."""
    gain: float = _FIRST_GAIN
    samples: int = 1
    """Samples that the level is smoothed over."""
    exact: bool = False
    """Whether the last sample is exact and was taken for the step that comes now, so that it is
    used as it is.
    """
    fell_at_s: float | None = None
    """When a sample was last lower by a piece than the one before."""
    fall: float = 0.0
    """Share of the last sample that may go away while the next step runs, because a program loads.
    """
    jitter: float = 0.0
    """The same, because a step has failed for so little."""
    jitter_until_s: float = 0.0
    low_bytes: float | None = None
    """The lowest sample after which memory had fallen at once, lately."""
    low_until_s: float = 0.0

    @property
    def error(self) -> float:
        """Standard error of the smoothed level, as a share: what remains of a miss when the gain is
        the best one.
        """
        gain = max(self.gain, 1.0 / self.samples)
        return _SIGMA * self.spread * float((gain * (1.0 - self.gain)) ** 0.5)

    @property
    def likely_bytes(self) -> float:
        """What there is, nothing kept in reserve."""
        return self.sample_bytes if self.exact else self.level_bytes

    @property
    def most_bytes(self) -> float:
        """What there may be, as far as samples are noisy."""
        return self.likely_bytes * (1.0 if self.exact else 1.0 + _RESERVE * self.error)

    @property
    def usable_bytes(self) -> float:
        """What a step may count on."""
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
    """Return the level after a new sample; `None` is the level before the first one.

    `exact`: it is true to the byte. `failed`: whether a step ran out of memory since the last one.
    """
    if level is None:
        return FreeMemory(sample_bytes, sample_bytes, at_s, exact=exact)

    miss = sample_bytes / max(1.0, level.level_bytes) - 1.0
    cut = max(_NOISE, _CUT * level.spread)
    spread, gain, samples = level.spread, level.gain, level.samples + 1
    if abs(miss) > cut:
        follow, samples, last = 1.0, 1, 0.0  # memory was taken, or given for good
    else:
        last = miss
        spread += _SPREAD_FOLLOW * (abs(miss) - spread)
        sigma = _SIGMA * spread
        if sigma > 0.0:
            product = max(-_CUT, min(_CUT, (miss / sigma) * (level.miss / sigma)))
            gain = max(_LEAST_GAIN, min(_MOST_GAIN, gain + _GAIN_FOLLOW * product))
        follow = max(gain, 1.0 / samples)

    # Memory that came back at once was another program's: what went away before was its beginning.
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
