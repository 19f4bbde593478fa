"""What the page shows, as values for JSON: cells, words and colours are made here, so that the page
has no units.

Pure. The same shapes are served and streamed (`server.py`), and frozen into a file. A
cell is its text, or its text and a tone (`TONES`). Does not read the run folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

from rich.text import Text

from orchestrator.config.schema import Severity
from orchestrator.record.archive import Frame, Freshness, StoredEvent
from orchestrator.record.history import SAMPLED_NUMBERS, Buckets, Span
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import FIELDS, STATE_STYLES, Row, finite, rows_by_card, trouble
from orchestrator.record.query import Filter, Order, order_of, parse, select
from orchestrator.record.summary import SCHEMA
from orchestrator.view.alerts import Alert
from orchestrator.view.cells import MISSING, clean, clock, shorten
from orchestrator.view.jobs import jobs_table, summary_line
from orchestrator.view.phrases import (
    counted,
    event_words,
    tflops_words,
    time_of_day,
    time_words,
    totals,
)
from orchestrator.view.table import TableColumn, columns_for, kept_longest_first
from orchestrator.view.tables import Tone
from workers.messages import WorkerState
from workers.units import MIB

Cell: TypeAlias = str | tuple[str, str]
Json: TypeAlias = dict[str, Any]

#: Styles of the terminal -> classes of the page's style sheet. Colour only repeats what the words
#: say.
TONES: Final[Mapping[str, str]] = {
    "bold red": "bad", "red": "bad", "magenta": "odd", "bold yellow": "warn", "yellow": "warn",
    "cyan": "info",
    "green": "good", "bold green": "good", "dim": "dim",
}  # fmt: skip

_STATE_TONES: Final = {state.value: TONES[style] for state, style in STATE_STYLES.items()}
_SEVERITY_TONES: Final[Mapping[Severity, str]] = {
    "critical": "bad",
    "warning": "warn",
    "info": "info",
}
OUTCOME_TONES: Final = {"good": "good", "degraded": "warn", "interrupted": "warn", "failed": "bad"}
_QUIET_STATES: Final = frozenset({WorkerState.RUNNING, WorkerState.DONE, WorkerState.STOPPED})
_CARD_COLUMNS: Final = (
    "card_memory", "utilisation", "temperature", "memory_temperature", "power", "clock", "throttle",
)  # fmt: skip
#: Drawn before any other, as far as something was sampled.
CHARTED: Final = (
    "tflops",
    "allocated_bytes",
    "temperature_c",
    "power_w",
    "duty_measured",
    "oom_count",
)
_TEXT_MOST: Final = 400
_TOTALS: Final = {
    "tflops": "TFLOP/s of all slots",
    "allocated_bytes": "allocated by all slots, MiB",
    "oom_count": "out of memory, all slots",
    "temperature_c": "hottest temperature, C",
    "samples_per_s": "samples a second of all slots",
}
#: Widths of the page from which on the next columns are shown, the least important last: names of
#: style classes.
_WIDTHS: Final = ((4, "always"), (8, "small"), (14, "medium"), (18, "large"))

_UNITS: Final = {"bytes": ("MiB", 1 / MIB), "ratio": ("%", 100.0)}


@dataclass(frozen=True, slots=True)
class TableView:
    """Which rows of the table one page looks at."""

    filter: str = ""
    order: Order = Order()  # noqa: RUF009 - frozen
    offset: int = 0
    limit: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The table of one view at one moment."""

    head: Json
    columns: tuple[Json, ...]
    rows: Mapping[str, tuple[Cell, ...]]
    """Cells by slot, in the order of the view."""
    total: int
    matched: int

    def to_dict(self) -> Json:
        """Return all of it."""
        rows = [{"slot": slot, "cells": cells} for slot, cells in self.rows.items()]
        return {"head": self.head, "columns": self.columns, "rows": rows, **self._counts()}

    def changes(self, before: Table) -> Json | None:
        """Return what is different from a table before; `None` where only all of it will do."""
        if self.columns != before.columns:
            return None
        update: Json = {
            "head": {
                key: value for key, value in self.head.items() if before.head.get(key) != value
            }
        }
        if self._counts() != before._counts():
            update |= self._counts()
        if tuple(self.rows) != tuple(before.rows):
            update["order"] = tuple(self.rows)
        changed = {}
        for slot, cells in self.rows.items():
            known = before.rows.get(slot)
            if known is None:
                changed[slot] = dict(enumerate(cells))
            elif known != cells:
                changed[slot] = {at: cell for at, cell in enumerate(cells) if known[at] != cell}
        return update | ({"rows": changed} if changed else {})

    def _counts(self) -> Json:
        return {"total": self.total, "matched": self.matched}


