"""What a person looks at: filter, order, columns, cursor and marks, and how they follow frames and
keys. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.text import Span, Text

from orchestrator.record.catalogue import FIELDS
from orchestrator.record.model import Row
from orchestrator.record.query import ALL_ROWS, WORST_FIRST, Filter, Order, select

#: Columns in the order in which `<` and `>` go through them; the first entry is worst first.
SORTS: tuple[str | None, ...] = (
    None,
    *(key for key, field in FIELDS.items() if field.column is not None),
)

_STAY = frozenset({"slot", "state"})
#: Columns that can be taken away.
HIDEABLE: tuple[str, ...] = tuple(
    name
    for name in dict.fromkeys(field.column for field in FIELDS.values())
    if name not in _STAY and name
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of the table, apart from the run itself."""

    wanted: Filter = ALL_ROWS
    order: Order = WORST_FIRST
    hidden: frozenset[str] = frozenset()
    """Columns that the person does not want."""
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


def followed(view: View, shown: Sequence[Row], height: int) -> View:
    """Return the view for new rows: the cursor stays with its slot, and the slot on the screen."""
    return _at(view, shown, _line_of(view, shown), height)


def moved(view: View, shown: Sequence[Row], by: int, height: int) -> View:
    """Return the view after the cursor went so many rows down, or up if negative."""
    return _at(view, shown, _line_of(view, shown) + by, height)


def sorted_by_next(view: View, step: int) -> View:
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
