"""A run as a person at a terminal sees it: headline, warnings, health table and sums, as lines.

Pure. Does not cover redrawing (`live`), nor what the table has in it (`slots`).
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.text import Text

from orchestrator.record.model import Snapshot
from orchestrator.view.cells import SEPARATOR, clean, shorten
from orchestrator.view.phrases import totals
from orchestrator.view.slots import headline, slots_table
from orchestrator.view.tables import Cell
from orchestrator.view.terminal import STYLES, table_lines

_NOTICES_MOST = 3


def health_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return the run in lines of at most `width` cells, the worst slot first.

    What matters least is last: a screen that is too short for all shows the first lines.
    """
    above = [*header_lines(snapshot, width), Text()]
    if not snapshot.rows:
        return [*above, Text("no workers yet", "dim")]
    sums = flowed((Cell(text=words) for words in totals(snapshot)), width)
    lines = [*above, *table_lines(slots_table(snapshot), width), Text(), *sums]
    for line in lines:
        line.truncate(width)
    return lines


def header_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return what stands above the table: nodes, states, throughput, time, then warnings."""
    notices = [clean(notice) for notice in snapshot.notices]
    if len(notices) > _NOTICES_MOST:
        hidden = len(notices) - _NOTICES_MOST
        notices = [*notices[:_NOTICES_MOST], f"{hidden} more warnings"]
    warnings = (Text(shorten(f"! {words}", width), "bold yellow") for words in notices)
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
