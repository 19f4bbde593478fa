"""How a person looks at the tables of `top`: filter and order. Pure.

A filter is a list of words, and a row must match all of them, in upper or lower case:

    pc1         its reason contains it, or a cell of words
    state:lost  a cell contains it whose column has a name or a title that begins with `state`
    !pc1        the word does not match
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from orchestrator.errors import UsageError
from orchestrator.record.model import natural_order
from orchestrator.view.slots import COLUMNS
from orchestrator.view.tables import Column, Table, TableRow

_LISTED_MOST: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown of a table, and in which order."""

    words: str = ""
    """The filter, as it was typed."""
    column: str | None = None
    """Key of the column that rows are sorted by; `None`: as the table has them."""
    reverse: bool = False

    def of(self, table: Table) -> Table:
        """Return what is shown of a table."""
        rows = [row for row in table.rows if _matches(table, row, self.words)]
        return replace(table, rows=tuple(self._ordered(table.columns, rows)))

    def _ordered(self, columns: tuple[Column, ...], rows: list[TableRow]) -> list[TableRow]:
        """Return rows sorted by the column of this view, unknown values last.

        Numbers begin with the largest one, words with the first of the alphabet.
        """
        keys = [column.key for column in columns]
        if self.column not in keys:
            return rows[::-1] if self.reverse else rows
        at = keys.index(self.column)
        known = [row for row in rows if row.cells[at].value is not None]
        is_falling = columns[at].numeric != self.reverse
        known.sort(key=lambda row: _rank(row.cells[at].value), reverse=is_falling)
        return [*known, *(row for row in rows if row.cells[at].value is None)]


def column_of(word: str) -> str:
    """Return the column of slots that a word names: its name, key or title, or how one begins.

    Raises:
        UsageError: There is no such column, or there are several.
    """
    wanted = word.lower()
    names = {each.key: (each.key, *each.keys, each.title.lower()) for each in COLUMNS}
    if exact := [name for name, words in names.items() if wanted in words]:
        return exact[0]
    begun = [name for name, words in names.items() if any(w.startswith(wanted) for w in words)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise UsageError(f"{word[:40]!r} may be {', '.join(begun[:_LISTED_MOST])}; type more of it")
    raise UsageError(f"no column is called {word[:40]!r}; there are {', '.join(names)}")


def _matches(table: Table, row: TableRow, words: str) -> bool:
    cells = zip(table.columns, row.cells, strict=True)
    texts = [(column, cell.text.lower()) for column, cell in cells]

    def has(word: str) -> bool:
        name, colon, wanted = word.partition(":")
        named = [text for column, text in texts if colon and _is_called(column, name)]
        if named:
            return any(wanted in text for text in named)
        told = [text for column, text in texts if not column.numeric]
        return any(word in text for text in (row.reason.lower(), *told))

    return all(
        has(word.removeprefix("!")) != word.startswith("!") for word in words.lower().split()
    )


def _is_called(column: Column, name: str) -> bool:
    return column.key.startswith(name) or column.title.lower().startswith(name)


def _rank(value: str | float | None) -> tuple[float, tuple[str | int, ...]]:
    return (0.0, natural_order(value)) if isinstance(value, str) else (value or 0.0, ())