def table_of(
    frame: Frame, view: TableView, firing: Sequence[Alert] = (), *, with_control: bool = False
) -> Table:
    """Return the table of one view; `QueryError` where its filter makes no sense."""
    rows = frame.snapshot.rows
    matching = select(rows, parse(view.filter), view.order)
    columns = columns_for(rows)
    shown = matching[view.offset : view.offset + view.limit]
    return Table(
        head=head_of(frame, firing, with_control=with_control),
        columns=_column_list(columns, rows),
        rows={row.slot: row_cells(row, columns) for row in shown},
        total=len(rows),
        matched=len(matching),
    )


def frozen_table(frame: Frame) -> Json:
    """Return the whole table for a page without a server, and for each column the order of its
    rows.

    `known` of them have a value: the others stay last when the order is turned round.
    """
    rows = frame.snapshot.rows
    table = table_of(frame, TableView(limit=len(rows)))
    places = {slot: place for place, slot in enumerate(table.rows)}
    orders = {}
    for column in table.columns:
        order = order_of(column["name"])
        known = sum(FIELDS[order.key or "slot"].value(row) is not None for row in rows)
        orders[column["name"]] = {
            "rows": [places[row.slot] for row in select(rows, Filter(), order)],
            "known": known,
        }
    return {"table": table.to_dict(), "orders": orders}


def row_cells(row: Row, columns: Sequence[TableColumn]) -> tuple[Cell, ...]:
    """Return the cells of a slot, then its reason.

    With a tone where the reason is worth a line of its own.
    """
    reason = clean(row.reason)
    is_quiet = row.state in _QUIET_STATES
    loud = reason and (not is_quiet or trouble(row))
    tone = "bad" if is_quiet else _STATE_TONES[row.state.value]
    return (*(_cell(column.cell(row)) for column in columns), (reason, tone) if loud else reason)


def head_of(frame: Frame, firing: Sequence[Alert] = (), *, with_control: bool = False) -> Json:
    """Return what stands above the table."""
    run, snapshot = frame.run, frame.snapshot
    seen, planned = len(snapshot.nodes_seen), len(snapshot.nodes_planned)
    share = min(1.0, snapshot.elapsed_s / snapshot.duration_s) if snapshot.duration_s > 0 else 1.0
    notices = [*snapshot.notices, *([run.error] if run.error else [])]
    return {
        "run": clean(snapshot.run_id),
        "mode": clean(run.facts.mode),
        "mark": _mark(frame),
        "nodes": (f"nodes {seen}/{planned}", "" if seen >= planned else "bad"),
        "states": [
            (state.value, TONES[STATE_STYLES[state]], count)
            for state, count in snapshot.state_counts.items()
        ],
        "tflops": tflops_words(snapshot.tflops_total),
        "time": time_words(snapshot),
        "jobs": snapshot.jobs,
        "share": round(share, 3),
        "left": f"{clock(snapshot.remaining_s)} left"
        if run.outcome == "running" and snapshot.jobs is None
        else "",
        "totals": list(totals(snapshot)),
        "notices": [clean(notice) for notice in notices],
        "alerts": [
            {
                "words": (alert.text, alert.tone.value),
                "subjects": [alert.subject],
                "what_to_do": alert.what_to_do,
            }
            for alert in firing
        ],
        "control": with_control and run.outcome == "running",
    }


