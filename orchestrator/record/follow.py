"""Follows a run from outside its head: each look at the run folder gives a `Frame`.

Reads the store with short looks, so that no watcher can hold up the head; a look at a store that
has not changed reads nothing. Does not draw, and does not read the course of a run (`history.py`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from orchestrator.record.archive import StoredEvent, StoredRun, read_events_after, read_run
from orchestrator.record.model import Snapshot
from orchestrator.record.records import STORE_NAME

#: The head writes several times a second. Its store is late when nothing came for so long, and, on
#: another machine where its process cannot be looked up, the head counts as gone after the second.
LATE_AFTER_S = 5.0
_GONE_AFTER_S = 30.0


class Freshness(StrEnum):
    """How far what is shown can be believed to be so now."""

    LIVE = "live"
    LATE = "late"
    HEAD_GONE = "head gone"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A run as its store tells it at one look."""

    number: int
    """Counts the frames that differ in what was read."""
    run: StoredRun
    snapshot: Snapshot
    events: tuple[StoredEvent, ...]
    """What has happened since the frame before; of the first frame, the last events."""
    freshness: Freshness
    late_s: float
    """Seconds since the store last changed."""
    missed: tuple[str, ...] = ()
    """What fell short, of a run that has ended and was not good."""


class Follower:
    """Looks at one run folder again and again."""

    def __init__(
        self,
        folder: Path,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._monotonic_s = monotonic_s
        self._unix_s = unix_s
        self._here = socket.gethostname()
        self._state: tuple[tuple[int, int, int] | None, ...] = ()
        self._frame: Frame | None = None
        self._updated_at_unix_s: float | None = None
        self._changed_at_s = monotonic_s()
        self._event = 0

    def look(self) -> Frame:
        """Return the run as it is now.

        Raises:
            NothingStoredError: The head has not stored anything yet.
            ArchiveError: The folder or its store cannot be read.
        """
        state = tuple(_state_of(self._folder / f"{STORE_NAME}{suffix}") for suffix in ("", "-wal"))
        before, now_s = self._frame, self._monotonic_s()
        if before is not None and (state == self._state or before.freshness is Freshness.ENDED):
            # Whether its head still lives does not show in the store.
            run = before.run if before.freshness is Freshness.ENDED else self._run_again(before.run)
            freshness, late_s = self._judged(run, now_s)
            self._frame = replace(before, run=run, events=(), freshness=freshness, late_s=late_s)
            return self._frame
        run = read_run(self._folder)
        events = read_events_after(self._folder, self._event)
        self._state = state
        self._event = max((self._event, *(event.number for event in events)))
        if before is None and run.updated_at_unix_s is not None and run.facts.host == self._here:
            self._changed_at_s = now_s - max(0.0, self._unix_s() - run.updated_at_unix_s)
        elif run.updated_at_unix_s != self._updated_at_unix_s or events:
            self._changed_at_s = now_s
        self._updated_at_unix_s = run.updated_at_unix_s
        freshness, late_s = self._judged(run, now_s)
        self._frame = Frame(
            number=1 if before is None else before.number + 1,
            run=run,
            snapshot=run.snapshot(),
            events=events,
            freshness=freshness,
            late_s=late_s,
            missed=_missed(events) or (() if before is None else before.missed),
        )
        return self._frame

    def _run_again(self, run: StoredRun) -> StoredRun:
        if self._monotonic_s() - self._changed_at_s < LATE_AFTER_S:
            return run
        return read_run(self._folder)

    def _judged(self, run: StoredRun, now_s: float) -> tuple[Freshness, float]:
        late_s = max(0.0, now_s - self._changed_at_s)
        if run.outcome != "running" and not run.was_killed:
            return Freshness.ENDED, late_s
        is_foreign = run.facts.host != self._here
        if (late_s > _GONE_AFTER_S) if is_foreign else run.was_killed:
            return Freshness.HEAD_GONE, late_s
        return (Freshness.LATE if late_s > LATE_AFTER_S else Freshness.LIVE), late_s


def _missed(events: Iterable[StoredEvent]) -> tuple[str, ...]:
    ends = [event.details.get("missed") for event in events if event.event == "run_ended"]
    return tuple(map(str, ends[-1])) if ends and isinstance(ends[-1], list) else ()


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; `None` if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
