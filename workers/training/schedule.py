"""How an effective batch is split, which learning rate a step has, and how splits are recorded.

Pure. A split is described by limits: "at most so many rows at once". The parts follow from the
limit, so that one limit describes all parts of all steps for as long as it does not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

#: Where the cosine ends, as a share of the highest learning rate.
_LAST_SHARE: Final = 0.1

#: A run of equal micro-batches: limit, level, how many.
Run: TypeAlias = list[int]


def next_part(remaining: int, limit: int) -> int:
    """Return the size of the next part: the largest of as few and as equal parts as `limit` allows."""
    return _over(remaining, _over(remaining, limit))


def parts(batch: int, limit: int) -> list[int]:
    """Split `batch` into parts of at most `limit`, as few as possible and as equal as possible."""
    sizes: list[int] = []
    while (remaining := batch - sum(sizes)) > 0:
        sizes.append(next_part(remaining, limit))
    return sizes


def learning_rate(step: int, *, highest: float, steps: int, warmup_steps: int) -> float:
    """Return the rate of the optimiser step `step`, counted from 0: it rises evenly, then falls as
    a cosine.
    """
    if step < warmup_steps:
        return highest * (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return highest * (_LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def record(runs: list[Run], limit: int, level: int) -> None:
    """Add one micro-batch to recorded runs, in place."""
    if runs and runs[-1][:2] == [limit, level]:
        runs[-1][2] += 1
    else:
        runs.append([limit, level, 1])


def unrolled(runs: Iterable[Run]) -> Iterator[tuple[int, int]]:
    """Yield limit and level of each recorded micro-batch."""
    for limit, level, count in runs:
        for _ in range(count):
            yield limit, level


def canonical(remaining: int, rows: int, previous: int | None) -> int:
    """Return the limit to record for a part of `rows`: the previous one if it would have given the
    same part.
    """
    if previous is not None and next_part(remaining, previous) == rows:
        return previous
    return rows


def _over(number: int, by: int) -> int:
    return -(-number // by)
