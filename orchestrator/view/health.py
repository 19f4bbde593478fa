"""A run as a person at a terminal sees it: headline, warnings, health table and sums, as lines.

Pure. Does not cover redrawing (`live`), nor what the table has in it (`slots`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from orchestrator.record.model import Snapshot
from orchestrator.view.cells import SEPARATOR, clean, shorten
from orchestrator.view.phrases import totals
from orchestrator.view.slots import headline, slots_table
from orchestrator.view.tables import Cell
from orchestrator.view.terminal import STYLES, table_lines

_NOTICES_MOST = 3
"""On a terminal; a log has all of them."""


def health_lines(snapshot: Snapshot, width: int, height: int | None = None) -> list[Text]:
    """Return the run in lines of at most `width` cells, the worst slot first.

    Where they are more than `height`, the sums go first, then reasons, then the best rows; `None`
    shows all of them.
    """
    most_notices = None if height is None else _NOTICES_MOST
    above = [*header_lines(snapshot, width, most_notices), Text()]
    if not snapshot.rows:
        return [*above, Text("no workers yet", "dim")]
    room = None if height is None else max(1, height - len(above))
    lines = [*above, *table_lines(slots_table(snapshot), width, room)]
    below = [Text(), *flowed((Cell(text=words) for words in totals(snapshot)), width)]
    if height is None or len(lines) + len(below) <= height:
        lines += below
    for line in lines:
        line.truncate(width)
    return lines


def header_lines(
    snapshot: Snapshot, width: int, most_notices: int | None = _NOTICES_MOST
) -> list[Text]:
    """Return what stands above the table: nodes, states, throughput, time, then warnings."""
    notices: Sequence[str] = snapshot.notices
    if most_notices is not None and len(notices) > most_notices:
        notices = notices[: most_notices - 1]
    said = [clean(notice) for notice in notices]
    if hidden := len(snapshot.notices) - len(notices):
        said.append(f"{hidden} more warnings")
    warnings = (Text(shorten(f"! {words}", width), "bold yellow") for words in said)
    return [*flowed(headline(snapshot), width), *warnings]


def flowed(cells: Iterable[Cell], width: int) -> list[Text]:
    """Return lines filled with whole cells: a line is broken between two of them, never inside one,
    unless one is longer than a line.
    """
    lines: list[Text] = []
    for cell in cells:
        text = shorten(clean(cell.text), width)
        if lines and lines[-1].cell_len + cell_len(SEPARATOR + text) <= width:
            lines[-1].append(SEPARATOR, "dim")
        else:
            lines.append(Text())
        lines[-1].append(text, STYLES[cell.tone])
    return lines
