"""The lines of each page of `top`: one slot, cards, alerts, nodes, runs, and the lines at the
bottom.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.cells import chop_cells
from rich.text import Text

from orchestrator.config.schema import Severity
from orchestrator.core.slot import slot_state
from orchestrator.errors import ArchiveError
from orchestrator.record import history
from orchestrator.record.archive import Frame, Freshness, StoredEvent, read_events
from orchestrator.record.folders import Listed
from orchestrator.record.history import Buckets, Span
from orchestrator.record.model import FIELDS, STATE_STYLES, Row, Snapshot, rows_by_card
from orchestrator.record.output import last_lines
from orchestrator.view.alerts import Alert
from orchestrator.view.cells import SEPARATOR, clean, clock, flow, shorten
from orchestrator.view.phrases import counted, event_words, time_of_day
from orchestrator.view.table import columns_for
from orchestrator.view.top.view import View

SEVERITY_STYLES: Final[dict[Severity, str]] = {
    "critical": "bold red",
    "warning": "bold yellow",
    "info": "cyan",
}
_MORE_CELLS: Final = len("!  · 99 more")

_COLUMNS = frozenset(
    field.name for field in FIELDS.values() if field.of == "card" and field.column
) - {"card"}

#: What is drawn over time, and how it is called; the last is counted up over the run, and drawn as
#: its growth.
COURSES: Mapping[str, str] = {
    "tflops": "TFLOP/s",
    "allocated_bytes": "allocated",
    "temperature_c": "temp C",
    "power_w": "power W",
    "duty_measured": "duty",
    "loss": "loss",
    "samples_per_s": "samples/s",
    "oom_count": "OOM",
}
_GROWTH = frozenset({"oom_count"})

#: How far back the courses go; the last is the whole run.
RANGES_S: tuple[float | None, ...] = (120.0, 600.0, 3600.0, None)
_LEVELS = "▁▂▃▄▅▆▇█"
_LABEL_CELLS = 11
_EVENTS_MOST = 12
_TEXT_LINES_MOST = 20


def reason_line(row: Row | None, width: int) -> Text:
    """Return why the slot under the cursor is in its state: the table has room for that on wide
    terminals only.
    """
    if row is None or not row.reason:
        return Text()
    said = f"{row.slot} {row.state.value}: {row.reason}"
    return Text(shorten(clean(said), width), STATE_STYLES[row.state])


def alert_line(alerts: Sequence[Alert], width: int) -> Text:
    """Return what is wrong; what has no room is counted."""
    room, shown = max(1, width - _MORE_CELLS), list[str]()
    for alert in alerts:
        if shown and len(SEPARATOR.join([*shown, alert.text])) > room:
            break
        shown.append(alert.text)
    more = [f"{len(alerts) - len(shown)} more"] if len(shown) < len(alerts) else []
    said = shorten(f"! {SEPARATOR.join([*shown, *more])}", width)
    return Text(said, SEVERITY_STYLES[alerts[0].severity])


def key_line(fresh: str | None, view: View, page: str | None, said: str, width: int) -> Text:
    """Return what the picture shows, and what happened last or which keys there are."""
    parts = [] if fresh is None else [fresh]
    order = FIELDS[view.order.key].name if view.order.key else "worst first"
    parts.append(f"by {order}{' reversed' if view.order.reverse else ''}")
    if view.wanted.text:
        parts.append(f"filter {view.wanted.text}")
    if view.marked:
        parts.append(f"{len(view.marked)} marked")
    if page is not None:
        parts.append(f"{page}, esc goes back")
    if said or page is None:
        parts.append(said or "? help  / filter  < > sort  enter slot  q leave")
    return Text(shorten(SEPARATOR.join(map(clean, parts)), width), "dim")


def freshness_words(frame: Frame) -> str:
    """Return how far what is shown is so now."""
    said = frame.freshness.value
    if frame.freshness is Freshness.ENDED:
        said = f"ended, {frame.run.outcome}"
    elif frame.freshness is not Freshness.LIVE:
        said = f"{said} for {clock(frame.late_s)}"
    return said


def slots_words(slots: tuple[str, ...]) -> str:
    """Return which slots are meant: the name of one, the number of several."""
    return slots[0] if len(slots) == 1 else counted(len(slots), "slot")


def card_lines(rows: Iterable[Row], width: int) -> list[Text]:
    """Return a line for each card, or more where it has no room, in the order of
    their first slots.
    """
    lines = []
    for (node, _), of_card in rows_by_card(rows).items():
        said = Text(clean(f"{node}  {of_card[0].gpu_name or 'unknown'}"), "bold")
        segments = [said, Text(counted(len(of_card), "worker"))]
        for column in columns_for(of_card):
            cell = next((cell for row in of_card if (cell := column.cell(row)) is not None), None)
            if column.name in _COLUMNS and cell is not None:
                segments.append(Text.assemble((f"{column.title} {column.unit} ", "dim"), cell))
        lines += flow(segments, width, "   ")
    return lines


def alert_lines(alerts: Iterable[Alert], now_unix_s: float, width: int) -> list[Text]:
    """Return each alert with its subject, what is wrong with it, and what to type."""
    lines = []
    for alert in alerts:
        held = clock(max(0.0, now_unix_s - alert.since_unix_s))
        said = SEPARATOR.join([alert.severity, f"for {held}", alert.subject])
        lines.append(Text(shorten(clean(said), width), SEVERITY_STYLES[alert.severity]))
        for words in (alert.text, alert.what_to_do):
            indented = textwrap.wrap(words, max(20, width - 3))
            lines += [Text(f"   {line}") for line in indented]
    return lines or [Text("nothing is wrong", "dim")]


def node_lines(snapshot: Snapshot | None) -> list[Text]:
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
                (clean(node), "bold"),
                ("  missing" if missing else "  there", "red" if missing else ""),
                f"  {said}",
            )
        )
    return lines or [Text("no nodes yet", "dim")]


def run_lines(runs: Iterable[Listed]) -> list[Text]:
    """Return a line for each run, to choose one."""
    lines = []
    for one in runs:
        extent = (
            ""
            if one.run is None
            else f"  {counted(len(one.run.slots), 'slot')}  {clock(one.run.elapsed_s)}"
        )
        lines.append(Text(clean(f"{one.run_id}  {one.outcome}{extent}")))
    return lines or [Text("no runs", "dim")]


def read_slot_lines(
    folder: Path, row: Row, snapshot: Snapshot, back_s: float | None, width: int
) -> list[Text]:
    """Return the page of a slot from its run folder, over so many seconds before the snapshot, or
    the whole run.
    """
    ends = snapshot.now_unix_s
    begins = ends - back_s if back_s is not None else min(snapshot.started_at, ends - 1.0)
    try:
        parts = max(1, min(width - 40, 200))
        courses = history.buckets(folder, row.slot, tuple(COURSES), begins, ends + 0.5, parts)
        spans = history.state_spans(folder, row.slot)
        events = read_events(folder, slot=row.slot, limit=50)
        printed = last_lines(folder, row.slot)
    except ArchiveError as failure:
        return [Text(clean(str(failure)), "red")]
    shown = f"last {clock(back_s)}" if back_s is not None else "the whole run"
    page = slot_lines(row, courses, spans, events, width)
    if printed:
        page += [
            Text(),
            Text("printed", "bold"),
            *(part for line in printed for part in _folded(line, width)),
        ]
    return [*page[:2], Text(f"courses: {shown} (m)", "dim"), *page[2:]]


def slot_lines(
    row: Row,
    courses: Mapping[str, Buckets],
    spans: Sequence[Span],
    events: Sequence[StoredEvent],
    width: int,
) -> list[Text]:
    """Return the page of a slot."""
    lines = [
        Text.assemble(
            (clean(row.slot), "bold"),
            "  ",
            (row.state.value, STATE_STYLES[row.state]),
            "  ",
            shorten(clean(row.reason), max(10, width - 30)),
        ),
        Text(),
    ]
    for key, course in courses.items():
        line = sparkline(key, course, width)
        if line is not None:
            lines.append(line)
    lines += [Text(), *_facts(row, width)]
    lines += [Text(), Text("states", "bold"), *_states(spans, width)]
    lines += [Text(), Text("events", "bold"), *_events(events, width)]
    return lines


def sparkline(key: str, course: Buckets, width: int) -> Text | None:
    """Return a value over time as one line, with its lowest and highest.

    `None` if nothing was sampled.
    """
    values = _growth(course.high) if key in _GROWTH else course.mean
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    steps = len(_LEVELS) - 1
    drawn = "".join(
        " "
        if value is None
        else _LEVELS[round(steps * (value - low) / (high - low)) if high > low else 0]
        for value in values
    )
    if key not in _GROWTH:
        # A mean of many samples hides the extremes, and these are worth knowing.
        low = min(value for value in course.low if value is not None)
        high = max(value for value in course.high if value is not None)
    ends = f"  {_short(key, low)} to {_short(key, high)}"
    room = max(1, width - _LABEL_CELLS - len(ends))
    return Text.assemble((f"{COURSES[key]:<{_LABEL_CELLS}}", "dim"), (drawn[-room:], "cyan"), ends)


def _growth(totals: Sequence[float | None]) -> list[float | None]:
    """Return by how much a counter grew in each part."""
    grown: list[float | None] = []
    before: float | None = None
    for total in totals:
        grown.append(None if total is None else total - (total if before is None else before))
        before = before if total is None else total
    return grown


def _short(key: str, value: float) -> str:
    if FIELDS[key].unit == "bytes":
        return f"{value / 2**20:.0f} MiB"
    return f"{value:.4g}"


def _facts(row: Row, width: int) -> Iterator[Text]:
    """Yield every column that is known, as many beside each other as fit."""
    cells = [
        (" ".join(filter(None, (column.title, column.unit))).replace("- ", ""), cell)
        for column in columns_for((row,))
        if column.name not in {"slot", "state", "vram_bar"}
        and (cell := column.cell(row)) is not None
    ]
    if not cells:
        return
    label_cells = max(len(label) for label, _ in cells)
    value_cells = max(cell.cell_len for _, cell in cells)
    beside = max(1, (width + 3) // (label_cells + value_cells + 5))
    for at in range(0, len(cells), beside):
        line = Text()
        for label, cell in cells[at : at + beside]:
            line.append(f"{label:<{label_cells}}  ", "dim").append_text(cell)
            line.append(" " * (value_cells - cell.cell_len + 3))
        yield line


def _states(spans: Sequence[Span], width: int) -> Iterator[Text]:
    if not spans:
        yield Text("no change of state is recorded", "dim")
    first_s = spans[0].from_unix_s if spans else 0.0
    for span in spans[-_EVENTS_MOST:]:
        lasted = (
            "" if span.to_unix_s is None else f" for {clock(span.to_unix_s - span.from_unix_s)}"
        )
        cause = shorten(clean(span.cause), max(10, width - 32))
        try:
            style = STATE_STYLES[slot_state(span.state)]
        except ValueError:
            style = ""
        shown = clean(span.state)[:12]
        yield Text.assemble(
            f"+{clock(span.from_unix_s - first_s):>7}  ",
            (f"{shown:<12}", style),
            f"  {cause}{lasted}",
        )


def _events(events: Sequence[StoredEvent], width: int) -> Iterator[Text]:
    if not events:
        yield Text("none yet", "dim")
    for event in events[-_EVENTS_MOST:]:
        yield event_line(event, width)
        traceback = event.details.get("traceback")
        if isinstance(traceback, str):
            for line in traceback.splitlines()[-_TEXT_LINES_MOST:]:
                yield from _folded(f"    {line}", width, "red")


def _folded(line: str, width: int, style: str = "") -> Iterator[Text]:
    """Yield a line of text in as many lines as it needs, with the spaces that it begins with."""
    begins = " " * min(width // 2, len(line) - len(line.lstrip()))
    for part in chop_cells(clean(line), max(10, width - len(begins))) or [""]:
        yield Text(begins + part, style)


def event_line(event: StoredEvent, width: int) -> Text:
    """Return an event in one line."""
    name, details = event_words(event)
    said = f"{event.slot or '':<10}  {name}  {details}"
    return Text.assemble(
        (f"{time_of_day(event.at)[:8]}  ", "dim"),
        shorten(clean(said), max(10, width - 10)),
    )
