"""How much memory one step may use now, from samples of the device's free memory.

Samples may be taken before every step, once a second, or never. They may be exact or noisy, and the caller does not
know which. They are smoothed, and a number of standard errors of the smoothed level is kept in reserve; that number is
learned from failures. A sample taken for this step is used without reserve once samples have proven to be exact: they
repeat to the byte, or steps end well that only the unsmoothed sample allowed. Does not know what a step needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from workers.policy.adaptive.drop_forecast import STILL, Falls, fallen

#: Share of the way that one sample moves the smoothed level. At the best share, one miss says nothing about the next
#: (Muth 1960, Mehra 1970); misses that go the same way twice raise it, misses that go to and fro lower it.
_FIRST_GAIN: Final = 0.2
_LEAST_GAIN: Final = 0.04
_MOST_GAIN: Final = 0.7
_GAIN_FOLLOW: Final = 0.008
_LARGEST_PRODUCT: Final = 4.0

#: What is assumed of the mean miss until there are some, and the share of the way that one miss moves it.
_FIRST_SPREAD: Final = 0.03
_SPREAD_FOLLOW: Final = 0.05

#: Standard deviation of a normal variable, in mean deviations.
_SIGMA: Final = 1.25

#: A sample this many mean misses below the level is no noise: memory was taken. Above it must be seen twice.
_CUT: Final = 4.0

#: Misses under this share are never treated as a cut.
_LEAST_CUT: Final = 0.03

#: A level smoothed over this many samples or more is as good as it gets.
_MOST_SAMPLES: Final = 100

#: Standard errors kept in reserve: a failure adds, each sample takes away so little that a reserve too small by nature
#: fails once in ten minutes.
_FIRST_RESERVE: Final = 2.0
_LEAST_RESERVE: Final = 0.5
_MOST_RESERVE: Final = 8.0
_RESERVE_PER_FAILURE: Final = 0.6
_RESERVE_PER_SAMPLE: Final = 1.0 / 1200.0

#: A sample this many mean misses above the level distinguishes exact from noisy: used as it is, the step fails if it is
#: noise.
_TELLING: Final = 1.5
_TELLING_SAMPLES: Final = 4

#: A good step speaks for the samples if it took so many mean misses more than the level; so often it is counted.
_SPEAKS_FOR: Final = 0.5
_MOST_PROOF: Final = 8

#: One failure in spite of an exact sample weighs as much as so many good steps: its margin covers all but one step in
#: hundreds. Without proof left it is noisy for so many good steps, twice as many each time.
_DISPROOF: Final = 4
_FIRST_BAN: Final = 20_000
_LONGEST_BAN: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What the samples so far say."""

    level_bytes: float
    """Smoothed."""
    sample_bytes: float
    """The last one."""
    spread: float = _FIRST_SPREAD
    """Mean miss: what a sample differs from the level before it, as a share."""
    miss: float = 0.0
    """The last one, signed; 0 after a cut."""
    gain: float = _FIRST_GAIN
    reserve: float = _FIRST_RESERVE
    """Standard errors kept in reserve under the level."""
    samples: int = 1
    """Samples that the level is smoothed over, up to a few."""
    fresh: bool = True
    """Whether the last sample was taken for the step that comes now, and the one before for the last step."""
    alone: bool = True
    """Whether there was no other sample yet, so that it is used as it is."""
    telling: bool = False
    """Whether the step that comes now tests the samples."""
    proof: int = 0
    """Above 0, fresh samples are exact; at 0 it is unknown; below 0 they are noisy, for so many more good steps."""
    next_ban: int = _FIRST_BAN
    risen: bool = False
    """Whether the last sample alone lay far above the level."""
    at_s: float = 0.0
    """When the last sample was taken."""
    falls: Falls = STILL
    """What may go away while a step runs."""

    @property
    def exact(self) -> bool:
        """Whether the last sample is used as it is, without reserve."""
        return self.fresh and (self.proof > 0 or self.telling or self.alone)

    @property
    def error(self) -> float:
        """Standard error of the smoothed level, as a share: what remains of a miss when the gain is the best one."""
        gain = max(self.gain, 1.0 / self.samples)
        return _SIGMA * self.spread * float((gain * (1.0 - self.gain)) ** 0.5)

    @property
    def likely_bytes(self) -> float:
        """What there is, nothing kept in reserve."""
        return self.sample_bytes if self.exact else self.level_bytes

    @property
    def usable_bytes(self) -> float:
        """What a step may count on."""
        if self.exact:
            taken_at_its_word = self.telling or self.alone
            return self.sample_bytes * (1.0 if taken_at_its_word else 1.0 - self.falls.share)
        usable_bytes = self.level_bytes * max(0.0, 1.0 - self.reserve * self.error)
        return min(usable_bytes, self.sample_bytes) if self.fresh and self.proof == 0 else usable_bytes


