"""`top` on a terminal: keys in, tables out. Reads the run folder once a second.

An order to slots or jobs is asked for first, and then sent; nothing else is changed. What pages
show is in `pages.py`, and how tables are drawn in `widgets.py`.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.keys import format_key
from textual.widgets import Input, Static

from orchestrator.config.byte_size import parse_bytes
from orchestrator.core.user_commands import EFFECTS, Do
from orchestrator.errors import ArchiveError, OrchestratorError
from orchestrator.jobs.model import Word
from orchestrator.record.archive import Follower, Frame
from orchestrator.view.alerts import Alert, Since, alerts, is_up
from orchestrator.view.cells import SEPARATOR, clean, shorten
from orchestrator.view.charts import course_of
from orchestrator.view.document import Json, event_line, mark
from orchestrator.view.health import header_lines
from orchestrator.view.jobs import jobs_table, with_jobs
from orchestrator.view.slots import cards_table, slots_table
from orchestrator.view.tables import Table
from orchestrator.view.terminal import STYLES
from orchestrator.view.top import pages
from orchestrator.view.top.view import View
from orchestrator.view.top.widgets import CSS, Rows, TextPage
from workers.units import MIB

Give: TypeAlias = Callable[[Path, Do | Word, Sequence[str], int | None], str]
"""Gives an order to slots or jobs, with an amount in bytes, and returns what becomes of them."""

#: Keys, what they do, and in words.
_KEYS: Final = (
    ("q", "quit", "leave; ctrl-c does so as well"),
    ("escape", "leave", "back to the slots"),
    ("question_mark,h", "page('help')", "this help"),
    ("a", "page('alerts')", "alerts, with what to do"),
    ("e", "page('events')", "events, the newest first"),
    ("d", "page('cards')", "cards"),
    ("J", "page('jobs')", "jobs"),
    ("slash", "ask('filter')", "filter: words that must stand in a row; state:lost, !pc1"),
    ("greater_than_sign,full_stop", "sort(1)", "sort by the next column"),
    ("less_than_sign,comma", "sort(-1)", "sort by the column before"),
    ("r", "reverse", "turn the order"),
    ("0", "worst", "the worst first"),
    ("y", "yes", "send the order that was asked for"),
)
#: Keys of orders: what slots are to do, what jobs are to do, and in words.
_ORDERS: Final[Mapping[str, tuple[Do | None, Word | None, str]]] = {
    "P": (Do.PAUSE, Word.HOLD, "pause the slot, or hold the job, under the cursor"),
    "U": (Do.UNPAUSE, Word.RELEASE, "unpause a slot, release a job"),
    "R": (Do.REINSTATE, Word.RETRY, "reinstate a slot, retry a job"),
    "D": (Do.DRAIN, None, "drain a slot"),
    "C": (Do.CAP, None, "cap the memory of a slot"),
    "W": (Do.SAVE, None, "have a slot save now"),
    "X": (None, Word.CANCEL, "cancel a job"),
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
_COURSES_S: Final = 3600.0
"""How far back the courses of a slot go."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An order that is not sent yet, for what was under the cursor at the moment of the key."""

    order: Do | Word
    name: str
    amount_bytes: int | None = None

    def __str__(self) -> str:
        """Return what is asked of which slot or job."""
        at = "" if self.amount_bytes is None else f" at {self.amount_bytes / MIB:.0f} MiB"
        return f"{self.order} {self.name}{at}"


