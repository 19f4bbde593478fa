"""Looks at one run folder again and again, for all who show or tell of a run.

Does not decide when to look, nor what is wrong (`alerts.py`) or how it is shown.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from orchestrator.record.archive import Follower, Frame
from orchestrator.record.events import StoredEvent
from orchestrator.view.alerts import Alert, Since, alerts
from orchestrator.view.jobs import summary_line

EVENTS_MOST: Final = 100
"""Events of a look, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A run as it was at one look."""

    frame: Frame
    """With its last events, also those of earlier looks, and with the line of its queue."""
    alerts: tuple[Alert, ...]


class Watch:
    """Follows one run folder."""

    def __init__(self, folder: Path) -> None:
        self.follower = Follower(folder)
        self._since: Since = {}
        self._events = deque[StoredEvent](maxlen=EVENTS_MOST)

    def look(self) -> Look:
        """Return the run as it is now.

        `NothingStoredError`: the head has not stored anything yet; `ArchiveError`: the folder or
        its store cannot be read.
        """
        frame = self.follower.look()
        self._events.extend(frame.events)
        wrong, self._since = alerts(frame, time.time(), self._since)
        snapshot = frame.snapshot
        if frame.queue is not None:
            snapshot = replace(snapshot, jobs=summary_line(frame.queue))
        frame = replace(frame, snapshot=snapshot, events=tuple(self._events))
        return Look(frame=frame, alerts=wrong)
