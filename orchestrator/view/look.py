"""Reads one run folder repeatedly, for `top`, the page, messages and reports.

Does not decide when to read, nor what is wrong (`alerts.py`) or how it is shown.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.events import StoredEvent, read_events
from orchestrator.record.jobs import queue_snapshot
from orchestrator.view.alerts import FirstSeen, Frame, Freshness, alerts
from orchestrator.view.jobs import summary_line
from workers.host.machine import free_bytes

EVENTS_MOST: Final = 100
"""A frame has the newest events, up to this number."""

#: The head writes once a second. Its store is late after the first of these times without a change.
#: After the second, a head on another machine, whose process cannot be checked, counts as gone.
LATE_AFTER_S: Final = 5.0
_GONE_AFTER_S: Final = 30.0


class Watch:
    """Reads one run folder into frames; keeps events and first times of alerts for the next one."""

    def __init__(
        self,
        folder: Path,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._monotonic_s, self._unix_s = folder, monotonic_s, unix_s
        self._frame: Frame | None = None
        self._changed_at_s = monotonic_s()
        self._events = deque[StoredEvent](maxlen=EVENTS_MOST)
        self._since: FirstSeen = {}

    def read(self) -> Frame:
        """Return the present state of the run; a run that has ended is not read again.

        `NothingStoredError`: the head has not stored anything yet; `ArchiveError`: the folder or
        its store cannot be read.
        """
        before, now_s, now_unix_s = self._frame, self._monotonic_s(), self._unix_s()
        if before is not None and before.freshness is Freshness.ENDED:
            return before
        run = read_run(self._folder)
        after = self._events[-1].number if self._events else 0
        news = read_events(self._folder, after=after, limit=EVENTS_MOST)
        self._events.extend(news)
        is_here = run.facts.host == socket.gethostname()
        if before is None and run.updated_at_unix_s is not None and is_here:
            self._changed_at_s = now_s - max(0.0, now_unix_s - run.updated_at_unix_s)
        elif before is None or news or run.updated_at_unix_s != before.run.updated_at_unix_s:
            self._changed_at_s = now_s
        late_s = max(0.0, now_s - self._changed_at_s)
        freshness, snapshot = _freshness(run, late_s, is_here=is_here), run.snapshot()
        is_up = freshness in {Freshness.LIVE, Freshness.LATE}
        queue = queue_snapshot(self._folder, snapshot.rows, now_unix_s, is_alive=is_up)
        frame = Frame(
            run=run,
            snapshot=snapshot if queue is None else replace(snapshot, jobs=summary_line(queue)),
            events=tuple(self._events),
            freshness=freshness,
            late_s=late_s,
            queue=queue,
            disk_free_bytes=free_bytes(str(self._folder)),
        )
        found, self._since = alerts(frame, now_unix_s, self._since)
        self._frame = replace(frame, alerts=found)
        return self._frame


def _freshness(run: StoredRun, late_s: float, *, is_here: bool) -> Freshness:
    if run.outcome != "running" and not run.was_killed:
        return Freshness.ENDED
    if run.was_killed if is_here else late_s > _GONE_AFTER_S:
        return Freshness.HEAD_GONE
    return Freshness.LATE if late_s > LATE_AFTER_S else Freshness.LIVE
