"""How a person looks at the tables of `top`: filters, order and marks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from orchestrator.record.model import Row, natural_order
from orchestrator.view.query import ALL_ROWS, WORST_FIRST, Filter, Order, select
from orchestrator.view.tables import Table, TableRow


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown of a table, and in which order."""

    wanted: Filter = ALL_ROWS
    """Which slots."""
    order: Order = WORST_FIRST
    """Of slots, where no column is chosen."""
    words: str = ""
    """What must stand in the rows of other tables."""
    column: str | None = None
    """Key of the column that rows are sorted by; `None`: as the table has them."""
    reverse: bool = False
    marked: frozenset[str] = frozenset()
    """Keys of the rows that an order is meant for."""

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the slots that are shown, in their order."""
        return select(rows, self.wanted, self.order)


def ordered(table: Table, view: View) -> Table:
    """Return a table sorted by the column of a view, unknown values last.

    Numbers begin with the largest one, words with the first of the alphabet.
    """
    keys = [column.key for column in table.columns]
    if view.column not in keys:
        return replace(table, rows=table.rows[::-1]) if view.reverse else table
    at = keys.index(view.column)
    known = [row for row in table.rows if row.cells[at].value is not None]
    unknown = [row for row in table.rows if row.cells[at].value is None]
    is_falling = table.columns[at].numeric != view.reverse
    known.sort(key=lambda row: _rank(row.cells[at].value), reverse=is_falling)
    return replace(table, rows=(*known, *unknown))


def _rank(value: str | float | None) -> tuple[float, tuple[str | int, ...]]:
    return (0.0, natural_order(value)) if isinstance(value, str) else (value or 0.0, ())


def matching(table: Table, text: str) -> Table:
    """Return a table with the rows in which every word of a text stands."""
    words = text.lower().split()

    def has_all(row: TableRow) -> bool:
        said = " ".join([*(cell.text for cell in row.cells), row.reason]).lower()
        return all(word in said for word in words)

    return replace(table, rows=tuple(row for row in table.rows if has_all(row)))


def marked(table: Table, keys: Collection[str]) -> Table:
    """Return a table with a star behind the names of these rows: not every terminal has colours."""

    def starred(row: TableRow) -> TableRow:
        name, *others = row.cells
        return replace(row, cells=(replace(name, text=f"{name.text}*"), *others))

    rows = (starred(row) if row.key in keys else row for row in table.rows)
    return replace(table, rows=tuple(rows))
