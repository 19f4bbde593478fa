"""Tables as values: for slots, cards, jobs, runs, limits, `plan` and `doctor`.

Pure. A `Table` is drawn on a terminal (`terminal`), in `top`, or by the page, which receives it as
JSON. Does not draw, and decides nothing about widths: a renderer with too little width leaves out
columns by their `priority`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from orchestrator.view.cells import MISSING, clean, number


class Tone(StrEnum):
    """The meaning of a colour. The words say the same: no information is in the colour alone."""

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
    """The column's name in JSON."""
    title: str
    unit: str = ""
    """The second line of the heading."""
    numeric: bool = False
    """Whether cells are aligned to the right, and sorted from the largest."""
    priority: int = 0
    """A renderer with too little width leaves out the highest priorities first; 0 always stays."""
    most_cells: int | None = None
    """Longer text is cut to this width; `None` cuts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One value as text."""

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
    """Why the row is in its state. Renderers list reasons below the table, in the order of rows."""
    tone: Tone = Tone.PLAIN
    """The tone of the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns and rows. Each row has a cell for each column."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it for the page and the report: `columns`, and `rows` of `cells`."""
        keys = ("key", "title", "unit", "numeric", "priority")
        return {
            "name": self.name,
            "columns": [{name: getattr(column, name) for name in keys} for column in self.columns],
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
    """Return a row; `values` and `tones` are keyed by the columns' keys, and `None` is unknown."""
    cells = []
    for column in columns:
        value = values.get(column.key)
        text = number(value) if isinstance(value, int) else str("" if value is None else value)
        tone_of_cell = tones.get(column.key, Tone.PLAIN)
        cells.append(Cell(text=clean(text or "") or MISSING, tone=tone_of_cell))
    return TableRow(key=key, cells=tuple(cells), reason=reason, tone=tone)
