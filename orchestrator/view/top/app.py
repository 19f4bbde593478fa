"""`top` on a terminal: keys in, tables out. Reads the run folder once a second.

An order to slots or jobs is asked for first, and then sent; nothing else is changed. What pages
show is in `pages.py`, and how tables are drawn in `widgets.py`.
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
from textual.widgets import Input, Static

from orchestrator.config.byte_size import parse_bytes
from orchestrator.core.user_commands import EFFECTS, Do
from orchestrator.errors import ArchiveError, OrchestratorError
from orchestrator.jobs.model import Word
from orchestrator.record.archive import Follower, Frame, Freshness, StoredEvent
from orchestrator.record.folders import list_runs
from orchestrator.record.model import natural_order
from orchestrator.view.alerts import Alert, Since, alerts
from orchestrator.view.cells import SEPARATOR, clean, clock, shorten
from orchestrator.view.health import header_lines
from orchestrator.view.jobs import jobs_table, with_jobs
from orchestrator.view.phrases import counted
from orchestrator.view.runs import runs_table
from orchestrator.view.slots import cards_table, slots_table
from orchestrator.view.tables import Table
from orchestrator.view.terminal import STYLES
from orchestrator.view.top import pages
from orchestrator.view.top.view import View
from orchestrator.view.top.widgets import CSS, Rows, TextPage
from workers.units import MIB

Send: TypeAlias = Callable[[Path, Do | Word, Sequence[str], int | None], str]
"""Sends an order to slots or jobs, with an amount in bytes, and returns what became of it."""

#: Keys as the help names them and as Textual does, what they do, and in words.
_KEYS: Final = (
    ("q", "q", "end", "leave; ctrl-c does so as well"),
    ("esc", "escape", "leave", "back to the slots"),
    ("?", "question_mark,h", "page('help')", "this help"),
    ("a", "a", "page('alerts')", "alerts, with what to do"),
    ("e", "e", "page('events')", "events, the newest first"),
    ("d", "d", "page('cards')", "cards"),
    ("J", "J", "page('jobs')", "jobs"),
    ("n", "n", "page('nodes')", "nodes"),
    ("u", "u", "page('runs')", "runs; enter follows the one under the cursor"),
    ("m", "m", "range", "how far back the courses of a slot go: 2 m, 10 m, 1 h, all"),
    ("/", "slash", "ask('filter')", "filter: words that must stand in a row; state:lost, !pc1"),
    (">", "greater_than_sign,full_stop", "sort(1)", "sort by the next column"),
    ("<", "less_than_sign,comma", "sort(-1)", "sort by the column before"),
    ("r", "r", "reverse", "turn the order"),
    ("0", "0", "worst", "the worst first"),
    ("space", "space", "pick", "mark a slot or job for an order; a new filter clears the marks"),
    ("P", "P", "order('P')", "pause slots, hold jobs: those marked, else the one under the cursor"),
    ("U", "U", "order('U')", "unpause slots, release jobs"),
    ("R", "R", "order('R')", "reinstate slots, retry jobs"),
    ("D", "D", "order('D')", "drain slots"),
    ("C", "C", "order('C')", "cap the memory of slots"),
    ("W", "W", "order('W')", "have slots save now"),
    ("X", "X", "order('X')", "cancel jobs"),
    ("y", "y", "yes", "send the order that was asked for"),
)
#: What a key orders slots and jobs to do.
_ORDERS: Final[dict[str, tuple[Do | None, Word | None]]] = {
    "P": (Do.PAUSE, Word.HOLD),
    "U": (Do.UNPAUSE, Word.RELEASE),
    "R": (Do.REINSTATE, Word.RETRY),
    "D": (Do.DRAIN, None),
    "C": (Do.CAP, None),
    "W": (Do.SAVE, None),
    "X": (None, Word.CANCEL),
}
_EFFECTS_ON_JOBS: Final = {
    Word.HOLD: "waits until it is released; one that runs saves first",
    Word.RELEASE: "goes on",
    Word.RETRY: "is put back into the queue",
    Word.CANCEL: "ends for good; what it saved stays",
}
_LOOK_EVERY_S: Final = 1.0
_EVENTS_KEPT: Final = 500
_HEADER_SHARE: Final = 4
"""Of the lines of the terminal, one in so many may be of the header."""
_HEADING_LEAST_LINES: Final = 8
"""A terminal of fewer lines shows no titles of columns."""
_RANGES_S: Final[tuple[float | None, ...]] = (120.0, 600.0, 3600.0, None)
"""How far back the courses of a slot go; the last is the whole run."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An order that is not sent yet, for the slots or jobs of the moment of the key."""

    order: Do | Word
    names: tuple[str, ...]
    amount_bytes: int | None = None

    def __str__(self) -> str:
        """Return what is asked of how many."""
        noun = "job" if isinstance(self.order, Word) else "slot"
        names = self.names[0] if len(self.names) == 1 else counted(len(self.names), noun)
        at = "" if self.amount_bytes is None else f" at {self.amount_bytes / MIB:.0f} MiB"
        return f"{self.order} {names}{at}"

    def lines(self) -> list[Text]:
        """Return the question: what would happen, and a line for each slot or job."""
        order = self.order
        effect = _EFFECTS_ON_JOBS[order] if isinstance(order, Word) else EFFECTS[order]
        return [
            Text(f"{self}? y sends it, esc does not", "bold yellow"),
            Text(f"each of them: {effect}", "dim"),
            *(Text(f"  {clean(name)}") for name in self.names),
        ]


