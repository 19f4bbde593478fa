"""What the pages of `top` show that no other view has: nodes, events, alerts, all of one slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from rich.text import Text

from orchestrator.core.slot import slot_state
from orchestrator.record import history
from orchestrator.record.archive import Frame, Freshness, StoredEvent, read_events
from orchestrator.record.history import Buckets, Span
from orchestrator.record.model import FIELDS, STATE_STYLES, Row, Snapshot
from orchestrator.record.output import last_lines
from orchestrator.view.alerts import Alert
from orchestrator.view.cells import MISSING, SEPARATOR, clean, clock, flow, shorten
from orchestrator.view.phrases import event_words, time_of_day
from orchestrator.view.table import slots_table
from orchestrator.view.tables import Cell, Column, Table, TableRow, Tone
from orchestrator.view.terminal import STYLES, table_lines
from workers.units import MIB

_MORE_CELLS: Final = len("!  · 99 more")
_EVENTS_MOST: Final = 12
_TEXT_LINES_MOST: Final = 20

#: What is drawn over time, and how it is called; the last is counted up over the run, and drawn as
#: its growth.
COURSES: Final[Mapping[str, str]] = {
    "tflops": "TFLOP/s",
    "allocated_bytes": "allocated",
    "temperature_c": "temp C",
    "power_w": "power W",
    "duty_measured": "duty",
    "loss": "loss",
    "samples_per_s": "samples/s",
    "oom_count": "OOM",
}
_GROWTH: Final = frozenset({"oom_count"})

Courses: TypeAlias = dict[str, tuple[list[float], str]]
"""Key -> what was sampled, the oldest first, and its lowest and highest in words."""

_NODES: Final = (
    Column(key="node", title="node"),
    Column(key="there", title="there"),
    Column(key="slots", title="slots", numeric=True, priority=1),
    Column(key="states", title="states", priority=2),
)
_EVENTS: Final = (
    Column(key="time", title="time"),
    Column(key="slot", title="slot"),
    Column(key="event", title="event"),
    Column(key="details", title="details", priority=1),
)


def nodes_table(snapshot: Snapshot) -> Table:
    """Return the nodes that are planned, there, or have slots; the missing ones first."""
    nodes = {node: Counter[str]() for node in (*snapshot.nodes_planned, *snapshot.nodes_seen)}
    for row in snapshot.rows:
        if row.node:  # a job that never had a process has none
            nodes.setdefault(row.node, Counter())[row.state.value] += 1
    rows = []
    for node, states in sorted(nodes.items(), key=lambda item: item[0] in snapshot.nodes_seen):
        is_there = node in snapshot.nodes_seen
        there = Cell(
            text="there" if is_there else "missing",
            tone=Tone.PLAIN if is_there else Tone.BAD,
            value="there" if is_there else "missing",
        )
        words = ", ".join(f"{count} {state}" for state, count in states.items()) or MISSING
        slots = Cell(text=str(states.total()), value=states.total())
        cells = (Cell(text=clean(node), value=node), there, slots, Cell(text=words, value=words))
        rows.append(TableRow(key=node, cells=cells))
    return Table(name="nodes", columns=_NODES, rows=tuple(rows))


def events_table(events: Sequence[StoredEvent]) -> Table:
    """Return events, the newest first."""
    rows = []
    for event in reversed(events):
        name, details = event_words(event)
        texts = (time_of_day(event.at)[:8], event.slot or "", name, details)
        cells = tuple(Cell(text=clean(text) or MISSING, value=text or None) for text in texts)
        rows.append(TableRow(key=str(event.number), cells=cells))
    return Table(name="events", columns=_EVENTS, rows=tuple(rows))


def alert_line(alerts: Sequence[Alert], width: int) -> Text:
    """Return what is wrong; what has no room is counted."""
    room, shown = max(1, width - _MORE_CELLS), list[str]()
    for alert in alerts:
        if shown and len(SEPARATOR.join([*shown, alert.text])) > room:
            break
        shown.append(alert.text)
    more = [f"{len(alerts) - len(shown)} more"] if len(shown) < len(alerts) else []
    said = shorten(f"! {SEPARATOR.join([*shown, *more])}", width)
    return Text(said, STYLES[alerts[0].tone])


def alert_lines(alerts: Iterable[Alert], now_unix_s: float) -> list[Text]:
    """Return what is wrong: each alert with what to type."""
    lines = []
    for alert in alerts:
        held = clock(max(0.0, now_unix_s - alert.since_unix_s))
        lines += [
            Text(
                f"{alert.severity}{SEPARATOR}for {held}{SEPARATOR}{alert.text}", STYLES[alert.tone]
            ),
            Text(f"   {alert.what_to_do}"),
        ]
    return lines or [Text("no alert fires", "dim")]


def freshness_words(frame: Frame) -> str:
    """Return how far what is shown is so now."""
    if frame.freshness is Freshness.ENDED:
        return f"ended, {frame.run.outcome}"
    is_live = frame.freshness is Freshness.LIVE
    return frame.freshness.value + ("" if is_live else f" for {clock(frame.late_s)}")


def courses_of(folder: Path, row: Row, snapshot: Snapshot, back_s: float | None) -> Courses:
    """Return the values of a slot over so many seconds, or over the whole run; see `COURSES`.

    Raises:
        ArchiveError: The run folder cannot be read.
    """
    ends_s = snapshot.now_unix_s
    begins_s = ends_s - back_s if back_s is not None else min(snapshot.started_at, ends_s - 1.0)
    found = history.buckets(folder, row.slot, tuple(COURSES), begins_s, ends_s + 0.5, 100)
    return {key: _course(key, course) for key, course in found.items()}


def _course(key: str, course: Buckets) -> tuple[list[float], str]:
    values = _growth(course.high) if key in _GROWTH else course.mean
    known = [value for value in values if value is not None]
    # A mean of many samples hides the extremes, and these are worth knowing.
    lows, highs = (values, values) if key in _GROWTH else (course.low, course.high)
    low, high = (
        pick((value for value in ends if value is not None), default=0.0)
        for pick, ends in ((min, lows), (max, highs))
    )
    return known, f"{_short(key, low)} to {_short(key, high)}"


def _growth(totals: Sequence[float | None]) -> list[float | None]:
    """Return by how much a counter grew in each part."""
    grown: list[float | None] = []
    before: float | None = None
    for total in totals:
        grown.append(None if total is None else total - (total if before is None else before))
        before = before if total is None else total
    return grown


def _short(key: str, value: float) -> str:
    is_bytes = FIELDS[key].unit == "bytes"
    return f"{value / MIB:.0f} MiB" if is_bytes else f"{value:.4g}"


def slot_lines(folder: Path, row: Row, width: int) -> list[Text]:
    """Return the page of a slot: facts, states, events, errors, and what it printed.

    Raises:
        ArchiveError: The run folder cannot be read.
    """
    events = read_events(folder, slot=row.slot, limit=50)
    errors = [event.details.get("traceback") for event in events if event.event == "workload_error"]
    parts = {
        "states": list(_states(history.state_spans(folder, row.slot))),
        "events": table_lines(events_table(events[-_EVENTS_MOST:]), width),
        "last error": [
            Text(_harmless(line), "red")
            for line in str(errors[-1] if errors else "").splitlines()[-_TEXT_LINES_MOST:]
        ],
        "printed": [Text(_harmless(line)) for line in last_lines(folder, row.slot)],
    }
    lines = [*flow(_facts(row), width, "   ")]
    for title, part in parts.items():
        lines += [Text(), Text(title, "bold"), *part] if part else []
    return lines


def _harmless(line: str) -> str:
    """Return a line of text without control characters, with the spaces that it begins with."""
    return " " * (len(line) - len(line.lstrip(" "))) + clean(line)


def _facts(row: Row) -> Iterator[Text]:
    """Yield every column that is known."""
    table = slots_table((row,))
    for column, cell in zip(table.columns, table.rows[0].cells, strict=True):
        if cell.text != MISSING:
            label = f"{column.title} {column.unit}".strip()
            yield Text.assemble((f"{label} ", "dim"), (cell.text, STYLES[cell.tone]))


def _states(spans: Sequence[Span]) -> Iterator[Text]:
    first_s = spans[0].from_unix_s if spans else 0.0
    for span in spans[-_EVENTS_MOST:]:
        ends_s = span.to_unix_s
        lasted = "" if ends_s is None else f" for {clock(ends_s - span.from_unix_s)}"
        try:
            style = STATE_STYLES[slot_state(span.state)]
        except ValueError:
            style = ""
        yield Text.assemble(
            f"+{clock(span.from_unix_s - first_s):>7}  ",
            (f"{clean(span.state)[:12]:<12}", style),
            f"  {clean(span.cause)}{lasted}",
        )
