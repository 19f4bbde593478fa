"""A table as a value: what slots, cards, jobs, runs, limits, `plan` and `doctor` show.

Pure. Code that has something to show makes a `Table`; a renderer draws it on a terminal
(`terminal`), in `top`, or on the page, which gets it as JSON. Does not cover how a table is drawn,
and decides nothing about widths: a renderer that is short of room leaves out columns by their
`priority`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from orchestrator.view.cells import MISSING, clean, number


class Tone(StrEnum):
    """What a colour says. It repeats what the words say: nothing is in the colour alone."""

    PLAIN = "plain"
    DIM = "dim"
    NOTE = "note"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    key: str
    """Its name in JSON."""
    title: str
    unit: str = ""
    """The second line of the heading."""
    numeric: bool = False
    """Whether its cells are aligned to the right, and sorted from the largest."""
    priority: int = 0
    """A renderer that is short of room leaves out the columns with the highest first; those with 0
    always stay.
    """
    most_cells: int | None = None
    """Longer words are cut to this width; `None` cuts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One value as it is shown."""

    text: str = MISSING
    """One line, already without control characters (`cells.clean`)."""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row; its cells are in the order of the table's columns."""

    key: str
    """Names the row in commands and in the page: a slot, a job, a run."""
    cells: tuple[Cell, ...]
    reason: str = ""
    """Why it stands so. Renderers list reasons below the table, in the order of the rows."""
    tone: Tone = Tone.PLAIN
    """Of the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns and rows, the worst row first. Each row has a cell for each column."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it for the page and the report: `columns`, and `rows` of `cells`."""
        told = ("key", "title", "unit", "numeric", "priority")
        return {
            "name": self.name,
            "columns": [{name: getattr(column, name) for name in told} for column in self.columns],
            "rows": [
                {
                    "key": row.key,
                    "cells": [[cell.text, cell.tone.value] for cell in row.cells],
                    "reason": row.reason,
                    "tone": row.tone.value,
                }
                for row in self.rows
            ],
        }


def row_of(
    columns: Sequence[Column],
    key: str,
    values: Mapping[str, Any],
    tones: Mapping[str, Tone] = MappingProxyType({}),
    reason: str = "",
    tone: Tone = Tone.PLAIN,
) -> TableRow:
    """Return a row; what its cells show is under the keys of the columns, and `None` is unknown."""
    cells = []
    for column in columns:
        told = values.get(column.key)
        text = number(told) if isinstance(told, int) else str("" if told is None else told)
        tone_of_cell = tones.get(column.key, Tone.PLAIN)
        cells.append(Cell(text=clean(text or "") or MISSING, tone=tone_of_cell))
    return TableRow(key=key, cells=tuple(cells), reason=reason, tone=tone)
