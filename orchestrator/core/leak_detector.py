"""Detects a worker's process that holds a growing amount of memory without need. Pure.

Two signals: the memory that the process keeps after a release, which no work needs; and growth of
its resident memory, plus the memory of its tensors on a card. The second varies with the work, so
the lowest value of the latest statuses is compared with the highest of the first ones since the
work last changed. While a training state is parked in host memory, growth is not checked. Measures
nothing (the worker does) and ends no process (`lifecycle.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.messages import Status, WorkerState
from workers.units import MIB

#: Statuses after a change that are ignored: memory still grows (lazily loaded kernels, a ring that
#: fills).
_SETTLING = 3

#: Number of statuses whose highest value is the memory that the work needs.
_BASE = 5

#: Optimiser steps in which a training's memory still grows: the first creates the optimiser's states.
_FIRST_STEPS = 2

#: Number of latest statuses whose lowest value counts as memory that stays.
_RECENT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakWatch:
    """The memory of one process since its work last changed."""

    work: tuple[int | None, ...] | None = None
    """Incarnation, size, batch and claim; for a training also its memory level, and whether a
    checkpoint was saved.
    """
    first_step: int | None = None
    """The first optimiser step that the process reported; `None`: it trains nothing."""
    first_bytes: tuple[int, ...] = ()
    """Memory in the first `_SETTLING` + `_BASE` statuses."""
    recent_bytes: tuple[int, ...] = ()
    """Memory in the last `_RECENT` statuses after those."""
    kept_bytes: int | None = None
    """Memory that the process kept after its last release; `None` before the first."""
    statuses: int = 0
    """Number of statuses of the process, across changes of its work."""

    @property
    def growth_bytes(self) -> int | None:
        """Growth that has stayed; `None` until there are enough statuses of the same work."""
        if len(self.recent_bytes) < _RECENT:
            return None
        return min(self.recent_bytes) - max(self.first_bytes[_SETTLING:])

    def unneeded_bytes(self, limit_mib: float | None, kept_limit_bytes: float) -> int | None:
        """Return the memory that the process does not need, or `None` if it is below the limits.

        Growth counts from `limit_mib` on, kept memory from the smaller of `limit_mib` and
        `kept_limit_bytes` on. `limit_mib` of `None` switches the check off.
        """
        if limit_mib is None:
            return None
        limit_bytes = int(limit_mib * MIB)
        kept_bytes = self.kept_bytes
        if kept_bytes is not None and kept_bytes >= min(limit_bytes, kept_limit_bytes):
            return kept_bytes
        growth_bytes = self.growth_bytes
        return growth_bytes if growth_bytes is not None and growth_bytes >= limit_bytes else None


#: The process has not reported yet.
NO_WATCH = LeakWatch()


def observe(watch: LeakWatch, status: Status) -> LeakWatch:
    """Return the watch after a status; a status without measurements changes nothing."""
    held_bytes = _held_bytes(status)
    if held_bytes is None:
        return watch
    work: tuple[int | None, ...] | None = (
        status.incarnation,
        status.size,
        status.batch,
        status.claim_bytes,
    )
    first_step, progress = watch.first_step, status.progress
    if progress is not None and progress.train_step is not None and work is not None:
        first_step = progress.train_step if first_step is None else first_step
        # The copy that a checkpoint is written from stays in memory.
        work = (*work, progress.memory_level, progress.saved_step is not None)
        if progress.train_step < first_step + _FIRST_STEPS or status.state is WorkerState.PARKED:
            work = None
    watch = replace(
        watch,
        first_step=first_step,
        kept_bytes=None if status.memory is None else status.memory.kept_bytes,
        statuses=watch.statuses + 1,
    )
    if work is None or work != watch.work:
        return replace(watch, work=work, first_bytes=(), recent_bytes=())
    if len(watch.first_bytes) < _SETTLING + _BASE:
        return replace(watch, first_bytes=(*watch.first_bytes, held_bytes))
    return replace(watch, recent_bytes=(*watch.recent_bytes, held_bytes)[-_RECENT:])


def _held_bytes(status: Status) -> int | None:
    if status.rss_bytes is None or status.device is None or status.memory is None:
        return None
    # On a CPU, resident memory includes the tensors.
    on_card = status.memory.allocated_bytes if status.device.kind != "cpu" else 0
    return status.rss_bytes + on_card
