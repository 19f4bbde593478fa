"""The order of samples, and which samples form a batch: a function of the seed and of the number of
samples used, so nothing else must be saved.

Pure. Each epoch has its own permutation. It is computed index by index, so it takes no memory, and
a training can begin anywhere in it. It does not depend on loader processes or on where a run was
interrupted. If lengths differ, the caller gives them; nothing here reads data.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_MASK: Final = 2**64 - 1

#: Rounds of multiply, add and shift. With fewer, neighbours stay recognisable in small data sets.
_ROUNDS: Final = 4

#: Most batches that are sorted together. More would make the samples of a batch more alike, and
#: neighbours in time as well.
_POOL_BATCHES: Final = 64

#: An epoch has at least this many pools: with fewer, an item could be in a batch twice.
_POOLS_OF_EPOCH: Final = 4

#: Number of documents packed together, so that those of a row are near each other in a file.
PACKED_TOGETHER: Final = 1024

_LENGTHS_STREAM: Final = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """One use of one item of a data set."""

    number: int
    """The place of this use in the whole training, from 0; unique."""
    epoch: int
    index: int
    """The item's place in the data set."""


def samples(seed: int, items: int, first: int, count: int) -> list[Sample]:
    """Return the samples `first` to `first + count - 1` of a training on `items` items."""
    return [
        Sample(number, number // items, permuted(seed, number // items, items, number % items))
        for number in range(first, first + count)
    ]


def permuted(seed: int, epoch: int, items: int, place: int) -> int:
    """Return which item stands at `place` in an epoch: a permutation of all places."""
    bits = max(1, (items - 1).bit_length())
    mask, shift = 2**bits - 1, max(1, bits // 2)
    value = place
    # Follow the cycle of a permutation of 2^bits numbers until it returns to the items.
    while True:
        for factor, summand in _keys(seed, epoch):
            value = (value * factor + summand) & mask
            value ^= value >> shift
        if value < items:
            return value


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> list[tuple[int, int]]:
    return [
        (mixed(seed, epoch, turn, 0) | 1, mixed(seed, epoch, turn, 1)) for turn in range(_ROUNDS)
    ]


def mixed(*numbers: int) -> int:
    """Return 64 bits that depend on all numbers and on their order (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def pool_samples(items: int, batch: int) -> int:
    """Return the number of samples that are sorted together by length."""
    return batch * max(1, min(_POOL_BATCHES, items // (_POOLS_OF_EPOCH * batch)))


def by_length(
    pool: Sequence[Sample], lengths: Sequence[int], batch: int, seed: int
) -> list[Sample]:
    """Return a pool in batches of similar length; the order of the batches is drawn."""
    places = sorted(range(len(pool)), key=lambda place: (lengths[place], pool[place].number))
    batches = [places[first : first + batch] for first in range(0, len(places), batch)]
    drawn = mixed(seed, _LENGTHS_STREAM, pool[0].number)
    turns = [permuted(drawn, 0, len(batches), turn) for turn in range(len(batches))]
    return [pool[place] for turn in turns for place in batches[turn]]


def packed_rows(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the documents of each row: the longest first, each into the row that it fills best. No
    document may be longer than a row.
    """
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room that is left, and its row
    for document in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length = lengths[document]
        place = bisect_left(left, (length, 0))
        if place == len(left):
            left.append((room, len(rows)))
            rows.append([])
        space, row = left.pop(place)
        rows[row].append(document)
        insort(left, (space - length, row))
    return rows
