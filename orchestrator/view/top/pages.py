"""What pages of `top` show that no other view has: events, alerts, all of one slot. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from rich.color import Color
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text
from textual.renderables.sparkline import Sparkline

from orchestrator.record.model import Snapshot
from orchestrator.record.output import cleaned
from orchestrator.view.alerts import Alert
from orchestrator.view.cells import MISSING, clean, clock
from orchestrator.view.document import Json
from orchestrator.view.health import flowed
from orchestrator.view.slots import slots_table
from orchestrator.view.tables import Cell, Column, Table, row_of
from orchestrator.view.terminal import STYLES, table_lines

_ROWS_MOST: Final = 12
_COURSES_MOST: Final = 8
_TEXT_LINES_MOST: Final = 20
_BESIDE_COURSE_CELLS: Final = 40
_CYAN: Final = Color.from_rgb(0, 170, 170)

#: Their keys are those of an event in the document.
_EVENTS: Final = (
    Column(key="time", title="time"),
    Column(key="slot", title="slot"),
    Column(key="words", title="event"),
    Column(key="text", title="details"),
)
_ALERTS: Final = (
    Column(key="severity", title="severity"),
    Column(key="for", title="for", numeric=True),
    Column(key="text", title="what is wrong; below, what to do"),
)
_STATES: Final = (
    Column(key="time", title="time"),
    Column(key="state", title="state"),
    Column(key="lasted", title="lasted", numeric=True),
    Column(key="cause", title="cause"),
)


def events_table(events: Collection[Json]) -> Table:
    """Return events of the document, the newest first."""
    rows = (row_of(_EVENTS, str(event["number"]), event) for event in reversed([*events]))
    return Table(name="events", columns=_EVENTS, rows=tuple(rows))


def alerts_table(alerts: Sequence[Alert], now_unix_s: float) -> Table:
    """Return what is wrong; the reason of a row is what to do."""
    rows = []
    for alert in alerts:
        held_s = max(0.0, now_unix_s - alert.since_unix_s)
        values = {"severity": alert.severity, "for": held_s, "text": alert.text}
        texts, tones = {"for": clock(held_s)}, {"severity": alert.tone}
        rows.append(row_of(_ALERTS, alert.subject, values, texts, tones, reason=alert.what_to_do))
    return Table(name="alerts", columns=_ALERTS, rows=tuple(rows))


def slot_page(slot: str, course: Json, snapshot: Snapshot, width: int) -> RenderableType:
    """Return all that is known of a slot or job: its courses, and lines: facts, states, events, its
    last error, what it printed.
    """
    parts = {
        "states": table_lines(_states_table(course["spans"][-_ROWS_MOST:]), width),
        "events": table_lines(events_table(course["events"][-_ROWS_MOST:]), width),
        "last error": [
            Text(line, "red")
            for line in cleaned(course["traceback"]).splitlines()[-_TEXT_LINES_MOST:]
        ],
        "printed": [Text(line) for line in course["printed"].splitlines()],
    }
    title, *lines = _facts(slot, snapshot, width)
    for name, part in parts.items():
        if part:
            lines += [Text(), Text(name, "bold"), *part]
    return Group(title, _courses(course["charts"][:_COURSES_MOST], width), *lines)


def _states_table(spans: Sequence[Json]) -> Table:
    rows = [
        row_of(
            _STATES, str(at), {**span, "state": span["state"][0]}, {}, {"state": span["state"][1]}
        )
        for at, span in enumerate(spans)
    ]
    return Table(name="states", columns=_STATES, rows=tuple(rows))


def _courses(charts: Sequence[Json], width: int) -> Grid:
    """Return a line for each chart: what it shows, its course, its least and its most."""
    grid = Grid.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(width=(cells := max(10, width - _BESIDE_COURSE_CELLS)))
    for chart in charts:
        course = [value for value in chart["lines"][0][1] if value is not None]
        # A mean of many samples hides the extremes, and these are worth knowing.
        band = chart["band"] or (course, course)
        low, high = ([value for value in edge if value is not None] for edge in band)
        drawn = Sparkline(course, width=cells, min_color=_CYAN, max_color=_CYAN)
        grid.add_row(Text(chart["label"], "dim"), drawn, f"{min(low):.4g} to {max(high):.4g}")
    return grid


def _facts(slot: str, snapshot: Snapshot, width: int) -> Iterator[Text]:
    """Yield the name with the reason, then what the table of slots says."""
    table = slots_table(snapshot)
    row = next((row for row in table.rows if row.key == slot), None)
    yield (
        Text(clean(slot)) if row is None else Text(clean(f"{slot}  {row.reason}"), STYLES[row.tone])
    )
    if row is not None:
        facts = zip(table.columns, row.cells, strict=True)
        yield from flowed(
            (
                Cell(text=f"{column.title} {column.unit} {cell.text}", tone=cell.tone)
                for column, cell in facts
                if cell.text != MISSING
            ),
            width,
        )
