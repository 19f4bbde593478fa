"""How much memory one step may use now, from samples of the device's free memory.

Samples may be taken before every step, once a second, or never; they may be exact or noisy, and nobody says which.
What a sample is worth shows in two ways: how far it lies from those before it, and how often a step that should have
fitted did not. A sample taken for this very step is used as it is, until that has failed too often; any other is
smoothed and trusted less the more they differ. Does not know what a step needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

#: Share of the way that one sample moves the smoothed level: less while samples scatter around it, more while they
#: lie on one side of it (the tracking signal of Trigg and Leach, 1967).
_LEAST_FOLLOW: Final = 0.08
_MOST_FOLLOW: Final = 0.6

#: Share of the way that one difference moves the mean difference, and the mean signed one.
_SPREAD_FOLLOW: Final = 0.1

#: A sample this many mean differences below the level is no noise: memory was taken. Above it must be seen twice.
_CUT: Final = 4.0

#: Differences under this share are never taken for a cut.
_LEAST_CUT: Final = 0.03

#: What is assumed until there are differences.
_FIRST_SPREAD: Final = 0.03

#: A level smoothed over few samples is worth less: so much more reserve, shared by their number.
_LONE_RESERVE: Final = 2.0
_MOST_SAMPLES: Final = 20

#: Mean differences that are kept in reserve for an older sample, and how that number moves with experience.
_FIRST_RESERVE: Final = 2.5
_LEAST_RESERVE: Final = 0.5
_MOST_RESERVE: Final = 6.0
_RESERVE_PER_FAILURE: Final = 1.0
_RESERVE_PER_STEP: Final = 1.0 / 4000.0

#: Failures in spite of a sample for that very step, each fading by the factor a step, above which the samples must be
#: noisy: an exact one fails only by the wobble of the step, which its margin covers but for one time in hundreds. They
#: are believed again after so many good steps, twice as many each time they mislead again.
_NOISY: Final = 1.4
_MISLED_FADES: Final = 0.98
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
    """Mean difference of a sample from the level, as a share."""
    bias: float = 0.0
    """Mean signed difference, as a share."""
    reserve: float = _FIRST_RESERVE
    """Spreads kept in reserve under the level."""
    samples: int = 1
    """Samples that the level is smoothed over, up to a few."""
    fresh: bool = True
    """Whether the last sample was taken for the step that comes now, and the one before for the last step."""
    misled: float = 0.0
    """Failures in spite of such a sample, fading."""
    ban: int = 0
    """Good steps until such a sample is believed again."""
    next_ban: int = _FIRST_BAN
    risen: bool = False
    """Whether the last sample alone lay far above the level."""

    @property
    def exact(self) -> bool:
        """Whether the last sample is taken at its word."""
        return self.fresh and self.ban == 0

    @property
    def usable_bytes(self) -> float:
        """What a step may count on."""
        if self.exact:
            return self.sample_bytes
        return self.level_bytes * max(0.0, 1.0 - (self.reserve + _LONE_RESERVE / self.samples) * self.spread)


def sampled(level: Level | None, sample_bytes: float, *, every_step: bool) -> Level:
    """Return the level after a new sample; `every_step` when the last step had one of its own too."""
    if level is None:
        return Level(level_bytes=sample_bytes, sample_bytes=sample_bytes)
    difference = sample_bytes / max(1.0, level.level_bytes) - 1.0
    cut = max(_LEAST_CUT, _CUT * level.spread)
    spread, bias, risen, samples = level.spread, level.bias, False, level.samples + 1
    if difference < -cut or (difference > cut and level.risen):
        follow, bias, samples = 1.0, 0.0, 1  # memory was taken, or given for good
    elif difference > cut:
        follow, risen = 0.0, True
    else:
        spread += _SPREAD_FOLLOW * (abs(difference) - spread)
        bias += _SPREAD_FOLLOW * (difference - bias)
        tracking = min(_MOST_FOLLOW, abs(bias) / spread) if spread > 0.0 else 0.0
        follow = max(_LEAST_FOLLOW, tracking, 1.0 / samples)
    return Level(
        level_bytes=level.level_bytes + follow * (sample_bytes - level.level_bytes),
        sample_bytes=sample_bytes,
        spread=spread,
        bias=bias,
        reserve=level.reserve,
        samples=min(samples, _MOST_SAMPLES),
        fresh=every_step,
        misled=level.misled,
        ban=level.ban,
        next_ban=level.next_ban,
        risen=risen,
    )


def trusted(level: Level) -> Level:
    """Return the level after a step that fitted: a little less is kept in reserve the next time."""
    if level.exact:
        return level if level.misled == 0.0 else replace(level, misled=level.misled * _MISLED_FADES)
    ban = max(0, level.ban - 1)
    if ban == level.ban and level.reserve <= _LEAST_RESERVE:
        return level
    return replace(level, ban=ban, reserve=max(_LEAST_RESERVE, level.reserve - _RESERVE_PER_STEP))


def doubted(level: Level) -> Level:
    """Return the level after a step that should have fitted and did not."""
    if level.exact:
        misled = level.misled + 1.0
        if misled < _NOISY:
            return replace(level, misled=misled)
        return replace(level, misled=0.0, ban=level.next_ban, next_ban=min(_LONGEST_BAN, 2 * level.next_ban))
    return replace(level, reserve=min(_MOST_RESERVE, level.reserve + _RESERVE_PER_FAILURE))
