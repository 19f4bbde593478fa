"""How a person looks at the tables of `top`: filter, order and marks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from orchestrator.record.model import Row, natural_order
from orchestrator.record.query import ALL_ROWS, WORST_FIRST, Filter, Order, select
from orchestrator.view.tables import Column, Table, TableRow


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Which slots are shown, and in which order."""

    wanted: Filter = ALL_ROWS
    order: Order = WORST_FIRST

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the rows that are shown, in their order."""
        return select(rows, self.wanted, self.order)


def column_named(table: Table, word: str) -> Column:
    """Return the column of this key or title, or with one that begins so.

    Raises:
        ValueError: There is none. The message names those there are.
    """
    wanted = word.strip().lower()
    for column in table.columns:
        if wanted and (column.key.startswith(wanted) or column.title.lower().startswith(wanted)):
            return column
    names = ", ".join(column.key for column in table.columns)
    raise ValueError(f"no column is called {word[:40]!r}; there are {names}")


def column_after(table: Table, key: str | None, step: int) -> str | None:
    """Return the key of the column so many columns on; `None` stands before the first one."""
    keys = [None, *(column.key for column in table.columns)]
    at = keys.index(key) if key in keys else 0
    return keys[(at + step) % len(keys)]


def ordered(table: Table, key: str | None, *, reverse: bool) -> Table:
    """Return a table sorted by a column, unknown values last; `None` keeps its order.

    Numbers begin with the largest one, words with the first of the alphabet.
    """
    keys = [column.key for column in table.columns]
    if key not in keys:
        return replace(table, rows=table.rows[::-1]) if reverse else table
    at = keys.index(key)
    known = [row for row in table.rows if row.cells[at].value is not None]
    unknown = [row for row in table.rows if row.cells[at].value is None]
    known.sort(
        key=lambda row: _rank(row.cells[at].value), reverse=table.columns[at].numeric != reverse
    )
    return replace(table, rows=(*known, *unknown))


def _rank(value: str | float | None) -> tuple[float, tuple[str | int, ...]]:
    if isinstance(value, int | float):
        return value, ()
    return 0.0, natural_order(value or "")


def matching(table: Table, text: str) -> Table:
    """Return a table with the rows in which every one of these words stands."""
    words = text.lower().split()

    def says(row: TableRow) -> str:
        return " ".join([*(cell.text for cell in row.cells), row.reason]).lower()

    rows = (row for row in table.rows if all(word in says(row) for word in words))
    return replace(table, rows=tuple(rows))


def marked(table: Table, keys: Collection[str]) -> Table:
    """Return a table with a star behind the names of these rows."""

    def starred(row: TableRow) -> TableRow:
        name, *others = row.cells
        return replace(row, cells=(replace(name, text=f"{name.text}*"), *others))

    return replace(
        table, rows=tuple(starred(row) if row.key in keys else row for row in table.rows)
    )
