"""Lists beside the table: cards with their sensors, alerts, nodes, runs, columns. Pure."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Container, Iterable

from rich.text import Text

from orchestrator.record.catalogue import FIELDS
from orchestrator.record.folders import Listed
from orchestrator.record.model import Row, Snapshot
from orchestrator.view.alerts.badges import Badge
from orchestrator.view.cells import Glyphs, clock, flow
from orchestrator.view.columns import columns_for
from orchestrator.view.phrases import counted
from orchestrator.view.top.status import SEVERITY_STYLES
from orchestrator.view.top.view import HIDEABLE

_COLUMNS = frozenset(
    field.column for field in FIELDS.values() if field.of == "card" and field.column
) - {"card"}


def card_lines(rows: Iterable[Row], width: int, glyphs: Glyphs) -> list[Text]:
    """Return a line for each card, or more where it has no room, in the order of their first slots."""
    cards: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cards[row.node, row.gpu_uuid or row.gpu_name or row.device or ""].append(row)
    lines = []
    for (node, _), of_card in cards.items():
        said = Text(glyphs.clean(f"{node}  {of_card[0].gpu_name or 'unknown'}"), "bold")
        segments = [said, Text(counted(len(of_card), "worker"))]
        for column in columns_for(of_card, glyphs):
            cell = next((cell for row in of_card if (cell := column.cell(row)) is not None), None)
            if column.name in _COLUMNS and cell is not None:
                segments.append(Text.assemble((f"{column.title} {column.unit} ", "dim"), cell))
        lines += flow(segments, width, "   ")
    return lines


def alert_lines(
    badges: Iterable[Badge], now_unix_s: float, width: int, glyphs: Glyphs
) -> list[Text]:
    """Return what fires: each alert with its subjects, what is wrong with the first, and what to
    type.
    """
    lines = []
    for badge in badges:
        held = clock(max(0.0, now_unix_s - badge.since_unix_s))
        said = glyphs.separator.join([badge.severity, f"for {held}", ", ".join(badge.subjects)])
        lines.append(
            Text(glyphs.shorten(glyphs.clean(said), width), SEVERITY_STYLES[badge.severity])
        )
        for words in (badge.text, badge.what_to_do):
            indented = textwrap.wrap(glyphs.clean(words), max(20, width - 3))
            lines += [Text(f"   {line}") for line in indented]
    return lines or [Text("no alert fires", "dim")]


def column_lines(hidden: Container[str]) -> list[Text]:
    """Return a line for each column that may be taken away."""
    return [Text(f"[{' ' if name in hidden else 'x'}] {name}") for name in HIDEABLE]


def node_lines(snapshot: Snapshot | None, glyphs: Glyphs) -> list[Text]:
    """Return a line for each node that is planned or there: its slots by state."""
    if snapshot is None:
        return []
    states = {node: Counter[str]() for node in (*snapshot.nodes_planned, *snapshot.nodes_seen)}
    for brief in snapshot.briefs:
        states.setdefault(brief.slot.rpartition("/")[0], Counter())[brief.state.value] += 1
    lines = []
    for node, counts in states.items():
        missing = node not in snapshot.nodes_seen
        said = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no slots"
        lines.append(
            Text.assemble(
                (glyphs.clean(node), "bold"),
                ("  missing" if missing else "  there", "red" if missing else ""),
                f"  {said}",
            )
        )
    return lines or [Text("no nodes yet", "dim")]


def run_lines(runs: Iterable[Listed], glyphs: Glyphs) -> list[Text]:
    """Return a line for each run, to choose one."""
    lines = []
    for one in runs:
        told = (
            ""
            if one.run is None
            else f"  {counted(len(one.run.slots), 'slot')}  {clock(one.run.elapsed_s)}"
        )
        lines.append(Text(glyphs.clean(f"{one.run_id}  {one.outcome}{told}")))
    return lines or [Text("no runs", "dim")]