def sampled(level: Level | None, sample_bytes: float, *, every_step: bool, at_s: float, failed: bool = False) -> Level:
    """Return the level after a new sample.

    Args:
        level: Before it; `None` if it is the first.
        sample_bytes: What is there.
        every_step: Whether the last step had a sample of its own too.
        at_s: When it was taken.
        failed: Whether a step ran out of memory since the last one.
    """
    if level is None:
        return Level(level_bytes=sample_bytes, sample_bytes=sample_bytes, at_s=at_s)
    miss = sample_bytes / max(1.0, level.level_bytes) - 1.0
    cut = max(_LEAST_CUT, _CUT * level.spread)
    spread, gain, samples, risen = level.spread, level.gain, level.samples + 1, False
    if miss < -cut or (miss > cut and level.risen):
        follow, samples, last = 1.0, 1, 0.0  # memory was taken, or given for good
    elif miss > cut:
        follow, risen, last = 0.0, True, 0.0
    else:
        last = miss
        spread += _SPREAD_FOLLOW * (abs(miss) - spread)
        sigma = _SIGMA * spread
        if sigma > 0.0:
            product = max(-_LARGEST_PRODUCT, min(_LARGEST_PRODUCT, (miss / sigma) * (level.miss / sigma)))
            gain = max(_LEAST_GAIN, min(_MOST_GAIN, gain + _GAIN_FOLLOW * product))
        follow = max(gain, 1.0 / samples)
    fell = 1.0 - sample_bytes / max(1.0, level.sample_bytes)
    proof = level.proof
    if proof == 0 and sample_bytes == level.sample_bytes:
        proof = _MOST_PROOF  # noise does not repeat itself
    return Level(
        level_bytes=level.level_bytes + follow * (sample_bytes - level.level_bytes),
        sample_bytes=sample_bytes,
        spread=spread,
        miss=last,
        gain=gain,
        reserve=level.reserve if level.exact else max(_LEAST_RESERVE, level.reserve - _RESERVE_PER_SAMPLE),
        samples=min(samples, _MOST_SAMPLES),
        fresh=every_step,
        alone=False,
        telling=every_step and proof == 0 and samples >= _TELLING_SAMPLES and miss > _TELLING * spread,
        proof=proof,
        next_ban=level.next_ban,
        risen=risen,
        at_s=at_s,
        falls=fallen(level.falls, fell, at_s - level.at_s, failed=failed),
    )


def trusted(level: Level, peak_bytes: float) -> Level:
    """Return the level after a step that fitted and took `peak_bytes`."""
    if level.proof < 0:
        return replace(level, proof=level.proof + 1)
    speaks = peak_bytes > level.level_bytes * (1.0 + _SPEAKS_FOR * level.spread)
    if level.exact and speaks and level.proof < _MOST_PROOF:
        return replace(level, proof=level.proof + 1)
    return level


def doubted(level: Level) -> Level:
    """Return the level after a step that should have fitted and did not."""
    if level.telling or 0 < level.proof <= _DISPROOF:
        ban = level.next_ban
        return replace(level, telling=False, proof=-ban, next_ban=min(_LONGEST_BAN, 2 * ban))
    if level.proof > 0:
        return replace(level, proof=level.proof - _DISPROOF)
    return replace(level, reserve=min(_MOST_RESERVE, level.reserve + _RESERVE_PER_FAILURE))
