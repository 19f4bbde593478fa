"""Which samples come when: a function of the seed and of how many samples were used, so nothing
else has to be saved.

Pure. Each epoch has a permutation of its own. It is computed index by index, so it takes no memory,
and a training can begin anywhere in it. It does not depend on batch sizes, loader processes or
where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_MASK: Final = 2**64 - 1

#: Rounds of multiply, add and shift. With fewer, neighbours stay recognisable in small data sets.
_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One use of one item of a data set."""

    number: int
    """Its place in the whole training, from 0; no other use has the same."""
    epoch: int
    index: int
    """The item's place in the data set."""


def samples(seed: int, items: int, first: int, count: int) -> list[Sample]:
    """Return the samples `first` to `first + count - 1` of a training on `items` items."""
    return list(_samples(seed, items, first, count))


def permuted(seed: int, epoch: int, items: int, place: int) -> int:
    """Return which item stands at `place` in an epoch.

    For all places together this is a permutation.
    """
    bits = max(1, (items - 1).bit_length())
    mask, shift = 2**bits - 1, max(1, bits // 2)
    value = place
    while (
        True
    ):  # walks the cycle of a permutation of 2^bits numbers until it is back among the items
        for factor, summand in _keys(seed, epoch):
            value = (value * factor + summand) & mask
            value ^= value >> shift
        if value < items:
            return value


def mixed(*numbers: int) -> int:
    """Return 64 bits that depend on all numbers and on their order (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def _samples(seed: int, items: int, first: int, count: int) -> Iterator[Sample]:
    for number in range(first, first + count):
        epoch, place = divmod(number, items)
        yield Sample(number, epoch, permuted(seed, epoch, items, place))


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> list[tuple[int, int]]:
    return [
        (mixed(seed, epoch, turn, 0) | 1, mixed(seed, epoch, turn, 1)) for turn in range(_ROUNDS)
    ]
