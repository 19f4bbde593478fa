"""What pages of `top` show that no other view has: nodes, events, alerts, all of one slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from rich.text import Text

from orchestrator.core.slot import slot_state
from orchestrator.record import history
from orchestrator.record.archive import StoredEvent, read_events
from orchestrator.record.history import Buckets, Span
from orchestrator.record.model import FIELDS, Row, Snapshot
from orchestrator.record.output import last_lines
from orchestrator.view.alerts import Alert
from orchestrator.view.cells import MISSING, clean, clock
from orchestrator.view.health import flowed
from orchestrator.view.phrases import event_words, time_of_day
from orchestrator.view.slots import STATE_TONES, slots_table
from orchestrator.view.tables import Cell, Column, Table, Tone, row_of
from orchestrator.view.terminal import STYLES, table_lines
from workers.units import MIB

_EVENTS_MOST: Final = 12
_TEXT_LINES_MOST: Final = 20

#: What is drawn over time, and how it is called.
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
Courses: TypeAlias = Mapping[str, tuple[Sequence[float], str]]
"""Key -> what was sampled, the oldest first, and its lowest and highest in words."""

_NODES: Final = (
    Column(key="node", title="node"),
    Column(key="is", title="is"),
    Column(key="slots", title="slots", numeric=True),
    Column(key="states", title="states", priority=1),
)
_EVENTS: Final = (
    Column(key="time", title="time"),
    Column(key="slot", title="slot"),
    Column(key="event", title="event"),
    Column(key="details", title="details"),
)
_ALERTS: Final = (
    Column(key="severity", title="severity"),
    Column(key="for", title="for", numeric=True),
    Column(key="text", title="what is wrong; below, what to do"),
)


def nodes_table(snapshot: Snapshot) -> Table:
    """Return the nodes that are planned, there, or have slots; the missing ones first."""
    nodes = {node: Counter[str]() for node in (*snapshot.nodes_planned, *snapshot.nodes_seen)}
    for row in snapshot.rows:
        if row.node:  # a job that has had no process is nowhere
            nodes.setdefault(row.node, Counter())[row.state.value] += 1
    rows = []
    for node, states in sorted(nodes.items(), key=lambda item: item[0] in snapshot.nodes_seen):
        is_there = node in snapshot.nodes_seen
        values = {
            "node": node,
            "is": "there" if is_there else "missing",
            "slots": states.total(),
            "states": ", ".join(f"{count} {state}" for state, count in states.items()),
        }
        rows.append(row_of(_NODES, node, values, tones={} if is_there else {"is": Tone.BAD}))
    return Table(name="nodes", columns=_NODES, rows=tuple(rows))


def events_table(events: Sequence[StoredEvent]) -> Table:
    """Return events, the newest first."""
    rows = []
    for event in reversed(events):
        name, details = event_words(event)
        at = time_of_day(event.at)[:8]
        values = {"time": at, "slot": event.slot, "event": name, "details": details}
        rows.append(row_of(_EVENTS, str(event.number), values))
    return Table(name="events", columns=_EVENTS, rows=tuple(rows))


def alerts_table(alerts: Sequence[Alert], now_unix_s: float) -> Table:
    """Return what is wrong; the reason of a row is what to do."""
    rows = []
    for alert in alerts:
        held_s = max(0.0, now_unix_s - alert.since_unix_s)
        values = {"severity": alert.severity, "for": held_s, "text": alert.text}
        rows.append(
            row_of(
                _ALERTS,
                alert.subject,
                values,
                {"for": clock(held_s)},
                {"severity": alert.tone},
                reason=alert.what_to_do,
            )
        )
    return Table(name="alerts", columns=_ALERTS, rows=tuple(rows))


def _course(key: str, course: Buckets) -> tuple[Sequence[float], str]:
    # A mean of many samples hides the extremes, and these are worth knowing.
    low, mean, high = (
        [value for value in values if value is not None]
        for values in (course.low, course.mean, course.high)
    )
    times, unit = (1 / MIB, " MiB") if FIELDS[key].unit == "bytes" else (1.0, "")
    return mean, f"{min(low) * times:.4g} to {max(high) * times:.4g}{unit}" if mean else ""


def slot_page(
    folder: Path, row: Row, snapshot: Snapshot, back_s: float | None, width: int
) -> tuple[Text, Courses, list[Text]]:
    """Return all that is known of a slot: a title, its courses over so many seconds or the whole
    run, and lines: facts, states, events, its last error, what it printed.

    Raises:
        ArchiveError: The run folder cannot be read.
    """
    slot, ends_s = row.slot, snapshot.now_unix_s
    begins_s = min(snapshot.started_at, ends_s - 1.0) if back_s is None else ends_s - back_s
    sampled = history.buckets(folder, slot, tuple(COURSES), begins_s, ends_s + 0.5, 100)
    events = read_events(folder, slot=slot, limit=50)
    errors = [event.details["traceback"] for event in events if "traceback" in event.details]
    error = str(errors[-1]).splitlines()[-_TEXT_LINES_MOST:] if errors else ()
    parts = {
        "states": _states(history.state_spans(folder, slot)),
        "events": table_lines(events_table(events[-_EVENTS_MOST:]), width),
        "last error": (Text(_harmless(line), "red") for line in error),
        "printed": (Text(_harmless(line)) for line in last_lines(folder, slot)),
    }
    lines = flowed(_facts(row, snapshot), width)
    for title, part in parts.items():
        if shown := list(part):
            lines += [Text(), Text(title, "bold"), *shown]
    said = Text(clean(f"{slot}  {row.state.value}  {row.reason}"), STYLES[STATE_TONES[row.state]])
    return said, {key: _course(key, course) for key, course in sampled.items()}, lines


def _facts(row: Row, snapshot: Snapshot) -> Iterator[Cell]:
    table = slots_table(snapshot)
    (shown,) = (each for each in table.rows if each.key == row.slot)
    for column, cell in zip(table.columns, shown.cells, strict=True):
        if cell.text != MISSING:
            yield Cell(text=f"{column.title} {column.unit} {cell.text}", tone=cell.tone)


def _harmless(line: str) -> str:
    """Return a line of text without control characters, with the spaces that it begins with."""
    return " " * (len(line) - len(line.lstrip(" "))) + clean(line)


def _states(spans: Sequence[Span]) -> Iterator[Text]:
    for span in spans[-_EVENTS_MOST:]:
        ends_s = span.to_unix_s
        lasted = "" if ends_s is None else f" for {clock(ends_s - span.from_unix_s)}"
        try:
            style = STYLES[STATE_TONES[slot_state(span.state)]]
        except ValueError:
            style = ""
        state = f"{clean(span.state)[:12]:<12}"
        at = f"+{clock(span.from_unix_s - spans[0].from_unix_s):>7}  "
        yield Text.assemble(at, (state, style), f"  {clean(span.cause)}{lasted}")