class Top(App[None]):
    """Follows one run folder."""

    CSS = CSS
    ENABLE_COMMAND_PALETTE = False
    # Priority: a key acts before the one after it is handed on, so that what is typed after `/`
    # goes into the filter.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", priority=True),
        *(Binding(key, action, priority=True) for _, key, action, _ in _KEYS),
    ]

    def __init__(self, folder: Path, view: View, send: Send | None = None) -> None:
        super().__init__(ansi_color=True)
        self._view = view
        self._views: dict[str, View] = {"slots": view}
        """How each page was looked at when it was left."""
        self._send = send
        self._page = "slots"
        self._slot = ""
        """Whose page is shown."""
        self._range = 0
        self._said = ""
        """What went wrong last, or what was done."""
        self._asked: Ask | None = None
        self._typed: str | None = None
        """What the line of input is for; `None`: keys are keys."""
        self._rows, self._text_page, self._input = Rows(), TextPage(), Input()
        self._above, self._below = Static(id="header"), Static(id="keys")
        self._follow(folder)

    def _follow(self, folder: Path) -> None:
        self._folder = folder
        self._follower = Follower(folder)
        self._frame: Frame | None = None
        self._events: list[StoredEvent] = []
        self._alerts: Sequence[Alert] = ()
        self._alerts_since: Since = {}

    def compose(self) -> ComposeResult:
        """Lay the screen out, see Textual."""
        yield from (self._above, self._rows, self._text_page, self._input, self._below)

    def on_mount(self) -> None:
        """Begin to follow."""
        self._rows.focus()
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
        """Draw header, table or text, and the two lines at the bottom."""
        frame, width = self._frame, max(20, self.size.width)
        rows, page = self._rows, self._text_page
        if not rows.is_attached:
            return  # the app is about to end
        table = None if frame is None else self._table(frame)
        rows.display, page.display = table is not None, table is None
        rows.show_header = self.size.height >= _HEADING_LEAST_LINES
        if table is not None:
            rows.show(table, width)
        elif frame is not None:
            page.show(*self._text(frame, width))
        bottom = [Text(), Text(self._keys_line(), "dim")]
        if table is not None and rows.row is not None and rows.row.reason:
            said = clean(f"{rows.row.key}: {rows.row.reason}")
            bottom[0] = Text(said, STYLES[rows.row.tone])
        for line in bottom:
            line.truncate(width, overflow="ellipsis")
        self._below.update(Text("\n").join(bottom))
        if frame is not None:
            above = self._header(frame, width)[: max(1, self.size.height // _HEADER_SHARE)]
            self._above.update(Text("\n").join(above))

    def _header(self, frame: Frame, width: int) -> list[Text]:
        lines = header_lines(frame.snapshot, width)
        if not self._alerts:
            return lines
        more = f" (and {len(self._alerts) - 1} more)" if len(self._alerts) > 1 else ""
        worst = shorten(f"! {self._alerts[0].text}", width - len(more)) + more
        return [Text(worst, STYLES[self._alerts[0].tone]), *lines]

    def _table(self, frame: Frame) -> Table | None:
        """Return the table of the page; `None` where it shows text."""
        snapshot = frame.snapshot
        match self._page:
            case "slots":
                table = slots_table(snapshot)
            case "cards":
                table = cards_table(snapshot)
            case "nodes":
                table = pages.nodes_table(snapshot)
            case "alerts":
                table = pages.alerts_table(self._alerts, time.time())
            case "events":
                table = pages.events_table(self._events)
            case "runs":
                table = runs_table(list_runs(self._folder.parent))
            case "jobs" if frame.queue is not None:
                table = jobs_table(frame.queue)
            case _:
                return None
        return self._view.of(table)

    def _text(self, frame: Frame, width: int) -> tuple[Text, pages.Courses, Sequence[Text]]:
        """Return what a page of text shows: a title, courses, and lines."""
        match self._page:
            case "help":
                lines = [Text(f" {shown:<6} {words}") for shown, _, _, words in _KEYS]
            case "question" if self._asked is not None:
                lines = self._asked.lines()
            case "jobs":
                lines = [Text("this run has no queue of jobs", "dim")]
            case _:
                row = next((row for row in frame.snapshot.rows if row.slot == self._slot), None)
                if row is None:
                    return Text("the slot is gone", "dim"), {}, ()
                back_s = _RANGES_S[self._range]
                try:
                    return pages.slot_page(self._folder, row, frame.snapshot, back_s, width)
                except ArchiveError as failure:
                    return Text(clean(str(failure)), "red"), {}, ()
        return Text(), {}, lines

    def _keys_line(self) -> str:
        view, is_slots = self._view, self._page == "slots"
        parts = [
            "nothing is stored yet" if self._frame is None else _freshness(self._frame),
            f"by {view.column or 'worst first'}{' reversed' if view.reverse else ''}",
        ]
        if view.words:
            parts.append(f"filter {view.words}")
        if view.marked:
            parts.append(f"{len(view.marked)} marked")
        if not is_slots:
            parts.append(f"{self._page}, esc goes back")
        if self._said or is_slots:
            parts.append(self._said or "? help, / filter, < > sort, enter slot, q leave")
        return SEPARATOR.join(map(clean, parts))

    # What keys do.

    def check_action(self, action: str, _: tuple[object, ...]) -> bool:
        """Say whether a key means an action now, see Textual: while a filter is typed, keys are
        letters.
        """
        return self._typed is None or action in {"leave", "quit"}

    def action_end(self) -> None:
        """Leave."""
        self.exit()

    def action_page(self, name: str) -> None:
        """Open a page with its last filter and order, without marks."""
        self._views[self._page] = replace(self._view, marked=frozenset())
        self._page, self._said = name, ""
        self._view = self._views.get(name, View())
        self.draw()
        self._focus()

    def _focus(self) -> None:
        self.set_focus(self._rows if self._rows.display else self._text_page)

    def action_leave(self) -> None:
        """Close the line of input, or else the page."""
        if self._typed is not None:
            self._close_input()
        else:
            self.action_page("slots")
        self._said, self._asked = "", None
        self.draw()

    def on_data_table_row_selected(self) -> None:
        """Open the slot under the cursor, or follow the run under it."""
        row = self._rows.row
        if row is not None and self._page == "slots":
            self._slot = row.key
            self.action_page("slot")
        elif row is not None and self._page == "runs":
            self._follow(self._folder.parent / row.key)
            self.action_page("slots")
            self.look()

    def on_data_table_row_highlighted(self) -> None:
        """Say why the row that is now under the cursor is as it is."""
        self.call_after_refresh(self.draw)

    def action_sort(self, step: int) -> None:
        """Sort by the column so many columns on; the worst first stands before the first one."""
        table = None if self._frame is None else self._table(self._frame)
        keys: list[str | None] = [None]
        keys += () if table is None else (column.key for column in table.columns)
        at = keys.index(self._view.column) if self._view.column in keys else 0
        column = keys[(at + step) % len(keys)]
        self._view = replace(self._view, column=column, reverse=False)
        self.draw()

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._view = replace(self._view, reverse=not self._view.reverse)
        self.draw()

    def action_worst(self) -> None:
        """Put the worst first again."""
        self._view = replace(self._view, column=None, reverse=False)
        self.draw()

    def action_pick(self) -> None:
        """Mark the slot or job under the cursor for an order, and move on."""
        rows = self._rows
        if self._page in {"slots", "jobs"} and rows.row is not None:
            self._view = replace(self._view, marked=self._view.marked ^ {rows.row.key})
            rows.action_cursor_down()
        self.draw()

    def action_range(self) -> None:
        """Show the courses of a slot over another time."""
        self._range = (self._range + 1) % len(_RANGES_S)
        self.draw()

    def action_ask(self, what: str) -> None:
        """Let the person type a filter or a cap."""
        asking = self._input
        asking.placeholder = "words" if what == "filter" else "cap of each, as 3GiB"
        asking.value = self._view.words if what == "filter" else ""
        self._typed, asking.display = what, True
        self.set_focus(asking)

    def on_input_submitted(self, entered: Input.Submitted) -> None:
        """Take what was typed; what is wrong stays to be corrected."""
        what, typed, self._said = self._typed, entered.value, ""
        try:
            if what == "cap" and self._asked is not None:
                self._asked = replace(self._asked, amount_bytes=parse_bytes(typed))
                self._page = "question"
            else:
                self._view = replace(self._view, words=typed, marked=frozenset())
        except ValueError as failure:
            self._said = str(failure)
            self.draw()
        else:
            self._close_input()

    def _close_input(self) -> None:
        self._typed, self._input.display = None, False
        self.draw()
        self._focus()

    # Orders to slots and jobs.

    def action_order(self, key: str) -> None:
        """Ask whether an order shall be sent to what is marked, or to what is under the cursor."""
        order = dict(zip(("slots", "jobs"), _ORDERS[key], strict=True)).get(self._page)
        row = self._rows.row
        names = self._view.marked or frozenset(() if row is None else (row.key,))
        if order is None or not names:
            return
        is_over = self._frame is None or self._frame.freshness in {
            Freshness.ENDED,
            Freshness.HEAD_GONE,
        }
        if self._send is None:
            self._said = "no commands: top was started with --read-only"
        elif is_over and isinstance(order, Do):  # a queue takes words while its head is dead, too
            self._said = "no commands: this run has no head any more"
        else:
            self._asked = Ask(order, tuple(sorted(names, key=natural_order)))
            if order is Do.CAP:
                self.action_ask("cap")
            else:
                self.action_page("question")
        self.draw()

    def action_yes(self) -> None:
        """Send what was asked; the answer is shown when it comes."""
        folder, ask, send = self._folder, self._asked, self._send
        if self._page == "question" and ask is not None and send is not None:
            self.action_page("jobs" if isinstance(ask.order, Word) else "slots")
            self._asked, self._said = None, f"{ask}: sent"
            self.run_worker(lambda: self._sent(folder, ask, send), thread=True)
            self.draw()

    def _sent(self, folder: Path, ask: Ask, send: Send) -> None:
        try:
            said = send(folder, ask.order, ask.names, ask.amount_bytes)
        except (OSError, ValueError, OrchestratorError) as failure:
            said = f"not sent: {failure}"
        self._said = f"{ask}: {said}"
        self.call_from_thread(self.draw)


def _freshness(frame: Frame) -> str:
    """Return how far what is shown is so now."""
    if frame.freshness is Freshness.ENDED:
        return f"ended, {frame.run.outcome}"
    is_live = frame.freshness is Freshness.LIVE
    return frame.freshness.value + ("" if is_live else f" for {clock(frame.late_s)}")
