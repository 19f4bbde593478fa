"""`top` on a terminal: keys in, lines out. Reads the run folder once a second, and nothing else.

What pages show is in `pages.py`, what keys do to the table in `view.py`. Commands to the run are
asked for first; nothing else changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from orchestrator.config.byte_size import parse_bytes
from orchestrator.errors import ArchiveError, OrchestratorError
from orchestrator.record.archive import Follower, Frame
from orchestrator.record.folders import Listed, list_runs
from orchestrator.record.model import Row, Snapshot, natural_order
from orchestrator.record.query import WORST_FIRST, order_of, parse
from orchestrator.view.alerts import Alert, Since, alerts
from orchestrator.view.jobs import jobs_lines, with_jobs
from orchestrator.view.table import header_lines, table_lines
from orchestrator.view.top.pages import (
    RANGES_S,
    alert_line,
    alert_lines,
    card_lines,
    event_line,
    freshness_words,
    key_line,
    node_lines,
    read_slot_lines,
    reason_line,
    run_lines,
    slots_words,
)
from orchestrator.view.top.view import (
    Ask,
    Send,
    View,
    follow,
    marked_line,
    move,
    question_lines,
    refusal,
    sort_by_next,
)

HELP: Final = """
 q ctrl-c      leave                         ? h  this help; esc goes back
 up down j k   move, as the mouse does; g G first and last; pgup pgdn a page
 enter         the slot under the cursor  a e d J n u  alerts events cards jobs nodes runs
 /             filter: state:lost temp>75 cap>3GiB !node:pc1 word
 < > , .       sort by the column before or after; o by its name
 r 0           turn the order; worst first
 space         mark the slot for a command; a new filter clears the marks
 P U D R C W   pause, unpause, drain, reinstate, cap, save now: the marked slots,
               or the one under the cursor; asks first
 m             how far back the courses of a slot go: 2 m, 10 m, 1 h, all
