"""How an effective batch is split, which learning rate a step has, and how far a training is.

Pure. `most_rows`, the upper limit of rows (samples) computed at once, defines the split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from workers.training.settings import TrainSettings

#: Final learning rate, as a share of the highest one.
_FINAL_RATE_SHARE: Final = 0.1

#: Least relative distance between two micro-batches. A finer choice would not be worth a change.
_LEAST_DISTANCE: Final = 1 / 16


def next_part(remaining: int, most_rows: int) -> int:
    """Return the size of the next part: as few and as equal parts as `most_rows` allows."""
    return -(-remaining // -(-remaining // most_rows))


def rate_share(step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0, as a share of the highest one: a
    linear warm-up, then a cosine decay.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return _FINAL_RATE_SHARE + (1 - _FINAL_RATE_SHARE) * (1 + math.cos(math.pi * done)) / 2


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
        if micro <= most and (not micros or micro >= (1 + _LEAST_DISTANCE) * micros[-1]):
            micros.append(micro)
    return micros


@dataclass(slots=True, kw_only=True)
class Course:
    """Progress of a training: the part of a saved state that is no tensor."""

    step: int = 0
    """Optimiser steps done."""
    samples_used: int = 0
    """Samples of all optimiser steps done."""
    losses: list[float] = field(default_factory=list)
    """Losses of the first and the last optimiser step."""
    best_loss: float | None = None
    """Lowest validation loss so far; `None`: no validation yet."""

    def finished_step(self, loss: float, batch: int) -> None:
        """Count an optimiser step over `batch` samples."""
        self.losses = [*self.losses[:1], loss]
        self.step += 1
        self.samples_used += batch
