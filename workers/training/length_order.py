"""Which samples come together where their lengths differ: batches of similar length, or several
documents in a row.

Pure. Both are functions of the seed, the lengths and of how many samples were used, so a training
can go on anywhere. Does not read data: lengths are given.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final

from workers.training.order import Sample, mixed, permuted

#: Batches that are sorted together, at most. More would make batches more alike, and neighbours in
#: time as well.
_POOL_BATCHES: Final = 64

#: A pool is at most one part in so many of the data set: else an item would come twice in a batch.
_POOLS_OF_EPOCH: Final = 4

#: Documents that are packed together, so that a row's documents lie near each other in a file.
PACKED_TOGETHER: Final = 1024

_STREAM: Final = 2


def pool_samples(items: int, batch: int) -> int:
    """Return how many samples are sorted together."""
    return batch * max(1, min(_POOL_BATCHES, items // (_POOLS_OF_EPOCH * batch)))


def by_length(
    pool: Sequence[Sample], lengths: Sequence[int], batch: int, seed: int
) -> list[Sample]:
    """Return a pool in batches of similar length; which length comes first is drawn."""
    places = sorted(range(len(pool)), key=lambda place: (lengths[place], pool[place].number))
    batches = [places[first : first + batch] for first in range(0, len(places), batch)]
    drawn = mixed(seed, _STREAM, pool[0].number)
    turns = [permuted(drawn, 0, len(batches), turn) for turn in range(len(batches))]
    return [pool[place] for turn in turns for place in batches[turn]]


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the documents of each row: the longest first, each into the row that it fills best.

    Raises:
        ValueError: A document is longer than a row.
    """
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room that is left, and its row
    for document in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length = lengths[document]
        if length > room:
            raise ValueError(f"document {document} has {length} tokens, and a row {room}")
        found = bisect_left(left, (length, 0))
        if found < len(left):
            space, row = left.pop(found)
            rows[row].append(document)
        else:
            space, row = room, len(rows)
            rows.append([document])
        insort(left, (space - length, row))
    return rows
