"""How an effective batch is split, which learning rate a step has, and how splits are recorded.

Pure. A split is described by limits: "at most so many rows at once". The parts follow from the
limit, so that one limit describes all parts of all steps for as long as it does not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from workers.training.settings import TrainSettings

#: Where the cosine ends, as a share of the highest learning rate.
_LAST_SHARE: Final = 0.1

#: No micro-batch is nearer to the one above than this share of it: a finer one would not be worth a
#: change.
_FINEST: Final = 1 / 16

#: Micro-batches with torch.compile: its CUDA graphs keep memory for each size.
_MOST_COMPILED: Final = 6

#: A run of equal micro-batches: limit, level, how many.
Run: TypeAlias = list[int]


def next_part(remaining: int, limit: int) -> int:
    """Return the size of the next part: the largest of as few and as equal parts as `limit` allows."""
    return -(-remaining // -(-remaining // limit))


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


def offered_micro_batches(settings: TrainSettings) -> list[int]:
    """Return the micro-batches that a training may use, in ascending order."""
    most = settings.batch if settings.micro == "auto" else min(settings.micro, settings.batch)
    if settings.exact:
        return [most]
    micros = micro_batches(settings.batch, most)
    last = len(micros) - 1
    if settings.compile == "off" or last < _MOST_COMPILED:
        return micros
    return [micros[round(place * last / (_MOST_COMPILED - 1))] for place in range(_MOST_COMPILED)]


def micro_batches(batch: int, most: int) -> list[int]:
    """Return the micro-batches up to `most` that are worth telling apart: each splits `batch` into
    fewer parts.
    """
    micros: list[int] = []
    for micro in sorted({-(-batch // count) for count in range(1, batch + 1)}):
        if micro <= most and (not micros or micro >= (1 + _FINEST) * micros[-1]):
            micros.append(micro)
    return micros


@dataclass(slots=True, kw_only=True)
class Course:
    """How far a training is: what a saved state says beside its tensors."""

    step: int = 0
    """Optimiser steps done."""
    samples_used: int = 0
    """Of all optimiser steps that are done."""
    skipped_updates: int = 0
    """Because fp16 gradients overflowed."""
    losses: list[float] = field(default_factory=list)
    """Of the first and of the last optimiser step."""
    splits: list[Run] = field(default_factory=list)
    """Limit, level and number of all micro-batches."""

    def finished_step(
        self, loss: float, parts: Iterable[tuple[int, int]], *, updated: bool
    ) -> None:
        """Count an optimiser step that was made of parts, each of so many rows at a level."""
        sizes = list(parts)
        remaining = batch = sum(rows for rows, _ in sizes)
        limit = self.splits[-1][0] if self.splits else None
        for rows, level in sizes:
            limit = canonical(remaining, rows, limit)
            record(self.splits, limit, level)
            remaining -= rows
        self.losses = [*self.losses[:1], loss]
        self.step += 1
        self.samples_used += batch
        self.skipped_updates += not updated


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
