"""`top` on a terminal: keys in, tables out. Reads the run folder once a second.

What the pages show is in `pages.py`. An order to the run or to a job is asked for first, and then
sent; nothing else is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Input, Label, Sparkline, Static

from orchestrator.config.byte_size import parse_bytes
from orchestrator.core.user_commands import EFFECTS, Do
from orchestrator.errors import ArchiveError, OrchestratorError
from orchestrator.jobs.model import Word
from orchestrator.record.archive import Follower, Frame, Freshness, StoredEvent
from orchestrator.record.folders import list_runs
from orchestrator.record.model import natural_order
from orchestrator.record.query import WORST_FIRST, parse
from orchestrator.view.alerts import Alert, Since, alerts
from orchestrator.view.cells import SEPARATOR, clean, shorten
from orchestrator.view.jobs import jobs_table, with_jobs
from orchestrator.view.phrases import counted
from orchestrator.view.runs import runs_table
from orchestrator.view.table import cards_table, header_lines, slots_table
from orchestrator.view.tables import Table, TableRow
from orchestrator.view.terminal import STYLES, cell_text, fitting
from orchestrator.view.top import pages
from orchestrator.view.top.view import (
    View,
    column_after,
    column_named,
    marked,
    matching,
    ordered,
)
from workers.units import MIB

Send: TypeAlias = Callable[[Path, Do | Word, Sequence[str], int | None], str]
"""Sends an order for slots or jobs, with an amount in bytes, and returns what became of it."""

HELP: Final = """
 q ctrl-c      leave                          ? h  this help; esc goes back
 up down j k   move, as the mouse does; g G first and last; pgup pgdn a page
 enter         the slot under the cursor; of the list of runs: that run
 a e d J n u   alerts, events, cards, jobs, nodes, runs
 /             filter; of slots: state:lost temp>75 cap>3GiB !node:pc1 word
 < > , .       sort by the column before or after; o by its name
 r 0           turn the order; worst first
 space         mark the slot or job for an order; a new filter clears the marks
 P U D R C W   slots: pause, unpause, drain, reinstate, cap, save now
 P U R X       jobs: hold, release, retry, cancel
               the marked ones, or the one under the cursor; asks first
 m             how far back the courses of a slot go: 2 m, 10 m, 1 h, all
