"""The steps of memory that a training can take: micro-batch, recomputed blocks, and states on the
host. Pure.

Decides nothing: the policy moves along the rungs. What a rung takes is told by a memory plan, how
fast it is by speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Final

from workers.policy.base import Rung
from workers.training.settings import TrainSettings
from workers.training.speeds import Point

#: No micro-batch is nearer to the one above than this share of it: a finer one would not be worth a
#: change.
_FINEST: Final = 1 / 16

#: With torch.compile: its CUDA graphs keep memory for each size.
_MOST_COMPILED: Final = 6

#: How many levels between none and all a policy may choose from.
_MOST_LEVELS: Final = 6

#: Shares of the optimiser's states on the host, where memory decides.
_SHARES_PCT: Final = (0, 25, 50, 75, 100)

#: All trainings of a machine may put so much of its free memory aside for states.
_HOST_SHARE: Final = 0.5

#: Units are KiB: a finer difference is nothing to a policy, and whole numbers stay small.
_UNIT_BYTES: Final = 1024


def offered_micro_batches(settings: TrainSettings) -> list[int]:
    """Return the micro-batches that a training may use, in ascending order."""
    most = settings.batch if settings.micro == "auto" else min(settings.micro, settings.batch)
    if settings.exact:
        return [most]
    found = micro_batches(settings.batch, most)
    return found if settings.compile == "off" else thinned(found, _MOST_COMPILED)


def thinned(micros: Sequence[int], most: int) -> list[int]:
    """Return at most so many of them, the first and the last among them, spread evenly."""
    last = len(micros) - 1
    return (
        [micros[round(place * last / (most - 1))] for place in range(most)]
        if last >= most
        else list(micros)
    )


def offered_shares(settings: TrainSettings, states_bytes: int, free_bytes: int) -> list[int]:
    """Return the shares of states on the host, in per cent, that a training may use on a host with
    so much free.
    """
    if settings.states_on_host != "auto":
        return [settings.states_on_host]
    return [each for each in _SHARES_PCT if states_bytes * each <= 100 * _HOST_SHARE * free_bytes]


def micro_batches(batch: int, most: int) -> list[int]:
    """Return the micro-batches up to `most` that are worth telling apart: each splits `batch` into
    fewer parts.
    """
    found: list[int] = []
    for micro in sorted({-(-batch // parts) for parts in range(1, batch + 1)}):
        if micro <= most and (not found or micro >= (1 + _FINEST) * found[-1]):
            found.append(micro)
    return found


def rungs_of(
    points: Iterable[Point],
    bytes_of: Callable[[Point], float],
    seconds_of: Callable[[Point], float],
) -> tuple[Rung, ...]:
    """Return the rungs in ascending order of memory.

    One that is slower than a smaller one is left out.
    """
    steps = [
        (max(1, round(bytes_of(point) / _UNIT_BYTES)), seconds_of(point), point) for point in points
    ]
    kept: list[Rung] = []
    fastest = float("inf")
    for units, seconds, point in sorted(steps):
        if seconds < fastest and not (kept and kept[-1].units == units):
            kept.append(Rung(units, point.micro, point.rung_level))
            fastest = seconds
    return tuple(kept)


def points_of(
    settings: TrainSettings, micros: Sequence[int], most_level: int, shares_pct: Sequence[int]
) -> list[Point]:
    """Return all points that a training may use, up to so many recomputed blocks."""
    # A model that is compiled as a whole is compiled for each level.
    stride = -(-most_level // (1 if settings.compile == "model" else _MOST_LEVELS)) or 1
    levels = sorted({*range(0, most_level, stride), most_level})
    return [Point(*each) for each in product(micros, levels, shares_pct)]


def bilinear(
    at: Callable[[int, int], float], most: int, most_level: int
) -> Callable[[int, int], float]:
    """Return what `at` would say of any micro-batch up to `most` and any level, from what it says
    of both ends.

    Between them it is on the safe side: a part takes the larger of what its gradients and what its
    samples take. With all blocks of gpt2-medium recomputed, a line through 1 and 2 samples told
    69 % too little of 16.
    """
    none = at(1, 0), at(most, 0)
    full = (at(1, most_level), at(most, most_level)) if most_level else none

    def told(micro: int, level: int) -> float:
        share = level / most_level if most_level else 0.0
        one, last = ((1 - share) * low + share * high for low, high in zip(none, full, strict=True))
        return one + (last - one) * (micro - 1) / max(1, most - 1)

    return told