def cards_of(frame: Frame) -> Json:
    """Return the cards with what their sensors say, a line for each."""
    columns = {column.name: column for column in columns_for(frame.snapshot.rows)}
    lines = []
    for (node, _), workers in rows_by_card(frame.snapshot.rows).items():
        # A worker that has ended says nothing of the card: the one that says most is asked.
        best = max(
            workers, key=lambda row: sum(FIELDS[key].value(row) is not None for key in FIELDS)
        )
        flops = [known for row in workers if (known := finite(row.tflops)) is not None]
        lines.append(
            (
                clean(node),
                _cell(columns["card"].cell(best)),
                counted(len(workers), "worker"),
                tflops_words(sum(flops) if flops else None),
                *(_cell(columns[name].cell(best)) for name in _CARD_COLUMNS),
            )
        )
    titles = [
        "node",
        "card",
        "workers",
        "sum",
        *(_heading(columns[name]) for name in _CARD_COLUMNS),
    ]
    return {"titles": titles, "rows": lines}


def jobs_of(queue: QueueSnapshot | None, *, with_control: bool = False) -> Json:
    """Return the jobs of a queue, a line for each with its name; no line where there is none."""
    if queue is None:
        return {"line": None, "titles": (), "rows": (), "control": False}
    table = jobs_table(queue)
    rows = [
        (row.key, (*((cell.text, _tone(cell.tone)) for cell in row.cells), row.reason or MISSING))
        for row in table.rows
    ]
    titles = (*(column.title for column in table.columns), "why")
    line = summary_line(queue)
    return {"line": line, "titles": titles, "rows": rows, "control": with_control}


def _tone(tone: Tone) -> str:
    return {Tone.PLAIN: "", Tone.NOTE: "info"}.get(tone, tone.value)


def slot_of(
    frame: Frame,
    name: str,
    spans: Sequence[Span],
    events: Sequence[StoredEvent],
    printed: Sequence[str],
) -> Json | None:
    """Return all that is known of one slot, with the lines it printed.

    `None` where there is no such slot.
    """
    row = next((row for row in frame.snapshot.rows if row.slot == name), None)
    if row is None:
        return None
    columns = columns_for(frame.snapshot.rows)
    facts = [(_heading(column), _cell(column.cell(row))) for column in columns]
    more = [("node", row.node), ("policy", row.policy), ("card's name", row.gpu_uuid)]
    ends_unix_s = frame.snapshot.now_unix_s
    errors = [event.details.get("traceback") for event in events if event.event == "workload_error"]
    return {
        "slot": name,
        "state": (row.state.value, _STATE_TONES[row.state.value]),
        "reason": clean(row.reason),
        "facts": [fact for fact in facts if fact[1] != MISSING]
        + [(label, clean(text)) for label, text in more if text],
        "row": row.to_dict(),
        "fields": [(key, field_label(key)) for key in SAMPLED_NUMBERS],
        "charts": [key for key in CHARTED if FIELDS[key].value(row) is not None],
        "spans": [_span(span, ends_unix_s) for span in spans],
        "utc_offset_s": offset_s(ends_unix_s),
        "events": [event_of(event) for event in events],
        "traceback": str(errors[-1]) if errors else None,
        "printed": "\n".join(printed),
    }


def history_of(key: str, course: Buckets) -> Json:
    """Return sampled values over time, in the unit that `label` names."""
    _, times = _UNITS.get(FIELDS[key].unit, ("", 1.0))

    def scaled(values: Iterable[float | None]) -> list[float | None]:
        return [None if value is None else float(f"{value * times:.5g}") for value in values]

    return {
        "field": key,
        "label": field_label(key),
        "t": [round(at, 2) for at in course.at_unix_s],
        "min": scaled(course.low),
        "mean": scaled(course.mean),
        "max": scaled(course.high),
    }


def totals_of(courses: Mapping[str, Buckets]) -> list[Json]:
    """Return the charts of all slots together, without those of which nothing is known."""
    drawn = [
        {**history_of(key, course), "label": _TOTALS.get(key, field_label(key))}
        for key, course in courses.items()
    ]
    return [chart for chart in drawn if any(value is not None for value in chart["mean"])]


def event_of(event: StoredEvent) -> Json:
    """Return one event as a line."""
    name, text = event_words(event)
    tone = _STATE_TONES.get(
        str(event.details.get("to_state")), "bad" if event.event == "workload_error" else ""
    )
    return {
        "number": event.number,
        "at_unix_s": event.at_unix_s,
        "time": clean(time_of_day(event.at)),
        "slot": None if event.slot is None else clean(event.slot),
        "event": clean(event.event).replace("_", " "),
        "words": clean(name),
        "text": shorten(clean(text), _TEXT_MOST),
        "tone": tone,
    }


