"""How an effective batch is split, which learning rate a step has, and how far a training is.

Pure. A split is described by `most_rows`, the rows (samples) computed at once, at most; the parts
follow from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from workers.training.settings import TrainSettings

#: Where the cosine ends, as a share of the highest learning rate.
_LAST_SHARE: Final = 0.1

#: No micro-batch is nearer to the one above than this share of it: a finer one would not be worth a
#: change.
_FINEST: Final = 1 / 16


def next_part(remaining: int, most_rows: int) -> int:
    """Return the size of the next part: the largest of as few and as equal parts as
    `most_rows` allows.
    """
    return -(-remaining // -(-remaining // most_rows))


def rate_share(step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the share of the highest learning rate in step `step`, counted from 0: it rises
    evenly, then falls as a cosine.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return _LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2


def offered_micro_batches(settings: TrainSettings) -> list[int]:
    """Return the micro-batches that a training may use, in ascending order: each splits the batch
    into fewer parts than the one before.
    """
    batch = settings.batch
    most = batch if settings.micro == "auto" else min(settings.micro, batch)
    if settings.exact:
        return [most]
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
    losses: list[float] = field(default_factory=list)
    """Of the first and of the last optimiser step."""
    best_loss: float | None = None
    """The lowest of all validations so far; `None`: there was none."""

    def finished_step(self, loss: float, batch: int) -> None:
        """Count an optimiser step of so many samples."""
        self.losses = [*self.losses[:1], loss]
        self.step += 1
        self.samples_used += batch