"""

_KEYS: Final = (
    ("q", "end"),
    ("ctrl+c", "quit"),
    ("question_mark,h", "page('help')"),
    ("a", "page('alerts')"),
    ("e", "page('events')"),
    ("d", "page('cards')"),
    ("J", "page('jobs')"),
    ("enter", "page('slot')"),
    ("escape", "leave"),
    ("down,j", "move(1)"),
    ("up,k", "move(-1)"),
    ("pagedown", "move_pages(1)"),
    ("pageup", "move_pages(-1)"),
    ("g", "move(-1000000)"),
    ("G", "move(1000000)"),
    ("slash", "ask('filter')"),
    ("greater_than_sign,full_stop", "sort(1)"),
    ("less_than_sign,comma", "sort(-1)"),
    ("r", "reverse"),
    ("0", "worst"),
    ("o", "ask('sort')"),
    ("n", "page('nodes')"),
    ("u", "page('runs')"),
    ("space", "pick"),
    ("P", "command('pause')"),
    ("U", "command('unpause')"),
    ("D", "command('drain')"),
    ("R", "command('reinstate')"),
    ("C", "command('cap')"),
    ("W", "command('save')"),
    ("y", "yes"),
    ("m", "range"),
)

#: Priority: a key acts before the one after it is handed on, so that what is typed after `/` goes
#: into the filter.
BINDINGS: Final[list[BindingType]] = [Binding(key, action, priority=True) for key, action in _KEYS]

#: How the parts of the screen stand, in the language of Textual.
SCREEN_CSS = """
Screen { layout: vertical; background: ansi_default; color: ansi_default; }
LinesView { height: 1fr; background: ansi_default; }
#header { height: 2; }
#keys { height: 2; }
Input { height: 1; border: none; padding: 0; display: none; background: ansi_default; }
"""
_LINES_PER_NOTCH = 3
"""Of the wheel of a mouse."""
_LOOK_EVERY_S = 1.0
_EVENTS_KEPT = 500
_TITLE_LINES = 3
_HEADER_SHARE = 4
"""Of the lines of the terminal, one in so many may be of the header."""


class LinesView(Widget):
    """Shows lines of text as they are given, from the top; the same ones are not drawn again."""

    can_focus = True

    def __init__(self, *, name: str) -> None:
        super().__init__(id=name)
        self._lines: list[Text] = []
        self._strips: list[Strip] = []
        self._marked: int | None = None

    def show(self, lines: Sequence[Text], marked: int | None = None) -> None:
        """Draw the lines, the `marked` one in reverse."""
        shown = list(lines[: max(1, self.size.height)])
        if shown == self._lines and marked == self._marked and self._strips:
            return
        self._lines, self._marked = shown, marked
        self._strips = [
            self._strip(line, is_marked=index == marked) for index, line in enumerate(shown)
        ]
        self.refresh()

    @property
    def lines(self) -> tuple[Text, ...]:
        """What is shown."""
        return tuple(self._lines)

    def on_resize(self) -> None:
        """Forget what was drawn for another width."""
        self._lines, self._strips = [], []

    async def on_click(self, event: Click) -> None:
        """Move the cursor to the line; a second click opens what it is on."""
        if self._marked is not None and event.y < len(self._lines):
            await self.app.run_action(f"move({event.y - self._marked})")
            if event.chain > 1:
                await self.app.run_action("page('slot')")

    async def on_mouse_scroll_down(self) -> None:
        """Move on."""
        await self.app.run_action(f"move({_LINES_PER_NOTCH})")

    async def on_mouse_scroll_up(self) -> None:
        """Move back."""
        await self.app.run_action(f"move({-_LINES_PER_NOTCH})")

    def render_line(self, y: int) -> Strip:
        """Return a line, see Textual."""
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def _strip(self, line: Text, *, is_marked: bool) -> Strip:
        text = line.copy()
        text.no_wrap, text.end = True, ""
        if is_marked:
            text.stylize("reverse")
        strip = Strip(text.render(self.app.console)).simplify()
        return strip.adjust_cell_length(max(1, self.size.width), None)


@dataclass(frozen=True, slots=True)
class _Page:
    """What stands under the header: a title for the line of keys, and how its lines are made."""

    name: str
    lines: Callable[[], Sequence[Text]]
    picked: Callable[[int], None] | None = None
    """What is done with the line that was picked; such a page has a cursor."""


class Top(App[None]):
    """Follows one run folder."""

    CSS = SCREEN_CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    def __init__(self, folder: Path, view: View, send: Send | None = None) -> None:
        super().__init__(ansi_color=True)
        self._folder = folder
        self._follower = Follower(folder)
        self._view = view
        self._send = send
        self._asked: Ask | None = None
        self._typed = "filter"
        self._is_typing = False
        self._runs: Sequence[Listed] = ()
        self._frame: Frame | None = None
        self._snapshot: Snapshot | None = None
        self._events: list[Text] = []
        self._said = ""
        """What went wrong last, or what was done; shown in the line of keys."""
        self._alerts: Sequence[Alert] = ()
        self._alerts_since: Since = {}
        self._range = 0
        self._pages = {
            page.name: page
            for page in (
                _Page("slot", self._slot_lines),
                _Page(
                    "events", lambda: [*reversed(self._events)] or [Text("no events yet", "dim")]
                ),
                _Page("cards", lambda: card_lines(self._rows(), self.size.width)),
                _Page(
                    "alerts",
                    lambda: alert_lines(self._alerts, time.time(), self.size.width),
                ),
                _Page("jobs", self._job_lines),
                _Page("nodes", lambda: node_lines(self._snapshot)),
                _Page("runs", lambda: run_lines(self._runs), self._pick_run),
                _Page("question", lambda: question_lines(self._asked)),
                _Page("help", lambda: [Text(line) for line in HELP.splitlines()]),
            )
        }
        self._page: _Page | None = None
        self._scrolled = 0
        self._chosen = 0
        """The line under the cursor of a page that has one."""

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
        self._alerts, self._alerts_since = alerts(frame, time.time(), self._alerts_since)
        self._events += [event_line(event, 1_000) for event in frame.events]
        del self._events[:-_EVENTS_KEPT]
        self._snapshot = with_jobs(frame.snapshot, frame.queue)
        self.draw()

    def draw(self) -> None:
        """Draw header, table or page, and the line of keys."""
        snapshot = self._snapshot
        header, rows, keys = (
            self.query_one(name, LinesView) for name in ("#header", "#rows", "#keys")
        )
        width = max(20, self.size.width)
        if snapshot is None:
            rows.show([Text(self._said or "nothing is stored yet", "dim")])
            return
        above = header_lines(snapshot, width)[: max(1, self.size.height // _HEADER_SHARE)]
        if self._alerts:
            above = [alert_line(self._alerts, width), *above]
        header.styles.height = len(above)
        header.show(above)
        page = self._page
        if page is None:
            self._draw_table(snapshot, rows, width)
        else:
            lines, height = page.lines(), max(1, rows.size.height)
            self._chosen = max(0, min(self._chosen, len(lines) - 1))
            if page.picked is not None:
                self._scrolled = min(max(self._scrolled, self._chosen - height + 1), self._chosen)
            self._scrolled = max(0, min(self._scrolled, len(lines) - height))
            rows.show(
                lines[self._scrolled :],
                None if page.picked is None else self._chosen - self._scrolled,
            )
        fresh = None if self._frame is None else freshness_words(self._frame)
        name = None if page is None else page.name
        keys.show(
            [
                reason_line(self._row() if page is None else None, width),
                key_line(fresh, self._view, name, self._said, width),
            ]
        )

    def _draw_table(self, snapshot: Snapshot, rows: LinesView, width: int) -> None:
        shown = self._view.rows(snapshot.rows)
        height = self._table_height()
        self._view = follow(self._view, shown, height)
        first = self._view.first
        lines = table_lines(shown[first : first + height], width)
        if not shown:
            is_filtered = bool(self._view.wanted.text)
            why = "no slot matches the filter" if is_filtered else "no workers yet"
            rows.show([Text(why, "dim")])
            return
        titles = lines.titles if height < rows.size.height else ()
        bodies = (
            marked_line(line) if row.slot in self._view.marked else line
            for row, line in zip(shown[first : first + height], lines.rows, strict=True)
        )
        rows.show([*titles, *bodies], marked=len(titles) + self._view.line - first)

    def _table_height(self) -> int:
        """Return how many rows are shown; a terminal of few lines has no room for headings."""
        height = self.query_one("#rows").size.height
        return height - _TITLE_LINES if height > 2 * _TITLE_LINES else max(1, height)

    # What keys do.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:  # noqa: ARG002 - of Textual
        """Say whether a key means an action now, see Textual: while a filter is typed, keys are
        letters.
        """
        return not self._is_typing or action in {"leave", "quit"}

    def action_end(self) -> None:
        """Leave."""
        self.exit()

    def action_page(self, name: str) -> None:
        """Open a page; of a slot only if the cursor is on one.

        On a page with a cursor, enter picks a line.
        """
        if name == "slot" and self._page is not None and self._page.picked is not None:
            self._page.picked(self._chosen)
        if name != "slot" or (self._view.slot is not None and self._page is None):
            if name == "runs":
                self._runs = list_runs(self._folder.parent)
            self._page, self._scrolled, self._chosen, self._said = self._pages[name], 0, 0, ""
        self.draw()

    def action_leave(self) -> None:
        """Close the filter or the page."""
        asking = self.query_one(Input)
        if self._is_typing:
            self._is_typing = asking.display = False
            self.query_one("#rows").focus()
        else:
            self._page = None
        self._said, self._asked = "", None
        self.draw()

    def action_move(self, by: int) -> None:
        """Move the cursor, or scroll the page."""
        if self._page is not None:
            self._scrolled, self._chosen = max(0, self._scrolled + by), max(0, self._chosen + by)
        elif self._snapshot is not None:
            self._view = move(
                self._view, self._view.rows(self._snapshot.rows), by, self._table_height()
            )
        self.draw()

    def action_move_pages(self, by: int) -> None:
        """Move by as many rows as are shown."""
        self.action_move(by * self._table_height())

    def action_sort(self, step: int) -> None:
        """Sort by another column."""
        self._view = sort_by_next(self._view, step)
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

    def action_pick(self) -> None:
        """Take what the cursor of a page is on; on the table, mark the slot for a command."""
        if self._page is not None and self._page.picked is not None:
            self._page.picked(self._chosen)
        elif self._page is None and self._view.slot is not None:
            self._view = replace(self._view, marked=self._view.marked ^ {self._view.slot})
            self.action_move(1)
        self.draw()

    def _pick_run(self, index: int) -> None:
        if index < len(self._runs):
            self._folder = self._runs[index].folder
            self._follower, self._frame, self._snapshot = Follower(self._folder), None, None
            self._view, self._events, self._page = (
                replace(self._view, slot=None, marked=frozenset()),
                [],
                None,
            )
            self._said = ""
            self.look()

    # Commands to the run.

    def action_command(self, do: str) -> None:
        """Ask whether a command shall be sent to the marked slots, or to the one
        under the cursor.
        """
        slots = self._view.marked or ({self._view.slot} if self._view.slot is not None else set())
        self._said = refusal(can_send=self._send is not None, frame=self._frame)
        if not self._said and slots:
            self._asked = Ask(do, tuple(sorted(slots, key=natural_order)))
            if do == "cap":
                self.action_ask("cap")
                return
            self.action_page("question")
        self.draw()

    def action_yes(self) -> None:
        """Send what was asked; the head's answer is shown when it comes."""
        folder, ask, send = self._folder, self._asked, self._send
        if self._page is not self._pages["question"] or ask is None or send is None:
            return
        self._asked, self._page, self._said = None, None, f"{ask.do} {slots_words(ask.slots)}: sent"
        self.run_worker(lambda: self._sent(folder, ask, send), thread=True)
        self.draw()

    def _sent(self, folder: Path, ask: Ask, send: Send) -> None:
        try:
            answer = send(folder, ask.do, ask.slots, amount_bytes=ask.amount_bytes)
            said = answer.effect if answer.ok else f"refused: {answer.error}"
        except (OSError, ValueError, OrchestratorError) as failure:
            said = f"not sent: {failure}"
        self._said = f"{ask.do} {slots_words(ask.slots)}: {said}"
        self.call_from_thread(self.draw)

    def action_range(self) -> None:
        """Show the courses of a slot over another time."""
        self._range = (self._range + 1) % len(RANGES_S)
        self.draw()

    def action_ask(self, what: str) -> None:
        """Let the person type a filter, a column to sort by or a cap."""
        asking = self.query_one(Input)
        self._typed = what
        asking.placeholder = {
            "filter": "state:lost temp>75",
            "sort": "column",
            "cap": "cap of each, as 3GiB",
        }[what]
        asking.value = self._view.wanted.text if what == "filter" else ""
        self._is_typing = asking.display = True
        self.screen.set_focus(asking)

    def on_input_submitted(self, entered: Input.Submitted) -> None:
        """Take what was typed; what is wrong stays to be corrected."""
        what, self._said = self._typed, ""
        try:
            if what == "filter":
                self._view = replace(self._view, wanted=parse(entered.value), marked=frozenset())
            elif what == "sort":
                self._view = replace(self._view, order=order_of(entered.value))
            elif self._asked is not None:
                self._asked = replace(self._asked, amount_bytes=parse_bytes(entered.value))
        except ValueError as failure:
            self._said = str(failure)
        else:
            self._is_typing = entered.input.display = False
            self.query_one("#rows").focus()
            if what == "cap":
                self.action_page("question")
        self.draw()

    # Pages.

    def _rows(self) -> Sequence[Row]:
        return () if self._snapshot is None else self._snapshot.rows

    def _row(self) -> Row | None:
        return next((row for row in self._rows() if row.slot == self._view.slot), None)

    def _job_lines(self) -> Sequence[Text]:
        queue = None if self._frame is None else self._frame.queue
        if queue is None:
            return [Text("this run has no queue of jobs", "dim")]
        return jobs_lines(queue, max(20, self.size.width))

    def _slot_lines(self) -> Sequence[Text]:
        row, snapshot = self._row(), self._snapshot
        if row is None or snapshot is None:
            return [Text("the slot is gone", "dim")]
        width = max(20, self.size.width)
        return read_slot_lines(self._folder, row, snapshot, RANGES_S[self._range], width)