def run_of(frame: Frame) -> Json:
    """Return the run as a whole, for programs and for the page."""
    run, snapshot = frame.run, frame.snapshot
    return {
        "schema": SCHEMA,
        "frame": frame.number,
        "freshness": frame.freshness.value,
        "late_s": round(frame.late_s, 1),
        "run_id": snapshot.run_id,
        "mode": run.facts.mode,
        "outcome": run.outcome,
        "exit_code": run.exit_code,
        "error": run.error,
        "started_at_unix_s": run.facts.started_at_unix_s,
        "updated_at_unix_s": run.updated_at_unix_s,
        "elapsed_s": run.elapsed_s,
        "duration_s": run.facts.duration_s,
        "nodes_planned": snapshot.nodes_planned,
        "nodes_seen": snapshot.nodes_seen,
        "states": {state.value: count for state, count in snapshot.state_counts.items()},
        "tflops_total": snapshot.tflops_total,
        "restart_count": snapshot.restart_count,
        "steps_lost_upper_bound": snapshot.steps_lost_upper_bound,
        "notices": snapshot.notices,
        "cards": cards_of(frame),
    }


def _mark(frame: Frame) -> tuple[str, str]:
    if frame.freshness is Freshness.ENDED:
        return f"ended: {frame.run.outcome}", OUTCOME_TONES.get(frame.run.outcome, "dim")
    if frame.freshness is Freshness.LATE:
        return (
            f"late {clock(frame.late_s)}" if frame.late_s >= 60 else f"late {frame.late_s:.0f} s",
            "warn",
        )
    return frame.freshness.value, "good" if frame.freshness is Freshness.LIVE else "bad"


def _column_list(columns: Sequence[TableColumn], rows: Sequence[Row]) -> tuple[Json, ...]:
    rank = {name: place for place, name in enumerate(kept_longest_first(rows))} | {"oom": 0}

    def width_of(name: str) -> str:
        return next((width for most, width in _WIDTHS if rank.get(name, most) < most), "huge")

    shown = [
        {
            "name": column.name,
            "title": [column.title, column.unit],
            "words": column.is_words,
            "width": width_of(column.name),
        }
        for column in columns
    ]
    return (*shown, {"name": "reason", "title": ["reason", ""], "words": True, "width": "reason"})


def _cell(text: Text | None) -> Cell:
    if text is None:
        return MISSING
    tone = TONES.get(str(text.style))
    return text.plain if tone is None else (text.plain, tone)


def _heading(column: TableColumn) -> str:
    return f"{column.title} {column.unit}".strip()


def field_label(key: str) -> str:
    """Return how a chart names what it shows, with the unit."""
    unit = FIELDS[key].unit
    shown, _ = _UNITS.get(unit, (unit, 1.0))
    name = (
        key.removesuffix(f"_{unit}")
        .removesuffix("_pct")
        .removesuffix("_mhz")
        .removesuffix("_c")
        .removesuffix("_w")
    )
    name = {"tflops": "TFLOP/s", "oom_count": "OOM"}.get(key, name.replace("_", " "))
    return f"{name}, {shown}" if shown else name


def _span(span: Span, ends_unix_s: float) -> Json:
    ends = ends_unix_s if span.to_unix_s is None else span.to_unix_s
    return {
        "from": span.from_unix_s,
        "to": ends,
        "state": (clean(span.state), _STATE_TONES.get(span.state, "dim")),
        "time": datetime.fromtimestamp(span.from_unix_s).astimezone().strftime("%H:%M:%S"),
        "lasted": clock(ends - span.from_unix_s),
        "cause": clean(span.cause),
    }


def offset_s(at_unix_s: float) -> float:
    """Return how far the clock of this machine's time zone is ahead of UTC."""
    offset = datetime.fromtimestamp(at_unix_s).astimezone().utcoffset()
    return 0.0 if offset is None else offset.total_seconds()