class Top(App[None]):
    """Follows one run folder."""

    CSS = CSS
    ENABLE_COMMAND_PALETTE = False
    # Priority: a key acts before the one after it is handed on, so that what is typed after `/`
    # goes into the filter.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", priority=True),
        *(Binding(*each, priority=True) for each in _KEYS),
        *(
            Binding(key, f"order('{key}')", each[-1], priority=True)
            for key, each in _ORDERS.items()
        ),
    ]

    def __init__(self, folder: Path, view: View, give: Give | None = None) -> None:
        super().__init__(ansi_color=True)
        self._folder = folder
        self._give = give
        self._follower = Follower(folder)
        self._frame: Frame | None = None
        self._events: deque[Json] = deque(maxlen=_EVENTS_KEPT)
        self._alerts: Sequence[Alert] = ()
        self._alerts_since: Since = {}
        self._page = "slots"
        self._views = defaultdict(View, slots=view)
        """How each page is looked at."""
        self._slot = ""
        """Whose page is shown."""
        self._said = ""
        """What went wrong last, or what was done."""
        self._asked: Ask | None = None
        self._typed: str | None = None
        """What the line of input is for; `None`: keys are keys."""
        self._rows, self._text_page, self._input = Rows(), TextPage(), Input()
        self._above, self._below = Static(id="header"), Static(id="keys")

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
            self._events.extend(map(event_line, frame.events))
            self._frame = replace(frame, snapshot=with_jobs(frame.snapshot, frame.queue))
        self.draw()

    def draw(self) -> None:
        """Draw header, table or text, and the two lines at the bottom."""
        frame, width = self._frame, max(20, self.size.width)
        rows = self._rows
        if not rows.is_attached:
            return  # the app is about to end
        table = None if frame is None else self._table(frame)
        rows.display, self._text_page.display = table is not None, table is None
        rows.show_header = self.size.height >= _HEADING_LEAST_LINES
        bottom = [Text(), Text(self._keys_line(), "dim")]
        if table is not None:
            rows.show(table, width)
            if rows.row is not None and rows.row.reason:
                said = clean(f"{rows.row.key}: {rows.row.reason}")
                bottom[0] = Text(said, STYLES[rows.row.tone])
        elif frame is not None:
            self._text_page.show(self._text(frame, width))
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
        match self._page:
            case "slots":
                table = slots_table(frame.snapshot)
            case "cards":
                table = cards_table(frame.snapshot)
            case "alerts":
                table = pages.alerts_table(self._alerts, time.time())
            case "events":
                table = pages.events_table(self._events)
            case "jobs" if frame.queue is not None:
                table = jobs_table(frame.queue)
            case _:
                return None
        return self._views[self._page].of(table)

    def _text(self, frame: Frame, width: int) -> RenderableType:
        """Return what a page of text shows."""
        if self._page == "help":
            keys = {key.partition(",")[0]: words for key, _, words in _KEYS}
            keys |= {key: words for key, (_, _, words) in _ORDERS.items()}
            return Group(*(Text(f" {format_key(key):<6} {keys[key]}") for key in keys))
        if self._page == "jobs":
            return Text("this run has no queue of jobs", "dim")
        try:
            course = course_of(self._folder, self._slot, _COURSES_S)
        except ArchiveError as failure:
            return Text(clean(str(failure)), "red")
        return pages.slot_page(self._slot, course, frame.snapshot, width)

    def _keys_line(self) -> str:
        if (ask := self._asked) and self._typed is None:
            order = ask.order
            effect = _EFFECTS_ON_JOBS[order] if isinstance(order, Word) else EFFECTS[order]
            return SEPARATOR.join((clean(f"{ask}? y sends it, esc does not"), effect))
        view, is_slots = self._views[self._page], self._page == "slots"
        parts = [
            "nothing is stored yet" if self._frame is None else mark(self._frame)[0],
            f"by {view.column or 'worst first'}{' reversed' if view.reverse else ''}",
        ]
        if view.words:
            parts.append(f"filter {view.words}")
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

    def action_page(self, name: str) -> None:
        """Open a page with its last filter and order."""
        self._page, self._said = name, ""
        self.draw()
        self._focus()

    def _view(self, **changed: object) -> None:
        """Look at the page in another way."""
        self._views[self._page] = replace(self._views[self._page], **changed)  # type: ignore[arg-type]  # of any field
        self.draw()

    def _focus(self) -> None:
        self.set_focus(self._rows if self._rows.display else self._text_page)

    def action_leave(self) -> None:
        """Close the line of input, the question, or else the page."""
        if self._typed is not None:
            self._close_input()
        elif self._asked is None:
            self.action_page("slots")
        self._said, self._asked = "", None
        self.draw()

    def on_data_table_row_selected(self) -> None:
        """Open the slot or job under the cursor."""
        if self._rows.row is not None and self._page in {"slots", "jobs"}:
            self._slot = self._rows.row.key
            self.action_page("slot")

    def on_data_table_row_highlighted(self) -> None:
        """Say why the row that is now under the cursor is as it is."""
        self.call_after_refresh(self.draw)

    def action_sort(self, step: int) -> None:
        """Sort by the column so many columns on; the worst first stands before the first one."""
        table = None if self._frame is None else self._table(self._frame)
        keys = [None, *(() if table is None else (column.key for column in table.columns))]
        now = self._views[self._page].column
        at = keys.index(now) if now in keys else 0
        self._view(column=keys[(at + step) % len(keys)], reverse=False)

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._view(reverse=not self._views[self._page].reverse)

    def action_worst(self) -> None:
        """Put the worst first again."""
        self._view(column=None, reverse=False)

    def action_ask(self, what: str) -> None:
        """Let the person type a filter or a cap."""
        asking = self._input
        asking.placeholder = "words" if what == "filter" else "cap, as 3GiB"
        asking.value = self._views[self._page].words if what == "filter" else ""
        self._typed, asking.display = what, True
        self.set_focus(asking)

    def on_input_submitted(self, entered: Input.Submitted) -> None:
        """Take what was typed; what is no amount stays to be corrected."""
        self._said = ""
        if self._typed == "filter":
            self._view(words=entered.value)
        elif self._asked is not None:
            try:
                self._asked = replace(self._asked, amount_bytes=parse_bytes(entered.value))
            except ValueError as failure:
                self._said = str(failure)
                self.draw()
                return
        self._close_input()

    def _close_input(self) -> None:
        self._typed, self._input.display = None, False
        self.draw()
        self._focus()

    # Orders to slots and jobs.

    def action_order(self, key: str) -> None:
        """Ask whether an order shall be sent to the slot or job under the cursor."""
        of_slots, of_jobs, _ = _ORDERS[key]
        order = {"slots": of_slots, "jobs": of_jobs}.get(self._page)
        row = self._rows.row
        if order is None or row is None:
            return
        if self._give is None:
            self._said = "no commands: top was started with --read-only"
        elif isinstance(order, Do) and not (self._frame and is_up(self._frame)):
            # A queue takes words while its head is dead, too.
            self._said = "no commands: this run has no head any more"
        else:
            self._asked = Ask(order, row.key)
            if order is Do.CAP:
                self.action_ask("cap")
        self.draw()

    def action_yes(self) -> None:
        """Send what was asked; the answer is shown when it comes."""
        ask, give = self._asked, self._give
        if ask is not None and give is not None:
            self._asked, self._said = None, f"{ask}: sent"
            self.run_worker(lambda: self._sent(ask, give), thread=True)
            self.draw()

    def _sent(self, ask: Ask, give: Give) -> None:
        try:
            said = give(self._folder, ask.order, [ask.name], ask.amount_bytes)
        except (OSError, ValueError, OrchestratorError) as failure:
            said = f"not sent: {failure}"
        self._said = f"{ask}: {said}"
        self.call_from_thread(self.draw)