"""

_KEYS: Final = (
    ("q", "end"),
    ("ctrl+c", "quit"),
    ("escape", "leave"),
    ("question_mark,h", "page('help')"),
    ("a", "page('alerts')"),
    ("e", "page('events')"),
    ("d", "page('cards')"),
    ("J", "page('jobs')"),
    ("n", "page('nodes')"),
    ("u", "page('runs')"),
    ("slash", "ask('filter')"),
    ("o", "ask('sort')"),
    ("greater_than_sign,full_stop", "sort(1)"),
    ("less_than_sign,comma", "sort(-1)"),
    ("r", "reverse"),
    ("0", "worst"),
    ("space", "pick"),
    *((key, f"order('{key}')") for key in "PUDRCWX"),
    ("y", "yes"),
    ("m", "range"),
)
#: What a key asks for, of slots and of jobs.
_ORDERS: Final[dict[str, tuple[Do | None, Word | None]]] = {
    "P": (Do.PAUSE, Word.HOLD),
    "U": (Do.UNPAUSE, Word.RELEASE),
    "D": (Do.DRAIN, None),
    "R": (Do.REINSTATE, Word.RETRY),
    "C": (Do.CAP, None),
    "W": (Do.SAVE, None),
    "X": (None, Word.CANCEL),
}
_OF_JOBS: Final = {
    Word.HOLD: "waits until it is released; what runs saves first",
    Word.RELEASE: "goes on",
    Word.RETRY: "is put back into the queue",
    Word.CANCEL: "ends for good; what it saved stays",
}
_PLACEHOLDERS: Final = {
    "filter": "words; of slots also state:lost temp>75",
    "sort": "column",
    "cap": "cap of each, as 3GiB",
}
_LOOK_EVERY_S: Final = 1.0
_EVENTS_KEPT: Final = 500
_HEADER_SHARE: Final = 4
"""Of the lines of the terminal, one in so many may be of the header."""
_HEADING_LEAST_LINES: Final = 8
"""A terminal of fewer lines shows no titles of columns."""
RANGES_S: Final[tuple[float | None, ...]] = (120.0, 600.0, 3600.0, None)
"""How far back the courses go; the last is the whole run."""

#: How the parts of the screen stand, in the language of Textual.
SCREEN_CSS: Final = """
Screen, Static, DataTable, VerticalScroll, Input, Label {
    background: ansi_default; color: ansi_default;
}
#header, #keys { height: auto; }
DataTable, VerticalScroll { height: 1fr; scrollbar-size: 0 0; }
DataTable > .datatable--header { background: ansi_default; text-style: dim; }
DataTable > .datatable--cursor, DataTable:focus > .datatable--cursor {
    background: ansi_default; color: ansi_default; text-style: reverse;
}
Input { height: 1; border: none; padding: 0; display: none; }
.course { height: 1; }
.course Label { width: 12; text-style: dim; }
.course .ends { width: 24; padding-left: 2; }
Sparkline { width: 1fr; height: 1; }
Sparkline > .sparkline--min-color, Sparkline > .sparkline--max-color { color: ansi_cyan; }
"""


class Rows(DataTable[Text]):
    """A table with a cursor, which stays with its row while the rows move."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down"),
        Binding("k", "cursor_up"),
        Binding("g", "scroll_top"),
        Binding("G", "scroll_bottom"),
    ]

    def __init__(self) -> None:
        super().__init__(id="rows", cursor_type="row")
        self._table: Table | None = None
        self._layout: object = None
        self._cells: list[list[Text]] = []

    def show(self, table: Table, width: int) -> None:
        """Draw a table within a width; only cells that changed are drawn again."""
        row, line, first = self.row, self.cursor_row, self.scroll_offset.y
        widths = fitting(table, width - 2)
        columns = [table.columns[at] for at in widths]
        cells = [
            [cell_text(table, at, row.cells[at], width) for at, width in widths.items()]
            for row in table.rows
        ]
        if (columns, widths, len(cells)) != self._layout:
            self._layout = columns, widths, len(cells)
            self.clear(columns=True)
            self.header_height = 2 if any(column.unit for column in columns) else 1
            for column, cell_width in zip(columns, widths.values(), strict=True):
                title = f"{column.title}\n{column.unit}".rstrip()
                side = "right" if column.numeric else "left"
                self.add_column(Text(title, justify=side), width=cell_width)
            self.add_rows(cells)
            self.scroll_to(y=first, animate=False)
        for at, (before, now) in enumerate(zip(self._cells, cells, strict=False)):
            for place, cell in enumerate(now):
                if before[place : place + 1] != [cell]:
                    self.update_cell_at(Coordinate(at, place), cell)
        self._table, self._cells = table, cells
        keys = [one.key for one in table.rows]
        is_there = row is not None and row.key in keys
        line = keys.index(row.key) if row is not None and is_there else min(line, len(keys) - 1)
        self.move_cursor(row=max(0, line), animate=False)

    @property
    def row(self) -> TableRow | None:
        """The row under the cursor."""
        rows = () if self._table is None else self._table.rows
        return rows[self.cursor_row] if 0 <= self.cursor_row < len(rows) else None


