"""Draws a `Table` for a terminal, as lines of rich text.

Pure. If the width is too small, columns are left out by their priority, then words are cut. The
first column names the row. Does not decide which rows and reasons a table has, nor how many lines
are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from orchestrator.view.cells import MISSING, clean, shorten, wrapped
from orchestrator.view.tables import Cell, Table, TableRow, Tone

STYLES: Final[Mapping[Tone, str]] = {
    Tone.PLAIN: "",
    Tone.DIM: "dim",
    Tone.NOTE: "cyan",
    Tone.GOOD: "green",
    Tone.WARN: "yellow",
    Tone.BAD: "bold red",
}

_GAP: Final = "  "
_LEAST_CELLS: Final = 6
"""Words are not cut to less than this."""
_NAMES_MOST: Final = 3
"""How many rows with the same reason are named; the others are counted."""


def table_lines(table: Table, width: int | None) -> list[Text]:
    """Return the headings, the rows and the reasons, within a width in cells; `None`, for pipes and
    files, cuts nothing.

    The headings are a line of titles and, if a column has a unit, a line of units and a rule.
    """
    widths = column_widths(table, width)
    columns = table.columns
    headings = [_line(table, widths, [Cell(text=column.title) for column in columns])]
    if any(columns[at].unit for at in widths):
        units = _line(table, widths, [Cell(text=column.unit) for column in columns])
        headings += [units, Text("─" * _total_width(widths))]
    for line in headings:
        line.stylize("dim")
    lines = [*headings, *(_line(table, widths, row.cells) for row in table.rows)]
    if width is not None:
        for line in lines:
            line.truncate(width)
    reasons = _reason_lines(table.rows, width)
    return [*lines, *([Text(), *reasons] if reasons else [])]


def plain_text(lines: Sequence[Text]) -> str:
    """Return lines as text without colours, for pipes and files."""
    return "\n".join(line.plain.rstrip() for line in lines)


def _total_width(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def column_widths(table: Table, width: int | None) -> dict[int, int]:
    """Return index and width of the columns that fit into a width, with two cells between them.

    A column in which no row has a value is left out, unless its priority is 0.
    """
    needed: dict[int, int] = {}
    for at, column in enumerate(table.columns):
        texts = [row.cells[at].text for row in table.rows]
        if column.priority and texts and all(text in {"", MISSING} for text in texts):
            continue
        longest = max(cell_len(clean(text)) for text in ("", *texts))
        if width is not None and column.most_cells is not None:
            longest = min(longest, column.most_cells)
        if width is not None and at == 0:
            longest = min(longest, max(_LEAST_CELLS, width // 2))  # leave room for the others
        needed[at] = max(longest, cell_len(column.title), cell_len(column.unit))
    if width is None:
        return needed
    kept: dict[int, int] = {}
    for at in sorted(needed, key=lambda at: table.columns[at].priority):
        if table.columns[at].priority == 0 or _total_width({**kept, at: needed[at]}) <= width:
            kept[at] = needed[at]
    words = [at for at in kept if not table.columns[at].numeric]
    for at in sorted(words, key=kept.__getitem__, reverse=True):
        kept[at] -= max(0, min(_total_width(kept) - width, kept[at] - _LEAST_CELLS))
    return dict(sorted(kept.items()))


def cell_text(table: Table, at: int, cell: Cell, width: int) -> Text:
    """Return the text of a cell of the column with this index, cut or padded to its width."""
    text = clean(cell.text)
    if at == 0 and cell_len(text) > width:
        # The first column names the row, and names often differ at their end: cut the middle.
        shown = shorten(text, width // 2) + text[width // 2 - width :]
    else:
        shown = shorten(text, width)
    drawn = Text(shown, STYLES[cell.tone], no_wrap=True)
    drawn.align("right" if table.columns[at].numeric else "left", width)
    return drawn


def _line(table: Table, widths: Mapping[int, int], cells: Sequence[Cell]) -> Text:
    texts = (cell_text(table, at, cells[at], width) for at, width in widths.items())
    line = Text(_GAP).join(texts)
    line.rstrip()
    return line


def _reason_lines(rows: Sequence[TableRow], width: int | None) -> list[Text]:
    """Return the reasons in the order of the rows; rows with the same reason share a line."""
    shared: dict[tuple[str, Tone], list[str]] = {}
    for row in rows:
        if reason := clean(row.reason):
            shared.setdefault((reason, row.tone), []).append(clean(row.key))
    lines = []
    for (reason, tone), names in shared.items():
        more = len(names) - _NAMES_MOST
        whose = ", ".join(names[:_NAMES_MOST]) + (f" and {more} more" if more > 0 else "")
        text = wrapped(f"{whose}: {reason}", width)
        lines += [Text(line, STYLES[tone]) for line in text.split("\n")]
    return lines
