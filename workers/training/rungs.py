"""The steps of memory that a training can take: how many samples at once, and how many blocks checkpointed. Pure.

Decides nothing: the policy moves along the rungs. What a rung takes is told by a memory plan, how fast it is by a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from workers.policy.base import Rung
from workers.training.settings import TrainSettings

#: What a part of a batch costs beside its samples, in samples: 4 at once were 4 % slower than 16 (two CPU cores, three
#: layers of width 64; on a card it is more).
_PART_SAMPLES: Final = 0.16

#: Computing all blocks again takes a third of the time of a step: a forward pass beside a forward and a backward one,
#: which takes twice as long.
_AGAIN: Final = 1 / 3

#: No micro-batch is nearer to the one above than this share of it: a finer one would not be worth a change.
_FINEST: Final = 1 / 16

#: With torch.compile: its CUDA graphs keep memory for each size.
_MOST_COMPILED: Final = 6

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
    return [micros[round(place * last / (most - 1))] for place in range(most)] if last >= most else list(micros)


def micro_batches(batch: int, most: int) -> list[int]:
    """Return the micro-batches up to `most` that are worth telling apart: each splits `batch` into fewer parts."""
    found: list[int] = []
    for micro in sorted({-(-batch // parts) for parts in range(1, batch + 1)}):
        if micro <= most and (not found or micro >= (1 + _FINEST) * found[-1]):
            found.append(micro)
    return found


def rungs_of(
    micros: Iterable[int], levels: Iterable[int], most_level: int, activations_bytes: Callable[[int, int], float]
) -> tuple[Rung, ...]:
    """Return the rungs in ascending order of memory; one that is slower than a smaller one is left out."""
    levels = tuple(levels)
    steps = [
        (max(1, round(activations_bytes(micro, level) / _UNIT_BYTES)), _seconds(micro, level, most_level), micro, level)
        for micro in micros
        for level in levels
    ]
    kept: list[Rung] = []
    fastest = float("inf")
    for units, seconds, micro, level in sorted(steps):
        if seconds < fastest and not (kept and kept[-1].units == units):
            kept.append(Rung(units, micro, level))
            fastest = seconds
    return tuple(kept)


def bilinear(at: Callable[[int, int], float], most: int, most_level: int) -> Callable[[int, int], float]:
    """Return what `at` would say of any micro-batch up to `most` and any level, from what it says of both ends.

    Between them it is on the safe side: a part takes the larger of what its gradients and what its samples take. With
    all blocks of gpt2-medium checkpointed, a line through 1 and 2 samples told 69 % too little of 16.
    """
    none = at(1, 0), at(most, 0)
    full = (at(1, most_level), at(most, most_level)) if most_level else none

    def told(micro: int, level: int) -> float:
        share = level / most_level if most_level else 0.0
        one, last = ((1 - share) * low + share * high for low, high in zip(none, full, strict=True))
        return one + (last - one) * (micro - 1) / max(1, most - 1)

    return told


def _seconds(micro: int, level: int, most_level: int) -> float:
    """Say how long a sample takes, as a multiple of what it takes at best."""
    return (1 + _PART_SAMPLES / micro) * (1 + _AGAIN * level / max(1, most_level))
