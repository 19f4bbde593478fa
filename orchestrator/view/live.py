"""Shows a running run on the terminal of its head: as a table that is redrawn, or as plain lines.

A closed terminal or a broken pipe does not end the run. Does not decide which rows and columns the
table has (`slots`), nor which watcher a run uses: `LiveTable` needs `console.is_interactive`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from orchestrator.core.slot import SlotState
from orchestrator.record.model import Snapshot
from orchestrator.view.cells import ELLIPSIS, SEPARATOR, clean, moment, shorten
from orchestrator.view.phrases import totals
from orchestrator.view.slots import headline, slots_table
from orchestrator.view.tables import Cell
from orchestrator.view.terminal import STYLES, plain_text, table_lines

PROGRESS_EVERY_S = 10.0
_NOTICES_MOST = 3

_CLOSING_CELLS = 160
"""Width of the final table in a log or a pipe."""
_REASON_CELLS = 400
"""Longest reason in a log, which may have long lines, but not a whole traceback in one."""

#: Errors of drawing on a closed terminal. Rich turns a broken pipe into SystemExit.
_TERMINAL_GONE = (OSError, SystemExit)


def health_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return the header, the health table and the sums as lines of at most `width` cells.

    The worst slot and the most important lines come first: a short screen shows the first lines.
    """
    above = [*header_lines(snapshot, width), Text()]
    if not snapshot.rows:
        return [*above, Text("no workers yet", "dim")]
    sums = flowed((Cell(text=words) for words in totals(snapshot)), width)
    lines = [*above, *table_lines(slots_table(snapshot), width), Text(), *sums]
    for line in lines:
        line.truncate(width)
    return lines


def header_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return the lines above the table: nodes, states, throughput, time, then warnings."""
    notices = [clean(notice) for notice in snapshot.notices]
    if len(notices) > _NOTICES_MOST:
        hidden = len(notices) - _NOTICES_MOST
        notices = [*notices[:_NOTICES_MOST], f"{hidden} more warnings"]
    warnings = (Text(shorten(f"! {words}", width), "bold yellow") for words in notices)
    return [*flowed(headline(snapshot), width), *warnings]


def flowed(cells: Iterable[Cell], width: int) -> list[Text]:
    """Return lines filled with whole cells; only a cell longer than a line is cut."""
    lines: list[Text] = []
    for cell in cells:
        text = shorten(clean(cell.text), width)
        if lines and lines[-1].cell_len + cell_len(SEPARATOR + text) <= width:
            lines[-1].append(SEPARATOR, "dim")
        else:
            lines.append(Text())
        lines[-1].append(text, STYLES[cell.tone])
    return lines


class Watcher(Protocol):
    """A receiver of snapshots. Neither method raises when its output is closed."""

    def update(self, snapshot: Snapshot) -> None:
        """Show the present state of the run; called several times a second."""

    def close(self, snapshot: Snapshot) -> None:
        """Show the final state of the run and release the terminal."""


class LiveTable:
    """The health table, redrawn in place; its last frame, with all rows, stays on the screen.

    The cursor stays visible, so that the terminal remains usable if the head is killed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._gone = False
        self._live = Live(
            console=console,
            auto_refresh=False,
            vertical_overflow="crop",
            # The output of libraries must go to the run's log, not between the rows.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def update(self, snapshot: Snapshot) -> None:
        """Redraw the table."""
        # The last line is left to the cursor; otherwise the terminal scrolls at every frame.
        self._draw(snapshot, max(1, self._console.size.height - 1))

    def close(self, snapshot: Snapshot) -> None:
        """Draw the last frame, with all rows, and release the terminal."""
        self._draw(snapshot, None)
        with suppress(*_TERMINAL_GONE):
            self._live.stop()

    def _draw(self, snapshot: Snapshot, height: int | None) -> None:
        """Draw a frame of at most `height` lines; `None` draws all lines."""
        lines = health_lines(snapshot, self._console.width)
        if height is not None and len(lines) > height:
            hidden = len(lines) - height + 1
            lines = [*lines[: height - 1], Text(f"{ELLIPSIS} {hidden} lines more", "dim")]
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        if self._gone:
            return
        try:
            if not self._live.is_started:
                self._live.start()
                self._console.show_cursor(True)
            self._live.update(Group(*lines), refresh=height is not None)
        except _TERMINAL_GONE:
            self._gone = True


class PlainLines:
    """Writes a line for every change of a state, and a headline every `PROGRESS_EVERY_S`.

    For logs and pipes: the lines have no control codes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._states: dict[str, SlotState] = {}
        self._notices: frozenset[str] = frozenset()
        self._progress_at_unix_s = 0.0
        self._gone = False

    def update(self, snapshot: Snapshot) -> None:
        """Write the changes since the last call."""
        at = moment(snapshot.now_unix_s, "%H:%M:%S")
        for row in snapshot.rows:
            if self._states.get(row.slot) is not row.state:
                self._states[row.slot] = row.state
                reason = shorten(clean(row.reason), _REASON_CELLS)
                self._say(f"{at} {clean(row.slot)} {row.state}{reason and f': {reason}'}")
        for notice in snapshot.notices:
            if notice not in self._notices:
                self._say(f"{at} ! {clean(notice)}")
        self._notices = frozenset(snapshot.notices)
        # `abs`, because the clock may be set back.
        if abs(snapshot.now_unix_s - self._progress_at_unix_s) >= PROGRESS_EVERY_S:
            if self._progress_at_unix_s:
                self._say(SEPARATOR.join(clean(cell.text) for cell in headline(snapshot)))
            self._progress_at_unix_s = snapshot.now_unix_s

    def close(self, snapshot: Snapshot) -> None:
        """Write the last changes, and the final table."""
        self.update(snapshot)
        for line in plain_text(health_lines(snapshot, _CLOSING_CELLS)).split("\n"):
            self._say(line)

    def _say(self, line: str) -> None:
        if self._gone:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._gone = True  # the reader or the stream is closed
        except OSError:
            pass  # the disk under a log is full; it may have space again later
