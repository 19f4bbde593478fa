"""How much memory one step may use now, from samples of the device's free memory.

Samples may be taken before every step, once a second, or never. The caller says whether they are
exact. An exact sample taken for this step is used as it is, less what may go away while the step
runs. All others are smoothed, and some standard errors of the smoothed level are kept in reserve.
Does not know what a step needs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: Share of the way that one sample moves the smoothed level. At the best share, one miss says
#: nothing about the next (Muth 1960, Mehra 1970); misses that go the same way twice raise it,
#: misses that go to and fro lower it.
_FIRST_GAIN: Final = 0.2
_LEAST_GAIN: Final = 0.04
_MOST_GAIN: Final = 0.7
_GAIN_FOLLOW: Final = 0.008
_LARGEST_PRODUCT: Final = 4.0

#: What is assumed of the mean miss until there are some, and the share of the way that one miss
#: moves it.
_FIRST_SPREAD: Final = 0.03
_SPREAD_FOLLOW: Final = 0.05

#: Standard deviation of a normal variable, in mean deviations.
_SIGMA: Final = 1.25

#: A sample this many mean misses away from the level is no noise: memory was taken, or given.
_CUT: Final = 4.0

#: Misses under this share are never treated as a cut.
_LEAST_CUT: Final = 0.03

#: A level smoothed over this many samples or more is as good as it gets.
_MOST_SAMPLES: Final = 100

#: Standard errors of the level that are kept in reserve.
_RESERVE: Final = 2.0

#: A program that loads takes its memory in pieces. After a second fall by more than this share,
#: another one is expected, so many times as large and up to this share of what is left. That fades
#: within this time, and falls that are farther apart do not belong together.
_PIECE: Final = 0.05
_NEXT_PIECE: Final = 1.25
_LARGEST_PIECE: Final = 0.3
_FALL_FADES_S: Final = 1.0

#: A step that failed because no more than this share went away while it ran: as much is expected
#: again for so long.
_LARGEST_JITTER: Final = 0.12
_JITTER_LASTS_S: Final = 120.0

#: Memory that fell at once by more than this share may do so again, and come back between two
#: samples, for so long.
_DROP: Final = 0.2
_DROP_LASTS_S: Final = 300.0


class Level(NamedTuple):
    """What the samples so far say; an immutable value, changed with `_replace`."""

    level_bytes: float
    """Smoothed."""
    sample_bytes: float
    """The last one."""
    spread: float = _FIRST_SPREAD
    """Mean miss: what a sample differs from the level before it, as a share."""
    miss: float = 0.0
    """The last one, signed; 0 after a cut."""
    gain: float = _FIRST_GAIN
    samples: int = 1
    """Samples that the level is smoothed over, up to a few."""
    exact: bool = False
    """Whether the last sample is exact and was taken for the step that comes now, so that it is
    used as it is.
    """
    since_fall_s: float | None = None
    """How long ago a sample was lower by a piece than the one before; `None` before the first."""
    fall: float = 0.0
    """Share of the last sample that may go away while the next step runs, because a program loads.
    """
    jitter: float = 0.0
    """The same, because a step has failed for so little."""
    jitter_left_s: float = 0.0
    """For how long that is still expected."""
    low_bytes: float | None = None
    """The lowest sample after which memory had fallen at once, lately."""
    low_left_s: float = 0.0
    """For how long it may be there again."""

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


def sampled(
    level: Level | None,
    sample_bytes: float,
    *,
    exact: bool = False,
    passed_s: float = 0.0,
    failed: bool = False,
) -> Level:
    """Return the level after a new sample; `None` is the level before the first one.

    `exact`: it is true to the byte. `passed_s`: since the last one. `failed`: whether a step ran
    out of memory since.
    """
    if level is None:
        return Level(level_bytes=sample_bytes, sample_bytes=sample_bytes, exact=exact)
    miss = sample_bytes / max(1.0, level.level_bytes) - 1.0
    cut = max(_LEAST_CUT, _CUT * level.spread)
    spread, gain, samples = level.spread, level.gain, level.samples + 1
    if abs(miss) > cut:
        follow, samples, last = 1.0, 1, 0.0  # memory was taken, or given for good
    else:
        last = miss
        spread += _SPREAD_FOLLOW * (abs(miss) - spread)
        sigma = _SIGMA * spread
        if sigma > 0.0:
            product = max(
                -_LARGEST_PRODUCT, min(_LARGEST_PRODUCT, (miss / sigma) * (level.miss / sigma))
            )
            gain = max(_LEAST_GAIN, min(_MOST_GAIN, gain + _GAIN_FOLLOW * product))
        follow = max(gain, 1.0 / samples)
    fell = 1.0 - sample_bytes / max(1.0, level.sample_bytes)
    # Memory that came back at once was another program's: what went away before was its beginning.
    came_back = miss > max(cut, _DROP)
    fall = 0.0 if came_back else level.fall * max(0.0, 1.0 - passed_s / _FALL_FADES_S)
    since_fall_s = None if level.since_fall_s is None else level.since_fall_s + passed_s
    is_piece = exact and fell > _PIECE
    if is_piece and since_fall_s is not None and since_fall_s < _FALL_FADES_S:
        fall = max(fall, min(_LARGEST_PIECE, _NEXT_PIECE * fell / max(_PIECE, 1.0 - fell)))
    jitter_left_s = level.jitter_left_s - passed_s
    jitter = level.jitter if jitter_left_s > 0.0 and not came_back else 0.0
    if exact and failed and jitter < fell <= _LARGEST_JITTER:
        jitter, jitter_left_s = fell, _JITTER_LASTS_S
    low_bytes, low_left_s = (level.low_bytes, level.low_left_s - passed_s)
    if low_left_s <= 0.0:
        low_bytes = None
    if miss < -max(cut, _DROP):
        low_bytes, low_left_s = min(sample_bytes, low_bytes or sample_bytes), _DROP_LASTS_S
    return Level(
        level_bytes=level.level_bytes + follow * (sample_bytes - level.level_bytes),
        sample_bytes=sample_bytes,
        spread=spread,
        miss=last,
        gain=gain,
        samples=min(samples, _MOST_SAMPLES),
        exact=exact,
        since_fall_s=0.0 if is_piece else since_fall_s,
        fall=fall,
        jitter=jitter,
        jitter_left_s=jitter_left_s,
        low_bytes=low_bytes,
        low_left_s=low_left_s,
    )
