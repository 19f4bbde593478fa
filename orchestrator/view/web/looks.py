"""Looks at the runs of a folder for all pages that follow them, each at most once a second.

Nothing is read while no page asks. Which run is the newest is found out at each look. Does not
serve anything (`server.py`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from orchestrator.record.archive import Follower, Frame
from orchestrator.record.events import StoredEvent
from orchestrator.record.folders import find_run, list_runs
from orchestrator.view.alerts import Alert, Since, alerts
from orchestrator.view.document import EVENTS_MOST, document
from orchestrator.view.runs import runs_table

LOOK_EVERY_S: Final = 1.0
_RUNS_EVERY_S: Final = 20.0
"""The list of runs opens the store of each."""
_KEPT: Final = 8
"""Runs of which something is kept from look to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A run as it was at one look."""

    frame: Frame
    """With its last events, also those of earlier frames."""
    alerts: tuple[Alert, ...]
    text: str
    """The document, as JSON."""
    at_s: float
    """By the monotonic clock."""


@dataclass(slots=True, kw_only=True)
class _Watched:
    """What is kept of a run from look to look."""

    follower: Follower
    since: Since = field(default_factory=dict)
    events: deque[StoredEvent] = field(default_factory=lambda: deque(maxlen=EVENTS_MOST))
    look: Look | None = None


class Looks:
    """The runs of one folder."""

    def __init__(self, runs_dir: Path, run_id: str, *, with_control: bool) -> None:
        """Touch nothing yet. `run_id` is shown where none is named; `latest` is the newest."""
        self.count = 0
        """How often a run was looked at."""
        self._runs_dir = runs_dir
        self._run_id = run_id
        self._with_control = with_control
        self._lock = asyncio.Lock()
        self._watched: dict[Path, _Watched] = {}
        self._runs = runs_table(())
        self._runs_due_s = float("-inf")

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run by its name; `UsageError` where there is none."""
        return find_run(self._runs_dir, run_id or self._run_id)

    async def look(self, run_id: str) -> Look:
        """Return a run as it is now: one look serves all who ask within half a second.

        Raises:
            UsageError: There is no such run.
            ArchiveError: Its folder cannot be read.
        """
        async with self._lock:
            return await asyncio.to_thread(self._look, run_id)

    def _look(self, run_id: str) -> Look:
        folder, now_s = self.folder(run_id), time.monotonic()
        if folder not in self._watched:
            if len(self._watched) == _KEPT:
                self._watched.clear()
            self._watched[folder] = _Watched(follower=Follower(folder))
        watched = self._watched[folder]
        if watched.look is None or now_s - watched.look.at_s > LOOK_EVERY_S / 2:
            watched.look = self._looked(watched, now_s)
        return watched.look

    def _looked(self, watched: _Watched, now_s: float) -> Look:
        self.count += 1
        frame = watched.follower.look()
        watched.events.extend(frame.events)
        frame = replace(frame, events=tuple(watched.events))
        wrong, watched.since = alerts(frame, time.time(), watched.since)
        if now_s >= self._runs_due_s:
            self._runs = runs_table(list_runs(self._runs_dir))
            self._runs_due_s = time.monotonic() + _RUNS_EVERY_S
        shown = document(frame, wrong, self._runs)
        shown["control"] = self._with_control and frame.run.outcome == "running"
        text = json.dumps(shown, separators=(",", ":"), allow_nan=False)
        return Look(frame=frame, alerts=wrong, text=text, at_s=now_s)
