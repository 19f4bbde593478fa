"""What a person looks at: filter, order, cursor and marks, how they follow frames and keys,
and which command waits for a yes. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rich.text import Span, Text

from orchestrator.control.wire import Answer
from orchestrator.core.user_commands import EFFECTS, Do
from orchestrator.record.archive import Frame, Freshness
from orchestrator.record.model import FIELDS, Row
from orchestrator.record.query import ALL_ROWS, WORST_FIRST, Filter, Order, select
from orchestrator.view.cells import clean
from orchestrator.view.phrases import counted
from workers.units import MIB

#: Columns in the order in which `<` and `>` go through them; the first entry is worst first.
SORTS: tuple[str | None, ...] = (
    None,
    *(key for key, field in FIELDS.items() if field.column is not None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of the table, apart from the run itself."""

    wanted: Filter = ALL_ROWS
    order: Order = WORST_FIRST
    marked: frozenset[str] = frozenset()
    """Slots that a command is meant for."""
    slot: str | None = None
    """Where the cursor is; it stays with its slot, not with its line."""
    line: int = 0
    """Where that was among the rows last, for when the slot is gone."""
    first: int = 0
    """The first row on the screen."""

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the rows that are shown, in their order."""
        return select(rows, self.wanted, self.order)


def follow(view: View, shown: Sequence[Row], height: int) -> View:
    """Return the view for new rows: the cursor stays with its slot, and the slot on the screen."""
    return _at(view, shown, _line_of(view, shown), height)


def move(view: View, shown: Sequence[Row], by: int, height: int) -> View:
    """Return the view after the cursor went so many rows down, or up if negative."""
    return _at(view, shown, _line_of(view, shown) + by, height)


def sort_by_next(view: View, step: int) -> View:
    """Return the view in the order of the column after the present one, or `step` columns on."""
    at = SORTS.index(view.order.key) if view.order.key in SORTS else 0
    return replace(view, order=Order(SORTS[(at + step) % len(SORTS)]))


def marked_line(line: Text) -> Text:
    """Return the line of a marked slot: a star in the gap behind its name, as not every terminal
    has colours.
    """
    at = line.plain.find("  ")
    if at < 0:
        return line
    return Text(
        f"{line.plain[:at]}*{line.plain[at + 1 :]}", spans=[*line.spans, Span(0, at + 1, "bold")]
    )


def _line_of(view: View, shown: Sequence[Row]) -> int:
    return next((line for line, row in enumerate(shown) if row.slot == view.slot), view.line)


def _at(view: View, shown: Sequence[Row], line: int, height: int) -> View:
    if not shown:
        return replace(view, slot=None, line=0, first=0)
    line = max(0, min(line, len(shown) - 1))
    lowest_first = max(0, line - max(1, height) + 1)
    first = min(max(view.first, lowest_first), line, max(0, len(shown) - max(1, height)))
    return replace(view, slot=shown[line].slot, line=line, first=max(first, lowest_first))


class Send(Protocol):
    """Sends a command to the head and waits for its answer."""

    def __call__(
        self, folder: Path, do: str, slots: Sequence[str], *, amount_bytes: int | None
    ) -> Answer:
        """Return what the head answered: `ok`, `effect` and `error`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A command that is not sent yet. Its slots stay those of the moment of the key."""

    do: str
    slots: tuple[str, ...]
    amount_bytes: int | None = None


def question_lines(ask: Ask | None) -> list[Text]:
    """Return the question: what would happen, and a line for each slot."""
    if ask is None:
        return []
    amount = "" if ask.amount_bytes is None else f" at {ask.amount_bytes / MIB:.0f} MiB"
    return [
        Text(
            f"{ask.do} {counted(len(ask.slots), 'slot')}{amount}? y sends it, esc does not",
            "bold yellow",
        ),
        Text(f"each of them: {EFFECTS[Do(ask.do)]}", "dim"),
        *(Text(f"  {clean(slot)}") for slot in ask.slots),
    ]


def refusal(*, can_send: bool, frame: Frame | None) -> str:
    """Return why no command can be sent now; empty if one can."""
    if not can_send:
        return "no commands: top was started with --read-only"
    if frame is None or frame.freshness in {Freshness.ENDED, Freshness.HEAD_GONE}:
        return "no commands: this run has no head any more"
    return ""
