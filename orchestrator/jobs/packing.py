"""Whether two jobs on one card do more together than one after the other.

A job that has a card for itself has all of its memory, so a trial begins with a restart of it with
less. `trial_pays` counts that. Then both run for `TRIAL_S`, `judge` compares their speeds with those
that each had alone, and the verdict holds for every pair of the same kinds of jobs on such a card.
Pure; it starts, measures and recalls nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.jobs.model import Job, PackJudged
from workers.units import MIB

#: How long both jobs are measured together. Their first steps are not in it.
TRIAL_S: Final = 30.0
#: A card that its job uses for less than this share of the time has room for a second one.
BUSY_BELOW: Final = 0.5
#: Both speeds together, as shares of those alone, must come to at least this.
LEAST_GAIN: Final = 1.10
#: Most of the cards' time that trials may take.
TRIALS_SHARE: Final = 0.02
#: A packed job gets what was measured for it, and this share more, or `RESERVE_BYTES` if that is
#: more: an allocator fragments, and the next long sequence takes more than the last.
RESERVE: Final = 0.10
RESERVE_BYTES: Final = 256 * MIB
#: Assumed spread of a speed that is known as one number only, as a share of it.
NOISE: Final = 0.03

_Z: Final = statistics.NormalDist().inv_cdf(0.975)

#: Settings that change what a training learns, and not how it loads a card.
_SAME_LOAD: Final = frozenset(
    {
        *("train.lr", "train.warmup_steps", "train.weight_decay", "train.clip", "train.steps"),
        *("train.epochs", "train.label_smoothing", "train.save_every_s", "workload.seed"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Steps per second of one job, each value from a time of its own of a few seconds."""

    alone: Sequence[float]
    """On this kind of card; a single value where only that was recorded."""
    together: Sequence[float]


def fingerprint(job: Job) -> str:
    """Return what a job loads a card with, in words; jobs with the same share their verdicts.

    A setting that is not known to leave the load as it is makes a kind of its own.
    """
    if job.command is not None:
        return " ".join(job.command.argv)
    settings = {**job.overrides, **job.settings}
    return " ".join(f"{key}={settings[key]}" for key in sorted(settings.keys() - _SAME_LOAD))


def pair_of(first: str, second: str, card_title: str, driver: str) -> str:
    """Return the name under which a verdict on two fingerprints is remembered."""
    low, high = sorted((first, second))
    return f"{low} + {high} on {card_title}, driver {driver}"


def packed_budgets(measured: Sequence[int | None], room_bytes: int) -> tuple[int, ...] | None:
    """Return the budgets of jobs that share a card, from the most that each has taken.

    `None` where one of them was never measured, or where their sum is more than the card's room.
    """
    budgets = tuple(
        each + max(RESERVE_BYTES, math.ceil(each * RESERVE))
        for each in measured
        if each is not None
    )
    return budgets if len(budgets) == len(measured) and sum(budgets) <= room_bytes else None


def trial_cost_s(save_s: float, load_s: float) -> float:
    """Return the most that a trial costs a card, in seconds of one job.

    The first job is saved and loaded once with less memory, and once more with all of it if the
    two are not kept. Of the measurement itself nothing is counted as useful.
    """
    return TRIAL_S + 2 * (save_s + load_s)


def trial_pays(
    *,
    busy_share: float | None,
    remaining_s: float,
    second_remaining_s: float,
    save_s: float,
    load_s: float,
    spent_s: float,
    cards_s: float,
) -> bool:
    """Return whether a second job is to be tried beside a first one.

    `busy_share` is the share of time in which the first keeps its card busy; without it nothing is
    tried. `remaining_s` are what each would still take alone on this card, `spent_s` what earlier
    trials of this queue have cost (`trial_cost_s`), `cards_s` what all its cards have worked.
    """
    if busy_share is None or busy_share >= BUSY_BELOW:
        return False
    cost_s = trial_cost_s(save_s, load_s)
    # Until the shorter one ends, both together save at least so much against one after the other.
    saved_s = (LEAST_GAIN - 1) * min(remaining_s, second_remaining_s)
    return saved_s > cost_s and spent_s + cost_s <= TRIALS_SHARE * cards_s


def judge(pair: str, first: Speeds, second: Speeds, at_s: float) -> PackJudged:
    """Return the verdict on two jobs that have run together for a trial.

    They are kept if the sum of both speeds, as shares of those alone, is at least `LEAST_GAIN` and
    the 95 % interval of this sum lies above 1.0.
    """
    gain, low = gain_of(first, second)
    return PackJudged(at_s=at_s, pair=pair, gain=gain, is_kept=gain >= LEAST_GAIN and low > 1.0)


def gain_of(first: Speeds, second: Speeds) -> tuple[float, float]:
    """Return the sum of both shares, and the lower end of its 95 % interval.

    Without two values of each job together nothing is known: the lower end is 0 then.
    """
    gain = variance = 0.0
    for speeds in (first, second):
        if len(speeds.together) < 2 or not speeds.alone or statistics.fmean(speeds.alone) <= 0:
            return gain, 0.0
        share = statistics.fmean(speeds.together) / statistics.fmean(speeds.alone)
        gain += share
        # The variance of a ratio of two means, to the first order.
        variance += share**2 * sum(map(_relative_variance, (speeds.together, speeds.alone)))
    return gain, gain - _Z * math.sqrt(variance)


def _relative_variance(values: Sequence[float]) -> float:
    """Return the variance of a mean as a share of its square."""
    if len(values) < 2:
        return NOISE**2
    mean = statistics.fmean(values)
    return statistics.variance(values) / len(values) / mean**2 if mean > 0 else 0.0
