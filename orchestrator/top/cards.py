"""The cards of a run in lines of text: a line for each, with its workers and what its sensors say. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rich.text import Text

from orchestrator.watch.catalogue import FIELDS
from orchestrator.watch.cells import Glyphs
from orchestrator.watch.columns import columns_for
from orchestrator.watch.model import Row
from orchestrator.watch.phrases import counted

_COLUMNS = frozenset(field.column for field in FIELDS.values() if field.of == "card" and field.column) - {"card"}


def card_lines(rows: Iterable[Row], glyphs: Glyphs) -> list[Text]:
    """Return a line for each card, in the order of their first slots."""
    cards: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cards[row.node, row.gpu_uuid or row.gpu_name or row.device or ""].append(row)
    lines = []
    for (node, _), of_card in cards.items():
        said = Text(glyphs.clean(f"{node}  {of_card[0].gpu_name or 'unknown'}"), "bold")
        line = Text.assemble(said, f"  {counted(len(of_card), 'worker')}")
        for column in columns_for(of_card, glyphs):
            cell = next((cell for row in of_card if (cell := column.cell(row)) is not None), None)
            if column.name in _COLUMNS and cell is not None:
                line.append(f"   {column.title} {column.unit} ", "dim").append_text(cell)
        lines.append(line)
    return lines