class Page(VerticalScroll):
    """Lines of text, and between the first one and the others the courses of a slot."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down"),
        Binding("k", "scroll_up"),
        Binding("g", "scroll_home"),
        Binding("G", "scroll_end"),
    ]

    def compose(self) -> ComposeResult:
        """Lay the page out, see Textual."""
        yield Static(id="title")
        for key, title in pages.COURSES.items():
            with Horizontal(id=key, classes="course"):
                yield Label(title)
                yield Sparkline()
                yield Label(classes="ends")
        yield Static(id="lines")

    def show(self, title: Text, courses: pages.Courses, lines: Sequence[Text]) -> None:
        """Draw the page; a course without values is left out."""
        self.query_one("#title", Static).update(title)
        self.query_one("#lines", Static).update(Text("\n").join(lines))
        for key in pages.COURSES:
            values, ends = courses.get(key, ([], ""))
            course = self.query_one(f"#{key}", Horizontal)
            course.display = bool(values)
            course.query_one(Sparkline).data = values
            course.query_one(".ends", Label).update(ends)


@dataclass(frozen=True, slots=True)
class Ask:
    """An order that is not sent yet. Its slots or jobs stay those of the moment of the key."""

    order: Do | Word
    names: tuple[str, ...]
    amount_bytes: int | None = None

    def lines(self) -> list[Text]:
        """Return the question: what would happen, and a line for each slot or job."""
        order, amount_bytes = self.order, self.amount_bytes
        noun = "job" if isinstance(order, Word) else "slot"
        effect = _OF_JOBS[order] if isinstance(order, Word) else EFFECTS[order]
        amount = "" if amount_bytes is None else f" at {amount_bytes / MIB:.0f} MiB"
        question = f"{order} {counted(len(self.names), noun)}{amount}? y sends it, esc does not"
        return [
            Text(question, "bold yellow"),
            Text(f"each of them: {effect}", "dim"),
            *(Text(f"  {clean(name)}") for name in self.names),
        ]


class Top(App[None]):
    """Follows one run folder."""

    CSS = SCREEN_CSS
    ENABLE_COMMAND_PALETTE = False
    # Priority: a key acts before the one after it is handed on, so that what is typed after `/`
    # goes into the filter.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, action, priority=True) for key, action in _KEYS
    ]

    def __init__(self, folder: Path, view: View, send: Send | None = None) -> None:
        super().__init__(ansi_color=True)
        self._folder = folder
        self._view = view
        self._send = send
        self._follower = Follower(folder)
        self._frame: Frame | None = None
        self._events: list[StoredEvent] = []
        self._alerts: Sequence[Alert] = ()
        self._alerts_since: Since = {}
        self._said = ""
        """What went wrong last, or what was done; shown in the line of keys."""
        self._page = "slots"
        self._words = ""
        """The filter of every table but that of the slots."""
        self._sorted: tuple[str | None, bool] = None, False
        self._marked: frozenset[str] = frozenset()
        self._slot: str | None = None
        """Whose page is shown."""
        self._range = 0
        self._asked: Ask | None = None
        self._typed: str | None = None
        """What the line of input is for; `None`: keys are keys."""
        self._tables: dict[str, Callable[[Frame], Table]] = {
            "slots": self._slots,
            "cards": lambda frame: cards_table(frame.snapshot.rows),
            "nodes": lambda frame: pages.nodes_table(frame.snapshot),
            "jobs": lambda frame: jobs_table(frame.queue) if frame.queue else runs_table(()),
            "events": lambda _: pages.events_table(self._events),
            "runs": lambda _: runs_table(list_runs(self._folder.parent)),
        }

    def compose(self) -> ComposeResult:
        """Lay the screen out, see Textual."""
        yield Static(id="header")
        yield Rows()
        yield Page()
        yield Input()
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Begin to follow."""
        self.query_one(Rows).focus()
        self.set_interval(_LOOK_EVERY_S, self.look)
        self.call_after_refresh(self.look)

    def on_resize(self) -> None:
        """Lay out anew."""
        self.call_after_refresh(self.draw)

    def look(self) -> None:
        """Read the run folder, and draw what is new."""
        try:
            frame = self._follower.look()
        except ArchiveError as failure:
            self._said = str(failure)
        else:
            self._alerts, self._alerts_since = alerts(frame, time.time(), self._alerts_since)
            self._events = [*self._events, *frame.events][-_EVENTS_KEPT:]
            self._frame = replace(frame, snapshot=with_jobs(frame.snapshot, frame.queue))
        self.draw()

    def draw(self) -> None:
        """Draw header, table or page, and the line of keys."""
        width, rows, page = max(20, self.size.width), self.query_one(Rows), self.query_one(Page)
        rows.display, page.display = self._page in self._tables, self._page not in self._tables
        rows.show_header = self.size.height >= _HEADING_LEAST_LINES
        if self._frame is None:
            self.query_one("#keys", Static).update(Text(self._said or "nothing is stored yet"))
            return
        above = header_lines(self._frame.snapshot, width)
        if self._alerts:
            above = [pages.alert_line(self._alerts, width), *above]
        above = above[: max(1, self.size.height // _HEADER_SHARE)]
        self.query_one("#header", Static).update(Text("\n").join(above))
        if rows.display:
            rows.show(self._table(self._frame), width)
        else:
            self._draw_page(page, self._frame, width)
        keys = [_reason(rows.row if rows.display else None), Text(self._keys_line(), "dim")]
        for line in keys:
            line.truncate(width, overflow="ellipsis")
        self.query_one("#keys", Static).update(Text("\n").join(keys))

    def _table(self, frame: Frame) -> Table:
        table = self._tables[self._page](frame)
        if self._page != "slots":
            table = matching(table, self._words)
        key, reverse = self._sorted
        return marked(ordered(table, key, reverse=reverse), self._marked)

    def _slots(self, frame: Frame) -> Table:
        return slots_table(self._view.rows(frame.snapshot.rows))

    def _draw_page(self, page: Page, frame: Frame, width: int) -> None:
        title, courses, lines = Text(), pages.Courses(), list[Text]()
        if self._page == "alerts":
            lines = pages.alert_lines(self._alerts, time.time())
        elif self._page == "question":
            lines = [] if self._asked is None else self._asked.lines()
        elif self._page == "help":
            lines = [Text(line) for line in HELP.splitlines()]
        elif (row := next((r for r in frame.snapshot.rows if r.slot == self._slot), None)) is None:
            lines = [Text("the slot is gone", "dim")]
        else:
            title = Text(clean(f"{row.slot}  {row.state.value}  {row.reason}"), "bold")
            try:
                back_s = RANGES_S[self._range]
                courses = pages.courses_of(self._folder, row, frame.snapshot, back_s)
                lines = pages.slot_lines(self._folder, row, width)
            except ArchiveError as failure:
                lines = [Text(clean(str(failure)), "red")]
        page.show(title, courses, lines)

    def _keys_line(self) -> str:
        parts = [] if self._frame is None else [pages.freshness_words(self._frame)]
        key, reverse = self._sorted
        by = key or ("worst first" if self._view.order.key is None else self._view.order.key)
        parts.append(f"by {by}{' reversed' if reverse else ''}")
        filtered = self._view.wanted.text if self._page == "slots" else self._words
        parts += [f"filter {filtered}"] if filtered else []
        parts += [f"{len(self._marked)} marked"] if self._marked else []
        if self._page != "slots":
            parts.append(f"{self._page}, esc goes back")
        if self._said or self._page == "slots":
            parts.append(self._said or "? help  / filter  < > sort  enter slot  q leave")
        return SEPARATOR.join(map(clean, parts))

    # What keys do.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:  # noqa: ARG002 - of Textual
        """Say whether a key means an action now, see Textual: while a filter is typed, keys are
        letters.
        """
        return self._typed is None or action in {"leave", "quit"}

    def action_end(self) -> None:
        """Leave."""
        self.exit()

    def action_page(self, name: str) -> None:
        """Open a page, in its own order and without marks."""
        self._page, self._said, self._words = name, "", ""
        self._sorted = None, False
        if name != "question":
            self._marked = frozenset()
        self.draw()
        self.set_focus(self.query_one(Rows if name in self._tables else Page))

    def action_leave(self) -> None:
        """Close the line of input or the page."""
        self._asked = None
        if self._typed is not None:
            self._close_input()
        elif self._page != "slots":
            self.action_page("slots")
        self._said = ""
        self.draw()

    def on_data_table_row_selected(self) -> None:
        """Open the slot under the cursor, or follow the run under it."""
        row = self.query_one(Rows).row
        if row is not None and self._page == "slots":
            self._slot = row.key
            self.action_page("slot")
        elif row is not None and self._page == "runs":
            self._folder = self._folder.parent / row.key
            self._follower, self._frame = Follower(self._folder), None
            self._events, self._alerts, self._alerts_since = [], (), {}
            self.action_page("slots")
            self.look()

    def on_data_table_row_highlighted(self) -> None:
        """Say why the row that is now under the cursor is as it is."""
        self.call_after_refresh(self.draw)

    def action_sort(self, step: int) -> None:
        """Sort by another column."""
        if self._frame is not None and self._page in self._tables:
            self._sorted = column_after(self._table(self._frame), self._sorted[0], step), False
        self.draw()

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._sorted = self._sorted[0], not self._sorted[1]
        self.draw()

    def action_worst(self) -> None:
        """Put the worst first again."""
        self._sorted, self._view = (None, False), replace(self._view, order=WORST_FIRST)
        self.draw()

    def action_pick(self) -> None:
        """Mark the slot or job under the cursor for an order, and move on."""
        rows = self.query_one(Rows)
        if self._page in {"slots", "jobs"} and rows.row is not None:
            self._marked ^= {rows.row.key}
            rows.action_cursor_down()
        self.draw()

    def action_range(self) -> None:
        """Show the courses of a slot over another time."""
        self._range = (self._range + 1) % len(RANGES_S)
        self.draw()

    def action_ask(self, what: str) -> None:
        """Let the person type a filter, a column to sort by or a cap."""
        asking = self.query_one(Input)
        asking.placeholder = _PLACEHOLDERS[what]
        filtered = self._view.wanted.text if self._page == "slots" else self._words
        asking.value = filtered if what == "filter" else ""
        self._typed, asking.display = what, True
        self.set_focus(asking)

    def on_input_submitted(self, entered: Input.Submitted) -> None:
        """Take what was typed; what is wrong stays to be corrected."""
        what, self._said = self._typed, ""
        try:
            if what == "cap" and self._asked is not None:
                self._asked = replace(self._asked, amount_bytes=parse_bytes(entered.value))
            elif what == "sort" and self._frame is not None:
                self._sorted = column_named(self._table(self._frame), entered.value).key, False
            elif what == "filter" and self._page == "slots":
                self._view, self._marked = (
                    replace(self._view, wanted=parse(entered.value)),
                    frozenset(),
                )
            elif what == "filter":
                self._words, self._marked = entered.value, frozenset()
        except ValueError as failure:
            self._said = str(failure)
        else:
            self._close_input()
            if what == "cap":
                self.action_page("question")
        self.draw()

    def _close_input(self) -> None:
        self._typed, self.query_one(Input).display = None, False
        self.set_focus(self.query_one(Rows if self._page in self._tables else Page))

    # Orders to the run.

    def action_order(self, key: str) -> None:
        """Ask whether an order shall be sent for the marked rows, or for the one
        under the cursor.
        """
        of_slots, of_jobs = _ORDERS[key]
        order = {"slots": of_slots, "jobs": of_jobs}.get(self._page)
        row = self.query_one(Rows).row
        names = self._marked or (frozenset() if row is None else {row.key})
        if order is None or not names:
            return
        self._said = self._refusal(order)
        if not self._said:
            self._asked = Ask(order, tuple(sorted(names, key=natural_order)))
            if order is Do.CAP:
                self.action_ask("cap")
                return
            self.action_page("question")
        self.draw()

    def _refusal(self, order: Do | Word) -> str:
        """Return why no order can be sent now; empty if one can."""
        gone = self._frame is None or self._frame.freshness in {
            Freshness.ENDED,
            Freshness.HEAD_GONE,
        }
        if self._send is None:
            return "no commands: top was started with --read-only"
        # A queue takes words while its head is dead, too.
        if gone and isinstance(order, Do):
            return "no commands: this run has no head any more"
        return ""

    def action_yes(self) -> None:
        """Send what was asked; the answer is shown when it comes."""
        folder, ask, send = self._folder, self._asked, self._send
        if self._page != "question" or ask is None or send is None:
            return
        self.action_page("jobs" if isinstance(ask.order, Word) else "slots")
        self._asked, self._said = None, f"{_of(ask)}: sent"
        self.run_worker(lambda: self._sent(folder, ask, send), thread=True)
        self.draw()

    def _sent(self, folder: Path, ask: Ask, send: Send) -> None:
        try:
            said = send(folder, ask.order, ask.names, ask.amount_bytes)
        except (OSError, ValueError, OrchestratorError) as failure:
            said = f"not sent: {failure}"
        self._said = f"{_of(ask)}: {said}"
        self.call_from_thread(self.draw)


def _of(ask: Ask) -> str:
    noun = "job" if isinstance(ask.order, Word) else "slot"
    names = ask.names[0] if len(ask.names) == 1 else counted(len(ask.names), noun)
    return f"{ask.order} {names}"


def _reason(row: TableRow | None) -> Text:
    """Return why the row under the cursor is as it is."""
    if row is None or not row.reason:
        return Text()
    return Text(clean(f"{row.key}: {row.reason}"), STYLES[row.tone])
