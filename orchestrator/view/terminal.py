"""Draws a `Table` on a terminal, as lines of rich text.

Pure. Where room is short, columns are left out by their priority, then words are cut, then reasons
are left out, then the last rows. The first column names the row. Does not decide which rows and
reasons a table has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from orchestrator.view.cells import ELLIPSIS, MISSING, RULE, clean, shorten, wrapped
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


def table_lines(table: Table, width: int | None, height: int | None = None) -> list[Text]:
    """Return the headings, the rows, and below them the reasons.

    Args:
        table: What is drawn.
        width: Of the terminal, in cells; `None` cuts nothing, for pipes and files.
        height: The most lines; `None` draws all rows, and reasons in as many lines as they need.
    """
    widths = fitting(table, width)
    headings = _heading_lines(table, widths)
    if height is not None and height < 2 * len(headings):
        headings = []  # so small a terminal has room for rows only
    room = None if height is None else max(1, height - len(headings))
    count = len(table.rows)
    if room is not None and count > room:
        count = max(1, room - 1)
    lines = [_line(table, widths, row.cells) for row in table.rows[:count]]
    if (hidden := len(table.rows) - count) and room != 1:
        lines.append(Text(f"{ELLIPSIS} and {hidden} more", "dim"))
    reasons = _reason_lines(table.rows[:count], width, is_cut=room is not None)
    if room is not None:
        reasons = reasons[: max(0, room - len(lines) - 1)]
    drawn = [*headings, *lines]
    if width is not None:
        for line in drawn:
            line.truncate(width)
    return [*drawn, *([Text(), *reasons] if reasons else [])]


def plain_text(lines: Sequence[Text]) -> str:
    """Return lines without their colours, for pipes and files."""
    return "\n".join(line.plain.rstrip() for line in lines)


def _heading_lines(table: Table, widths: Mapping[int, int]) -> list[Text]:
    """Return the titles of columns; where one has a unit, a line of units and a rule as well."""
    lines = [_line(table, widths, [Cell(text=column.title) for column in table.columns])]
    if any(table.columns[at].unit for at in widths):
        units = [Cell(text=column.unit) for column in table.columns]
        lines += [_line(table, widths, units), Text(RULE * _used(widths))]
    for line in lines:
        line.stylize("dim")
    return lines


def _used(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def fitting(table: Table, width: int | None) -> dict[int, int]:
    """Return the columns that fit into a width, with two cells between them: their indexes, each
    with the column's own width.

    A column in which no row has a value is left out, unless it always stays.
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
            longest = min(longest, max(_LEAST_CELLS, width // 2))  # no name takes all the line
        needed[at] = max(longest, cell_len(column.title), cell_len(column.unit))
    if width is None:
        return needed
    kept: dict[int, int] = {}
    for at in sorted(needed, key=lambda at: table.columns[at].priority):
        if table.columns[at].priority == 0 or _used({**kept, at: needed[at]}) <= width:
            kept[at] = needed[at]
    words = [at for at in kept if not table.columns[at].numeric]
    for at in sorted(words, key=kept.__getitem__, reverse=True):
        kept[at] -= max(0, min(_used(kept) - width, kept[at] - _LEAST_CELLS))
    return dict(sorted(kept.items()))


def cell_text(table: Table, at: int, cell: Cell, width: int) -> Text:
    """Return what a cell of the column with this index shows, in exactly its width."""
    text = clean(cell.text)
    if at == 0 and cell_len(text) > width:
        # The first column names the row: what tells names apart is often at their end.
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


def _reason_lines(rows: Sequence[TableRow], width: int | None, *, is_cut: bool) -> list[Text]:
    """Return the reasons in the order of the rows; rows with the same one share it.

    Those that are longer than `width` are broken between words, or cut to one line.
    """
    shared: dict[tuple[str, Tone], list[str]] = {}
    for row in rows:
        if reason := clean(row.reason):
            shared.setdefault((reason, row.tone), []).append(clean(row.key))
    lines = []
    for (reason, tone), names in shared.items():
        more = len(names) - _NAMES_MOST
        whose = ", ".join(names[:_NAMES_MOST]) + (f" and {more} more" if more > 0 else "")
        said = f"{whose}: {reason}"
        said = shorten(said, width) if is_cut and width is not None else wrapped(said, width)
        lines += [Text(line, STYLES[tone]) for line in said.split("\n")]
    return lines
