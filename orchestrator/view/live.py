"""Watchers for the person at the terminal: a table that redraws itself, or plain lines; and all
outlets of a run.

A broken terminal or pipe means nothing: the run goes on. Does not cover what the table looks like
(`table`) nor which watcher a run gets: use `LiveTable` only where `console.is_interactive`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live

from orchestrator.core.slot import SlotState
from orchestrator.record.events import EventLog
from orchestrator.record.model import Row, Snapshot
from orchestrator.record.store import RunStore
from orchestrator.view.cells import clean, moment, shorten
from orchestrator.view.health import health_lines
from orchestrator.view.phrases import tflops_words, time_words
from orchestrator.view.terminal import plain_text

REDRAW_EVERY_S = 0.25
PROGRESS_EVERY_S = 10.0

GAPS = "the records of this run have gaps: they could not be written for a while"

_CLOSING_CELLS = 160
"""Width of the last table in a log or a pipe."""
_REASON_CELLS = 400
"""A log may have long lines, but not a whole traceback in one."""

#: What drawing on a closed terminal raises: rich turns a broken pipe into SystemExit, but a lost
#: terminal must not end the run.
_TERMINAL_GONE = (OSError, SystemExit)


class Watcher(Protocol):
    """A receiver of snapshots. Neither method raises when its output is closed."""

    def update(self, snapshot: Snapshot) -> None:
        """Look at the run as it is now; called several times a second."""

    def close(self, snapshot: Snapshot) -> None:
        """Show the run for the last time and release everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Where a run is written down and shown.

    A full disk ends none of it: `problems` says what is wrong.
    """

    watchers: Sequence[Watcher]
    events: EventLog
    store: RunStore

    def show(self, snapshot: Snapshot) -> None:
        """Show the run as it is now, and take a sample of it if one is due."""
        for watcher in self.watchers:
            watcher.update(snapshot)
        self.store.update(snapshot)

    def close(self, snapshot: Snapshot) -> None:
        """Show the run as it ended."""
        for watcher in self.watchers:
            watcher.close(snapshot)
        self.store.update(snapshot, at_once=True)
        self.store.incomplete |= not self.store.commit()  # there is no later turn that could

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each sink that cannot be written now, or lacks records of a time when it
        could not.
        """
        now = tuple(text for text in (self.store.problem, self.events.problem) if text is not None)
        return now or ((GAPS,) * self.incomplete)

    @property
    def incomplete(self) -> bool:
        """Whether the records of this run are incomplete."""
        return self.store.incomplete or self.events.incomplete


class LiveTable:
    """The health table, redrawn in place; its last frame, with all rows, stays on the screen.

    The cursor stays visible throughout, so that a head that is killed leaves a usable terminal
    behind.
    """

    def __init__(self, console: Console, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._monotonic_s = monotonic_s
        self._due_s = float("-inf")
        self._gone = False
        self._live = Live(
            console=console,
            auto_refresh=False,
            vertical_overflow="crop",
            # Output of libraries belongs into the run's log, not between the rows.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def update(self, snapshot: Snapshot) -> None:
        """Redraw, unless that was done less than `REDRAW_EVERY_S` ago."""
        now_s = self._monotonic_s()
        if self._gone or now_s < self._due_s:
            return
        self._due_s = now_s + REDRAW_EVERY_S
        try:
            if not self._live.is_started:
                self._live.start()
                self._console.show_cursor(True)
            # A line is left for the cursor, else the terminal scrolls at every frame.
            height = max(1, self._console.size.height - 1)
            self._live.update(self._frame(snapshot, height), refresh=True)
        except _TERMINAL_GONE:
            self._leave()

    def close(self, snapshot: Snapshot) -> None:
        """Draw the last frame, with all rows, and give the terminal back."""
        if self._gone:
            return
        try:
            self._live.start()
            self._live.update(self._frame(snapshot, None))
            self._live.stop()
        except _TERMINAL_GONE:
            self._leave()

    def _frame(self, snapshot: Snapshot, height: int | None) -> Group:
        lines = health_lines(snapshot, self._console.width, height)
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return Group(*lines)

    def _leave(self) -> None:
        self._gone = True
        with suppress(*_TERMINAL_GONE):
            self._live.stop()


class PlainLines:
    """A line for every change of state and one every `PROGRESS_EVERY_S`, for logs and pipes.

    No control codes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._states: dict[str, SlotState] = {}
        self._notices: frozenset[str] = frozenset()
        self._progress_at_unix_s = 0.0
        self._gone = False

    def update(self, snapshot: Snapshot) -> None:
        """Write what has changed since the last time."""
        at = moment(snapshot.now_unix_s, "%H:%M:%S")
        for row in snapshot.rows:
            if self._states.get(row.slot) is not row.state:
                self._states[row.slot] = row.state
                reason = shorten(clean(row.reason), _REASON_CELLS)
                self._say(
                    f"{at} {clean(row.slot)} "
                    f"{row.state}{_work(row)}{': ' if reason else ''}{reason}"
                )
        for notice in snapshot.notices:
            if notice not in self._notices:
                self._say(f"{at} ! {clean(notice)}")
        self._notices = frozenset(snapshot.notices)
        # A clock may be set back.
        if abs(snapshot.now_unix_s - self._progress_at_unix_s) >= PROGRESS_EVERY_S:
            if self._progress_at_unix_s:
                self._say(self._progress(snapshot))
            self._progress_at_unix_s = snapshot.now_unix_s

    def close(self, snapshot: Snapshot) -> None:
        """Write the last changes, and the table as the run ended."""
        self.update(snapshot)
        for line in plain_text(health_lines(snapshot, _CLOSING_CELLS)).split("\n"):
            self._say(line)

    def _progress(self, snapshot: Snapshot) -> str:
        counts = ", ".join(f"{count} {state}" for state, count in snapshot.state_counts.items())
        jobs = "" if snapshot.jobs is None else f"jobs: {snapshot.jobs}  "
        return (
            f"{time_words(snapshot)}  {jobs}"
            f"nodes {len(snapshot.nodes_seen)}/{len(snapshot.nodes_planned)}  "
            f"{counts or 'no workers yet'}  "
            f"{tflops_words(snapshot.tflops_total)}  oom {snapshot.counts.oom_count}"
        )

    def _say(self, line: str) -> None:
        if self._gone:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._gone = True  # the reader or the stream is closed
        except OSError:
            pass  # a full disk under a log may have room again later


def _work(row: Row) -> str:
    """Return what a worker works at: the step of a training, else the size of its products."""
    progress = row.progress
    if progress.train_step is None:
        return "" if row.size is None else f" size {row.size}"
    of = "" if progress.train_steps is None else f"/{progress.train_steps}"
    return f" step {progress.train_step}{of}"
