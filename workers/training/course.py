"""How far a training is, in plain numbers, and which parts each optimiser step was made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from workers.training import schedule


@dataclass(slots=True, kw_only=True)
class Course:
    """What a saved state says beside its tensors."""

    step: int = 0
    """Optimiser steps done."""
    samples_used: int = 0
    """Of all optimiser steps that are done."""
    skipped_updates: int = 0
    """Because fp16 gradients overflowed."""
    losses: list[float] = field(default_factory=list)
    """Of the first and of the last optimiser step."""
    splits: list[schedule.Run] = field(default_factory=list)
    """Limit, level and number of all micro-batches."""

    def plain(self) -> dict[str, Any]:
        """Return a copy that a file can hold."""
        return asdict(self)

    def finished_step(
        self, loss: float, parts: Iterable[tuple[int, int]], *, updated: bool
    ) -> None:
        """Count an optimiser step that was made of parts, each of so many rows at a level."""
        sizes = list(parts)
        remaining = batch = sum(rows for rows, _ in sizes)
        limit = self.splits[-1][0] if self.splits else None
        for rows, level in sizes:
            limit = schedule.canonical(remaining, rows, limit)
            schedule.record(self.splits, limit, level)
            remaining -= rows
        self.losses = [*self.losses[:1], loss]
        self.step += 1
        self.samples_used += batch
        self.skipped_updates += not updated
