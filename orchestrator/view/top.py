"""The app of the verb `top`: shows a run on the whole terminal, and reads it once a second.

Does not control the run: other verbs and the page do. Makes the tables of events and alerts;
`slots` and `jobs` make the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Static

from orchestrator.errors import ArchiveError
from orchestrator.view.alerts import Alert, Frame
from orchestrator.view.cells import SEPARATOR, clean, clock, shorten
from orchestrator.view.document import event_line, mark
from orchestrator.view.jobs import current, jobs_table
from orchestrator.view.live import header_lines
from orchestrator.view.look import Watch
from orchestrator.view.slots import cards_table, slots_table
from orchestrator.view.tables import Column, Table, TableRow, row_of
from orchestrator.view.terminal import STYLES, cell_text, column_widths

_READ_EVERY_S: Final = 1.0
_HEADER_SHARE: Final = 4
"""The header may take one in this many lines of the terminal."""
#: The keys are those of an event in the document.
_EVENTS: Final = (
    Column("time", "time"),
    Column("slot", "slot"),
    Column("words", "event"),
    Column("text", "details"),
)
_ALERTS: Final = (
    Column("severity", "severity"),
    Column("for", "for", numeric=True),
    Column("text", "what is wrong; below, what to do"),
)
_NO_QUEUE: Final = Table(
    name="jobs", columns=(Column("job", "this run has no queue of jobs"),), rows=()
)


class Rows(DataTable[Text]):
    """A table with a cursor that stays with its row while the rows move."""

    def __init__(self) -> None:
        super().__init__(cursor_type="row")
        self._shown: tuple[Table, int] | None = None
        """The table that was drawn last, and its width."""

    @property
    def row(self) -> TableRow | None:
        """The row under the cursor."""
        rows = () if self._shown is None else self._shown[0].rows
        return rows[self.cursor_row] if 0 <= self.cursor_row < len(rows) else None

    def show(self, table: Table, width: int) -> None:
        """Draw a table within a width, unless both are unchanged."""
        if (table, width) == self._shown:
            return
        row, line, first = self.row, self.cursor_row, self.scroll_offset.y
        widths = column_widths(table, width - 2 * self.cell_padding)
        columns = {at: table.columns[at] for at in widths}
        has_units = any(column.unit for column in columns.values())
        self.clear(columns=True)
        self.header_height = 2 if has_units else 1
        for at, column in columns.items():
            title = f"{column.title}\n{column.unit}" if has_units else column.title
            side: Literal["left", "right"] = "right" if column.numeric else "left"
            self.add_column(Text(title, justify=side), width=widths[at])
        self.add_rows(
            [cell_text(table, at, row.cells[at], cells) for at, cells in widths.items()]
            for row in table.rows
        )
        self._shown = table, width
        self.scroll_to(y=first, animate=False)
        keys = [each.key for each in table.rows]
        line = keys.index(row.key) if row is not None and row.key in keys else line
        self.move_cursor(row=max(0, min(line, len(keys) - 1)), animate=False)


class Top(App[None]):
    """Shows one run folder until the user quits."""

    CSS = """
    Screen, Static, DataTable { background: ansi_default; color: ansi_default; }
    #above, #below { height: auto; }
    DataTable { height: 1fr; scrollbar-size: 0 0; }
    DataTable > .datatable--header { background: ansi_default; text-style: dim; }
    DataTable > .datatable--cursor, DataTable:focus > .datatable--cursor {
        background: ansi_default; color: ansi_default; text-style: reverse;
    }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", priority=True),
        Binding("escape", "page('slots')"),
        Binding("a", "page('alerts')"),
        Binding("d", "page('cards')"),
        Binding("e", "page('events')"),
        Binding("J", "page('jobs')"),
    ]
    KEYS = "a alerts, d cards, e events, J jobs, esc back, q leave"

    def __init__(self, folder: Path) -> None:
        super().__init__(ansi_color=True)
        self._watch = Watch(folder)
        self._frame: Frame | None = None
        self._page = "slots"
        self._failure = ""
        """Why the last attempt to read the folder failed."""
        self._rows = Rows()
        self._above, self._below = Static(id="above"), Static(id="below")

    def compose(self) -> ComposeResult:
        """Yield the widgets from top to bottom (Textual calls this)."""
        yield from (self._above, self._rows, self._below)

    def on_mount(self) -> None:
        """Start reading the folder once a second."""
        self._rows.focus()
        self.set_interval(_READ_EVERY_S, self.read)
        self.call_after_refresh(self.read)

    def on_resize(self) -> None:
        """Draw again with the new size."""
        self.call_after_refresh(self.draw)

    def read(self) -> None:
        """Read the run folder, and draw."""
        try:
            self._frame, self._failure = self._watch.read(), ""
        except ArchiveError as failure:
            self._failure = str(failure)
        self.draw()

    def draw(self) -> None:
        """Draw the header, the table, the reason of the row under the cursor, and the keys."""
        frame, width = self._frame, max(20, self.size.width)
        if not self._rows.is_attached:
            return  # the app is about to end
        if frame is None:
            self._below.update(Text(clean(self._failure)))
            return
        above = _header(frame, width)[: max(1, self.size.height // _HEADER_SHARE)]
        self._above.update(Text("\n").join(above))
        self._rows.show(self._table(frame), width)
        reason, row = Text(), self._rows.row
        if row is not None and row.reason:
            reason = Text(clean(f"{row.key}: {row.reason}"), STYLES[row.tone])
        last = SEPARATOR.join((mark(frame)[0], clean(self._failure) or self.KEYS))
        below = [reason, Text(last, "dim")]
        for line in below:
            line.truncate(width, overflow="ellipsis")
        self._below.update(Text("\n").join(below))

    def action_page(self, name: str) -> None:
        """Open the page `slots`, `cards`, `alerts`, `events` or `jobs`."""
        self._page = name
        self.draw()

    def on_data_table_row_highlighted(self) -> None:
        """Draw the reason of the row that is now under the cursor."""
        self.call_after_refresh(self.draw)

    def _table(self, frame: Frame) -> Table:
        """Return the table of the open page."""
        match self._page:
            case "cards":
                return cards_table(frame.snapshot)
            case "alerts":
                return _alerts_table(frame.alerts, time.time())
            case "events":  # the newest first
                lines = ((str(it.number), event_line(it)) for it in reversed(frame.events))
                rows = tuple(row_of(_EVENTS, *each) for each in lines)
                return Table(name="events", columns=_EVENTS, rows=rows)
            case "jobs" if frame.queue is not None:
                return jobs_table(frame.queue, current(frame.queue))
            case "jobs":
                return _NO_QUEUE
        return slots_table(frame.snapshot)


def _header(frame: Frame, width: int) -> list[Text]:
    """Return a line for the worst alert, and the header that every page has."""
    lines = header_lines(frame.snapshot, width)
    if not frame.alerts:
        return lines
    worst, *others = frame.alerts
    more = f" (and {len(others)} more)" if others else ""
    return [Text(shorten(f"! {worst.text}", width - len(more)) + more, STYLES[worst.tone]), *lines]


def _alerts_table(alerts: Sequence[Alert], now_unix_s: float) -> Table:
    """Return the alerts as a table; the reason of a row says what to do."""
    rows = []
    for alert in alerts:
        lasted_s = max(0.0, now_unix_s - alert.since_unix_s)
        texts = {"severity": alert.severity, "for": clock(lasted_s), "text": alert.text}
        tones = {"severity": alert.tone}
        rows.append(row_of(_ALERTS, alert.subject, texts, tones, alert.what_to_do))
    return Table(name="alerts", columns=_ALERTS, rows=tuple(rows))
