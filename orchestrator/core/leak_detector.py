"""Whether a worker's process holds more and more memory that its work does not need. Pure.

Whatever the size of the steps is, what the process keeps after a release is no longer needed.
Beside that it uses the resident memory of the process, and on a card also what its tensors hold.
Both vary with the work, so the lowest value of the last statuses is compared with the highest of
the first ones after the work last changed. While a state is parked in host memory nothing is
compared. Measures nothing (the worker does) and ends nothing (`lifecycle.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.messages import Status, WorkerState
from workers.units import MIB

#: The first statuses after a change still grow into their size: lazily loaded kernels, a ring that
#: fills.
_SETTLING = 3

#: Reports whose highest value is what the work really needs.
_BASE = 5

#: Optimiser steps in which the memory of a training still grows: its states appear in the first.
_FIRST_STEPS = 2

#: Reports whose least value is what does not go away any more.
_RECENT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakWatch:
    """What is known of one process's memory since its work last changed."""

    work: tuple[int | None, ...] | None = None
    """Incarnation, size, batch and claim; of a training also its level, and whether a checkpoint
    was saved.
    """
    first_step: int | None = None
    """The optimiser step that the process told first; `None` where nothing is trained."""
    first_bytes: tuple[int, ...] = ()
    """What it held by the statuses that set the scale, those in which it settles among them."""
    recent_bytes: tuple[int, ...] = ()
    """What it held by the last ones after those."""
    kept_bytes: int | None = None
    """What the process kept after its last release; `None` before the first."""
    statuses: int = 0
    """Of the process, whatever its work was."""

    @property
    def growth_bytes(self) -> int | None:
        """Bytes that came and stayed; `None` before enough statuses of the same work are in."""
        if len(self.recent_bytes) < _RECENT:
            return None
        return min(self.recent_bytes) - max(self.first_bytes[_SETTLING:])

    def unneeded_bytes(self, limit_mib: float | None, kept_limit_bytes: float) -> int | None:
        """Return what is not needed if it is too much: by one limit for growth, and by another for
        what is kept. `None` as the first limit: nothing ever is.
        """
        if limit_mib is None:
            return None
        limit_bytes = int(limit_mib * MIB)
        kept_bytes = self.kept_bytes
        if kept_bytes is not None and kept_bytes >= min(limit_bytes, kept_limit_bytes):
            return kept_bytes
        growth_bytes = self.growth_bytes
        return growth_bytes if growth_bytes is not None and growth_bytes >= limit_bytes else None


#: Nothing is known yet.
NO_WATCH = LeakWatch()


def observe(watch: LeakWatch, status: Status) -> LeakWatch:
    """Take a status into account; one that measured nothing changes nothing."""
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
    # On a CPU tensors are resident memory already.
    on_card = status.memory.allocated_bytes if status.device.kind != "cpu" else 0
    return status.rss_bytes + on_card
