"""`top` on a terminal: keys in, lines out. Reads the run folder once a second, and nothing else.

What is shown of a slot is in `slot_page.py`, what keys do to the table in `view.py`. It changes nothing in the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.widgets import Input

from orchestrator.errors import ArchiveError
from orchestrator.top.cards import card_lines
from orchestrator.top.keys import BINDINGS, HELP
from orchestrator.top.rows import LinesView
from orchestrator.top.slot_page import COURSES, RANGES_S, event_line, slot_lines
from orchestrator.top.view import View, followed, moved, sorted_by_next
from orchestrator.watch import history
from orchestrator.watch.catalogue import FIELDS
from orchestrator.watch.cells import Glyphs, clock
from orchestrator.watch.follow import Follower, Frame, Freshness
from orchestrator.watch.model import STATE_STYLES, Row, Snapshot
from orchestrator.watch.query import WORST_FIRST, QueryError, parse
from orchestrator.watch.table import header_lines, table_lines

_LOOK_EVERY_S = 1.0
_EVENTS_KEPT = 500
_PLAYED_S_PER_LOOK = 5.0
_TITLE_LINES = 3
_HEADER_SHARE = 4
"""Of the lines of the terminal, one in so many may be of the header."""


@dataclass(frozen=True, slots=True)
class _Page:
    """What stands under the header: a title for the line of keys, and how its lines are made."""

    name: str
    lines: Callable[[], Sequence[Text]]


class Top(App[None]):
    """Follows one run folder."""

    CSS = """
    Screen { layout: vertical; background: ansi_default; color: ansi_default; }
    LinesView { height: 1fr; background: ansi_default; }
    #header { height: 2; }
    #keys { height: 2; }
    Input { height: 1; border: none; padding: 0; display: none; background: ansi_default; }
    Input.asking { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    def __init__(self, folder: Path, view: View, glyphs: Glyphs) -> None:
        super().__init__(ansi_color=True)
        self._folder = folder
        self._follower = Follower(folder)
        self._view = view
        self._glyphs = glyphs
        self._frame: Frame | None = None
        self._snapshot: Snapshot | None = None
        self._events: list[Text] = []
        self._said = ""
        """What went wrong last, or what was done; shown in the line of keys."""
        self._replay_unix_s: float | None = None
        self._plays = False
        self._range = 0
        self._pages = {
            page.name: page
            for page in (
                _Page("slot", self._slot_lines),
                _Page("events", self._event_lines),
                _Page("cards", self._card_lines),
                _Page("help", lambda: [Text(line) for line in HELP.splitlines()]),
            )
        }
        self._page: _Page | None = None
        self._scrolled = 0

    def compose(self) -> ComposeResult:
        """Lay the screen out, see Textual."""
        yield LinesView(name="header")
        yield LinesView(name="rows")
        yield Input(id="filter")
        yield LinesView(name="keys")

    def on_mount(self) -> None:
        """Begin to follow."""
        self.query_one("#rows").focus()
        self.set_interval(_LOOK_EVERY_S, self.look)
        self.call_after_refresh(self.look)

    def on_resize(self, _: Resize) -> None:
        """Lay out anew."""
        self.call_after_refresh(self.draw)

    def look(self) -> None:
        """Read the run folder, and draw what is new."""
        try:
            frame = self._follower.look()
        except ArchiveError as failure:
            self._said = str(failure)
            self.draw()
            return
        self._frame = frame
        self._events += [event_line(event, 1_000, self._glyphs) for event in frame.events]
        del self._events[:-_EVENTS_KEPT]
        if self._replay_unix_s is None:
            self._snapshot = frame.snapshot
        elif self._plays:
            self.action_seek(_PLAYED_S_PER_LOOK)
            return
        self.draw()

    def draw(self) -> None:
        """Draw header, table or page, and the line of keys."""
        snapshot = self._snapshot
        header, rows, keys = (self.query_one(name, LinesView) for name in ("#header", "#rows", "#keys"))
        width = max(20, self.size.width)
        if snapshot is None:
            rows.show([Text(self._said or "nothing is stored yet", "dim")])
            return
        above = header_lines(snapshot, width, self._glyphs)[: max(1, self.size.height // _HEADER_SHARE)]
        header.styles.height = len(above)
        header.show(above)
        page = self._page
        if page is None:
            self._draw_table(snapshot, rows, width)
        else:
            lines = page.lines()
            self._scrolled = max(0, min(self._scrolled, len(lines) - rows.size.height))
            rows.show(lines[self._scrolled :])
        keys.show([self._reason_line(width), self._key_line(width)])

    def _draw_table(self, snapshot: Snapshot, rows: LinesView, width: int) -> None:
        shown = self._view.rows(snapshot.rows)
        height = self._table_height()
        self._view = followed(self._view, shown, height)
        first = self._view.first
        lines = table_lines(shown[first : first + height], width, self._glyphs, self._view.hidden)
        if not shown:
            rows.show([Text("no slot matches the filter" if self._view.wanted.text else "no workers yet", "dim")])
            return
        titles = lines.titles if height < rows.size.height else ()
        rows.show([*titles, *lines.rows], marked=len(titles) + self._view.line - first)

    def _table_height(self) -> int:
        """Return how many rows are shown; a terminal of few lines has no room for headings."""
        height = self.query_one("#rows").size.height
        return height - _TITLE_LINES if height > 2 * _TITLE_LINES else max(1, height)

    def _reason_line(self, width: int) -> Text:
        """Return why the slot under the cursor is in its state: the table has room for that on wide terminals only."""
        row = self._row()
        if row is None or not row.reason or self._page is not None:
            return Text()
        said = f"{row.slot} {row.state.value}: {row.reason}"
        return Text(self._glyphs.shorten(self._glyphs.clean(said), width), STATE_STYLES[row.state])

    def _key_line(self, width: int) -> Text:
        frame, view = self._frame, self._view
        parts = [self._fresh(frame)] if frame is not None else []
        order = FIELDS[view.order.key].column or view.order.key if view.order.key else "worst first"
        parts.append(f"by {order}{' reversed' if view.order.reverse else ''}")
        if view.wanted.text:
            parts.append(f"filter {view.wanted.text}")
        if self._page is not None:
            parts.append(f"{self._page.name}, esc goes back")
        parts.append(self._said or "? help  / filter  < > sort  enter slot  q leave")
        line = self._glyphs.separator.join(map(self._glyphs.clean, parts))
        return Text(self._glyphs.shorten(line, width), "dim")

    def _fresh(self, frame: Frame) -> str:
        """Return how far what is shown is so now."""
        said = frame.freshness.value
        if frame.freshness is Freshness.ENDED:
            said = f"ended, {frame.run.outcome}"
        elif frame.freshness is not Freshness.LIVE:
            said = f"{said} for {clock(frame.late_s)}"
        if self._replay_unix_s is None:
            return said
        return f"{said}, replay {clock(self._replay_unix_s - frame.run.facts.started_at_unix_s)}"

    # What keys do.

    def action_page(self, name: str) -> None:
        """Open a page; of a slot only if the cursor is on one."""
        if name != "slot" or (self._view.slot is not None and self._page is None):
            self._page, self._scrolled, self._said = self._pages[name], 0, ""
        self.draw()

    def action_leave(self) -> None:
        """Close the filter or the page; from the table, leave the replay."""
        asking = self.query_one(Input)
        if asking.has_class("asking"):
            asking.remove_class("asking")
            self.query_one("#rows").focus()
        elif self._page is not None:
            self._page = None
        elif self._replay_unix_s is not None:
            self.action_replay()
        self._said = ""
        self.draw()

    def action_move(self, by: int) -> None:
        """Move the cursor, or scroll the page."""
        if self._page is not None:
            self._scrolled = max(0, self._scrolled + by)
        elif self._snapshot is not None:
            self._view = moved(self._view, self._view.rows(self._snapshot.rows), by, self._table_height())
        self.draw()

    def action_move_pages(self, by: int) -> None:
        """Move by as many rows as are shown."""
        self.action_move(by * self._table_height())

    def action_sort(self, step: int) -> None:
        """Sort by another column."""
        self._view = sorted_by_next(self._view, step)
        self.draw()

    def action_reverse(self) -> None:
        """Turn the order round."""
        order = self._view.order
        self._view = replace(self._view, order=replace(order, reverse=not order.reverse))
        self.draw()

    def action_worst(self) -> None:
        """Put the worst first again."""
        self._view = replace(self._view, order=WORST_FIRST)
        self.draw()

    def action_hide(self) -> None:
        """Hide the column of the order."""
        key = self._view.order.key
        column = None if key is None else FIELDS[key].column
        if column in {None, "slot", "state"}:
            self._said = "sort by a column first (< >): that one is hidden; slot and state stay"
        else:
            self._view = replace(self._view, hidden=self._view.hidden | {str(column)}, order=WORST_FIRST)
        self.draw()

    def action_show_columns(self) -> None:
        """Show all columns again."""
        self._view = replace(self._view, hidden=frozenset())
        self.draw()

    def action_range(self) -> None:
        """Show the courses of a slot over another time."""
        self._range = (self._range + 1) % len(RANGES_S)
        self.draw()

    def action_ask(self) -> None:
        """Let the person type a filter."""
        asking = self.query_one(Input)
        asking.value = self._view.wanted.text
        asking.add_class("asking")
        asking.focus()

    def on_input_submitted(self, entered: Input.Submitted) -> None:
        """Take the filter; a wrong one stays to be corrected."""
        try:
            wanted = parse(entered.value)
        except QueryError as failure:
            self._said = str(failure)
        else:
            self._view, self._said = replace(self._view, wanted=wanted), ""
            entered.input.remove_class("asking")
            self.query_one("#rows").focus()
        self.draw()

    def action_replay(self) -> None:
        """Go to what was sampled, or back to now."""
        if self._replay_unix_s is not None:
            self._replay_unix_s, self._plays = None, False
            self._snapshot = None if self._frame is None else self._frame.snapshot
            self.draw()
        else:
            self.action_seek(0.0)

    def action_seek(self, by_s: float) -> None:
        """Show the run as it was so much later or earlier."""
        try:
            known = history.sampled_between(self._folder)
            if known is None or self._frame is None:
                self._said = "nothing was sampled yet"
            else:
                at_unix_s = known[1] if self._replay_unix_s is None else self._replay_unix_s
                self._replay_unix_s = min(max(at_unix_s + by_s, known[0]), known[1])
                self._plays = self._plays and self._replay_unix_s < known[1]
                self._snapshot = history.moment(self._folder, self._replay_unix_s, self._frame.run)
        except ArchiveError as failure:
            self._said = str(failure)
        self.draw()

    def action_play(self) -> None:
        """Play the replay on from here, or stop it."""
        self._plays = not self._plays
        if self._plays and self._replay_unix_s is None:
            self.action_seek(-1e9)

    def action_save(self) -> None:
        """Write what is on the screen as text."""
        path = Path.cwd() / f"top-{self._folder.name}.txt"
        views = (self.query_one(name, LinesView) for name in ("#header", "#rows", "#keys"))
        text = "\n".join(line.plain for view in views for line in view.lines)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as failure:
            self._said = f"{path} cannot be written: {os.strerror(failure.errno or 0)}"
        else:
            self._said = f"saved as {path}"
        self.draw()

    # Pages.

    def _row(self) -> Row | None:
        rows = () if self._snapshot is None else self._snapshot.rows
        return next((row for row in rows if row.slot == self._view.slot), None)

    def _slot_lines(self) -> Sequence[Text]:
        row, snapshot = self._row(), self._snapshot
        if row is None or snapshot is None:
            return [Text("the slot is gone", "dim")]
        ends, width = snapshot.now_unix_s, max(20, self.size.width)
        back_s = RANGES_S[self._range]
        begins = ends - back_s if back_s is not None else min(snapshot.started_at, ends - 1.0)
        try:
            courses = history.buckets(
                self._folder, row.slot, tuple(COURSES), begins, ends + 0.5, max(1, min(width - 40, 200))
            )
            spans = history.state_spans(self._folder, row.slot)
            events = history.events(self._folder, slot=row.slot, limit=50)
        except ArchiveError as failure:
            return [Text(self._glyphs.clean(str(failure)), "red")]
        shown = f"last {clock(back_s)}" if back_s is not None else "the whole run"
        page = slot_lines(row, courses, spans, events, width, self._glyphs)
        return [*page[:2], Text(f"courses: {shown} (m)", "dim"), *page[2:]]

    def _event_lines(self) -> Sequence[Text]:
        return list(reversed(self._events)) or [Text("no events yet", "dim")]

    def _card_lines(self) -> Sequence[Text]:
        return card_lines(() if self._snapshot is None else self._snapshot.rows, self._glyphs)
