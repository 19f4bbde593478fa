"""The health table: a snapshot and a width in, lines of text out.

Pure: no I/O, no clock, no state. Does not cover redrawing (`live`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from rich.cells import cell_len
from rich.console import Group
from rich.text import Span, Text

from orchestrator.record.model import (
    FIELDS,
    LOW_SUCCESS_RATE,
    STATE_STYLES,
    Brief,
    Column,
    Field,
    Row,
    Snapshot,
    finite,
    trouble,
    worst_first,
)
from orchestrator.view import cells
from orchestrator.view.cells import (
    BRANCH,
    ELLIPSIS,
    MISSING,
    RULE,
    SEPARATOR,
    bar,
    clean,
    clock,
    flow,
    joined,
    number,
    share_pct,
    shorten,
    whole,
)
from orchestrator.view.phrases import tflops_words, time_words, totals
from workers.messages import WorkerState
from workers.units import GIB, MIB

_LONGEST_ETA_S = 9_999 * 3600.0

#: How many columns a narrow terminal never drops.
NEVER_DROPPED = 4

#: What says little of a slot that trains.
_LAST_IN_TRAINING = frozenset({"size", "tflops"})

Cell: TypeAlias = Callable[[Row], Text | None]

#: Of counters that are worth a look once they are above 0.
_STYLES: Final = {"oom": "yellow", "restarts": "magenta"}
_GAP_CELLS = 2
_REASON_CELLS = 32
"""A reason gets a column of its own when there is room for so much of it, else a line under its
row.
"""
_SLOT_CELLS = 6
_PROGRESS_CELLS = 16
_ROWS_BEFORE_SUMS = 8
"""The line of sums goes when the terminal has room for fewer lines of rows than that."""
_REASONS_OF_ROOM = 4
"""Where not all rows fit, every fourth line may be a reason: the worst rows are of no use without
theirs.
"""

#: Tells users what the table cannot show: GDDR6X gets hot long before the die does.
_HIDDEN_TEMPERATURE = "VRAM temperature: not reported by GeForce"

#: In these states a reason is only worth a line of its own when the row is in trouble nevertheless.
_QUIET_STATES = frozenset({WorkerState.RUNNING, WorkerState.DONE, WorkerState.STOPPED})


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column: two lines of heading and what it shows of a row (`None` when unknown)."""

    name: str
    title: str
    unit: str
    cell: Cell
    is_words: bool = False
    """Words are aligned to the left, numbers to the right."""


def _declared(rows: Iterable[Row]) -> list[tuple[Field, Column]]:
    """Return the columns of these rows, and `reason`; those of a training stand
    behind the state.
    """
    is_training = any(row.progress.train_step is not None for row in rows)
    shown = [(field, field.column) for field in FIELDS.values() if field.column is not None]
    own = [pair for pair in shown if pair[0].part != "progress"]
    if not is_training:
        return own
    place = 1 + [column.name for _, column in own].index("state")
    return [*own[:place], *(pair for pair in shown if pair not in own), *own[place:]]


def kept_longest_first(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the names of the columns of these rows, and `reason`, the most important first."""
    columns = [column for _, column in _declared(rows)]
    trains = len(columns) != len(_declared(()))
    columns.sort(key=lambda column: (trains and column.name in _LAST_IN_TRAINING, column.keep))
    return tuple(column.name for column in columns)


def columns_for(rows: Sequence[Row]) -> tuple[TableColumn, ...]:
    """Return all columns in the order they are shown, with units and decimals for these rows."""
    largest_cap = max((row.cap_bytes or row.budget_bytes or 0 for row in rows), default=0)
    # A rehearsal's caps are a sixteenth of the real ones: in GiB they would all read 0.2.
    unit, unit_bytes = ("GiB", GIB) if largest_cap >= GIB or not largest_cap else ("MiB", MIB)
    special: dict[str, Cell] = {
        "state": lambda row: Text(row.state.value, STATE_STYLES[row.state]),
        "card": lambda row: _words(_card(row), 16),
        "vram_bar": _bar,
        "success": _success,
        "verify": _verify,
        "heartbeat": _heartbeat,
        "micro": _micro,
        "eta": _eta,
    }

    def made(field: Field, column: Column) -> TableColumn:
        title, cell = column.title, special.get(column.name)
        if column.name == "vram":
            title = f"{unit} {title}"
        if cell is None and column.cells is not None:
            longest = column.cells
            cell = lambda row: _words(row.value(field.key), longest)  # noqa: E731
        return TableColumn(
            name=column.name,
            title=title,
            unit=column.unit,
            cell=cell or _figures(field, column, rows, unit_bytes, largest_cap),
            is_words=column.cells is not None,
        )

    return tuple(made(*pair) for pair in _declared(rows) if pair[1].name != "reason")


def _figures(
    field: Field,
    column: Column,
    rows: Sequence[Row],
    unit_bytes: int,
    largest_cap: int,
) -> Cell:
    """Return the cell of some numbers with slashes between them."""
    keys = column.shows or (field.key,)
    times, decimals, style = 1.0, 0, _STYLES.get(column.name, "")
    if column.digits:
        values = [row.value(key) for row in rows for key in keys]
        decimals = cells.decimals_for(values, significant=column.digits)
    elif field.unit == "ratio":
        times = 100.0
    elif field.unit == "bytes" and field.of == "card":
        times, decimals = 1 / GIB, 1
    elif field.unit == "bytes":
        times = 1 / unit_bytes
        if unit_bytes == GIB:
            decimals = cells.decimals_for((largest_cap / GIB,), significant=3)

    def shown(value: int | float | None) -> str | None:
        if isinstance(value, int) and times == 1.0:
            return whole(value)
        # A whole number of any length would not become a float.
        known = min(value, 2**80) if isinstance(value, int) else value
        return None if known is None else number(known * times, decimals)

    def cell(row: Row) -> Text | None:
        values = [row.value(key) for key in keys]
        text = joined(map(shown, values), MISSING)
        return None if text is None else Text(text, style if any(values) else "")

    return cell


def _words(value: str | None, longest: int) -> Text | None:
    return Text(shorten(clean(value), longest)) if value else None


def _card(row: Row) -> str | None:
    # "NVIDIA GeForce RTX 3090" -> "RTX 3090": the maker's name is the same on every line.
    return (row.gpu_name or "").removeprefix("NVIDIA ").removeprefix("GeForce ") or row.device


def _bar(row: Row) -> Text | None:
    if row.allocated_bytes is None or row.reserved_bytes is None or not row.cap_bytes:
        return None
    # min() first: two huge whole numbers cannot be divided as floats.
    full, part = (
        min(held, row.cap_bytes) / row.cap_bytes
        for held in (row.allocated_bytes, row.reserved_bytes)
    )
    return Text(bar(full=full, part=part, width=10), "cyan")


def _success(row: Row) -> Text | None:
    rate = row.counts.success_rate
    return _text(share_pct(rate), "red" if rate is not None and rate < LOW_SUCCESS_RATE else "")


def _verify(row: Row) -> Text | None:
    counts = row.counts
    if not counts.verify_checks and not counts.verify_errors:
        return None  # a workload that checks nothing has not passed any check
    noted = f"{whole(counts.verify_checks)}/{whole(counts.verify_errors)}"
    return Text(noted, "bold red" if counts.verify_errors else "")


def _heartbeat(row: Row) -> Text | None:
    age_s = finite(row.heartbeat_age_s)
    return _text(number(age_s, 0 if age_s is not None and age_s >= 10 else 1))


def _micro(row: Row) -> Text | None:
    parts = (whole(row.progress.micro_batch), whole(row.progress.accumulation))
    return _text(None if None in parts else "x".join(map(str, parts)))


def _eta(row: Row) -> Text | None:
    seconds = finite(row.progress.eta_s)
    return _text(None if seconds is None else cells.clock(min(seconds, _LONGEST_ETA_S)))


def _text(value: str | None, style: str = "") -> Text | None:
    return None if value is None else Text(value, style)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    columns: tuple[TableColumn, ...]
    widths: dict[str, int]
    reason_cells: int | None
    """Width of the reason's column; `None` puts reasons on lines of their own."""
    total_cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """The line of a row, and what the line under it says; no reason where it says nothing."""

    line: Text
    reason: str
    style: str


def health_table(snapshot: Snapshot, width: int, height: int | None = None) -> Group:
    """Return the health table, worst slot first.

    Columns are left out, the least important first, until a line has `width` cells. The best rows
    are summed up in a last line where not all fit into `height` lines; `None` shows all of them.
    Rows go before reasons.
    """
    notices = _notices(snapshot.notices, width, None if height is None else max(1, height // 5))
    header = [*_header(snapshot, width), *notices, Text()]
    if not snapshot.rows:
        return _group([*header, Text("no workers yet", "dim")], width)
    slots = worst_first(snapshot.briefs)
    # Each row takes at least one line: of those beyond the height no cell is made.
    rows = [snapshot.row(slot) for slot in (slots if height is None else slots[: height + 1])]
    footer = [Text(), *_footer(snapshot, rows, width)]
    columns = columns_for(rows)
    cells = [{column.name: column.cell(row) for column in columns} for row in rows]
    layout = _layout(columns, kept_longest_first(rows), cells, width)
    titles = _titles(layout)
    drawn = [_drawn(row, shown, layout) for row, shown in zip(rows, cells, strict=True)]
    room = None if height is None else height - len(header) - len(titles)
    if room is not None and room < len(footer) + _ROWS_BEFORE_SUMS:
        footer = []
    body = _body(slots, drawn, None if room is None else room - len(footer), width)
    return _group([*header, *titles, *body, *footer], width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A table without its header and sums: two headings and a rule, then a line for each row."""

    titles: tuple[Text, ...]
    rows: tuple[Text, ...]


def table_lines(rows: Sequence[Row], width: int) -> Lines:
    """Return the table of these rows, in this order; reasons only where there is room."""
    columns = columns_for(rows)
    cells = [{column.name: column.cell(row) for column in columns} for row in rows]
    known = {column.name for column in columns} | {"reason"}
    order = [name for name in kept_longest_first(rows) if name in known]
    layout = _layout(columns, order, cells, width)
    drawn = (_drawn(row, shown, layout).line for row, shown in zip(rows, cells, strict=True))
    return Lines(titles=tuple(_titles(layout)), rows=tuple(drawn))


def header_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return what stands above the table: nodes, states, throughput, time, then warnings."""
    return [*_header(snapshot, width), *_notices(snapshot.notices, width, 3)]


def _group(lines: Iterable[Text], width: int) -> Group:
    shown = []
    for line in lines:
        line.no_wrap = True
        line.overflow = "crop"
        line.truncate(width)
        shown.append(line)
    return Group(*shown)


def _header(snapshot: Snapshot, width: int) -> list[Text]:
    seen, planned = len(snapshot.nodes_seen), len(snapshot.nodes_planned)
    share = min(1.0, snapshot.elapsed_s / snapshot.duration_s) if snapshot.duration_s > 0 else 1.0
    progress = bar(full=share, part=0.0, width=_PROGRESS_CELLS)
    segments = [
        Text(f"nodes {seen}/{planned}", "bold" if seen >= planned else "bold red"),
        *(
            Text(f"{count} {state}", STATE_STYLES[state])
            for state, count in snapshot.state_counts.items()
        ),
        Text(tflops_words(snapshot.tflops_total), "bold"),
        Text(time_words(snapshot)),
    ]
    if snapshot.jobs is not None:
        segments.append(Text(f"jobs: {snapshot.jobs}", "bold"))
    elif snapshot.starting_s is None:
        segments += [
            Text.assemble((progress, "green"), f" {int(share * 100)} %"),
            Text(f"{clock(snapshot.remaining_s)} left"),
        ]
    return flow(segments, width, SEPARATOR)


def _footer(snapshot: Snapshot, rows: Iterable[Row], width: int) -> list[Text]:
    said = [Text(words) for words in totals(snapshot)]
    hot = (
        row for row in rows if row.temperature_c is not None and row.memory_temperature_c is None
    )
    if any("GeForce" in (row.gpu_name or "") for row in hot):
        said.append(Text(_HIDDEN_TEMPERATURE, "dim"))
    return flow(said, width, SEPARATOR)


def _notices(notices: Sequence[str], width: int, most: int | None) -> list[Text]:
    shown = notices if most is None or len(notices) <= most else notices[: most - 1]
    lines = [Text(shorten(f"! {clean(notice)}", width), "bold yellow") for notice in shown]
    if hidden := len(notices) - len(shown):
        lines.append(Text(f"! {hidden} {'more ' if shown else ''}warnings", "bold yellow"))
    return lines


def _layout(
    columns: Sequence[TableColumn],
    order: Sequence[str],
    cells: Sequence[dict[str, Text | None]],
    width: int,
) -> _Layout:
    widths: dict[str, int] = {}
    never_dropped = order[:NEVER_DROPPED]
    known: set[str] = {*never_dropped, *({"reason"} & set(order))}
    for column in columns:
        shown = [cell for row in cells if (cell := row[column.name]) is not None]
        if shown:
            known.add(column.name)
        headings = (column.title, column.unit, MISSING)
        widths[column.name] = max(*map(cell_len, headings), *(cell.cell_len for cell in shown), 0)
    needed = {**widths, **({"reason": _REASON_CELLS} if "reason" in known else {})}
    fits_whole = sum(needed.values()) + _GAP_CELLS * (len(needed) - 1) <= width
    kept: set[str] = set()
    used = -_GAP_CELLS
    for name in order:
        cost = needed[name] + _GAP_CELLS
        # Columns without one value go before any other.
        if fits_whole or name in never_dropped or (name in known and used + cost <= width):
            kept.add(name)
            used += cost
    if used > width:
        widths["slot"] = max(_SLOT_CELLS, widths["slot"] - (used - width))
    inline = "reason" in kept
    return _Layout(
        columns=tuple(column for column in columns if column.name in kept),
        widths=widths,
        reason_cells=_REASON_CELLS + width - used if inline else None,
        total_cells=width if inline else min(used, width),
    )


def _titles(layout: _Layout) -> list[Text]:
    first = _line({column.name: Text(column.title) for column in layout.columns}, layout)
    if layout.reason_cells is not None:
        first.append("  reason")
    lines = [
        first,
        _line({column.name: Text(column.unit) for column in layout.columns}, layout),
    ]
    for line in lines:
        line.stylize("dim")
    return [*lines, Text(RULE * layout.total_cells, "dim")]


def _line(cells: dict[str, Text | None] | dict[str, Text], layout: _Layout) -> Text:
    """Return one line of aligned cells.

    Put together as a string, which costs a fifth of adding texts up.
    """
    parts: list[str] = []
    spans: list[Span] = []
    at = 0
    for column in layout.columns:
        cell = cells[column.name]
        plain, style = (MISSING, "dim") if cell is None else (cell.plain, cell.style)
        width, taken = layout.widths[column.name], cell_len(plain)
        if taken > width:  # only a slot's column is ever narrower than its text
            plain = _tail(plain, width)
            taken = cell_len(plain)
        gap = " " * _GAP_CELLS if parts else ""
        padding = " " * (width - taken)
        before, after = (gap, padding) if column.is_words else (gap + padding, "")
        at += len(before)
        if style:
            spans.append(Span(at, at + len(plain), style))
        parts += (before, plain, after)
        at += len(plain) + len(after)
    return Text("".join(parts), spans=spans)


def _tail(text: str, width: int) -> str:
    """Return the end of a name that is too long: the number of a slot is there."""
    room = width - cell_len(ELLIPSIS)
    while cell_len(text) > room:
        text = text[1:]
    return ELLIPSIS + text


def _drawn(row: Row, cells: dict[str, Text | None], layout: _Layout) -> _Drawn:
    line = _line(cells, layout)
    reason = clean(row.reason)
    quiet = row.state in _QUIET_STATES
    if layout.reason_cells is not None:
        line.append("  ").append(shorten(reason, layout.reason_cells))
        reason = ""
    elif quiet and not trouble(row):
        reason = ""
    return _Drawn(line=line, reason=reason, style="bold red" if quiet else STATE_STYLES[row.state])


def _body(
    slots: Sequence[Brief], drawn: Sequence[_Drawn], room: int | None, width: int
) -> list[Text]:
    """Return the rows, each with its reason under it, that fit into `room` lines.

    While all rows fit, the best rows lose their reasons first. Else the best rows are summed up in
    the last line.
    """
    reasons = [(row.reason, row.style) for row in drawn]
    is_new = (
        bool(now[0]) and now != before
        for before, now in zip([("", ""), *reasons], reasons, strict=False)
    )
    reasons_so_far = list(itertools.accumulate(is_new))
    if room is None or len(drawn) + reasons_so_far[-1] <= room:
        return _with_reasons(drawn, len(drawn), width)
    if len(slots) <= room:
        return _with_reasons(drawn, room - len(slots), width)
    most = max(1, room // _REASONS_OF_ROOM)
    lines = (count + min(most, reasons) for count, reasons in enumerate(reasons_so_far, start=1))
    count = max(1, sum(taken < room for taken in lines))
    states = Counter(slot.state for slot in slots[count:])
    by_state = ", ".join(f"{number} {state}" for state, number in states.items())
    hidden = f" {next(iter(states))}" if len(states) == 1 else f": {by_state}"
    more = Text(f"{ELLIPSIS} and {states.total()} more{hidden}", "dim")
    return [*_with_reasons(drawn[:count], most, width), more]


def _with_reasons(drawn: Sequence[_Drawn], most: int, width: int) -> list[Text]:
    """Return the rows; neighbours with the same reason share one line of it.

    `most` reasons are shown.
    """
    lines: list[Text] = []
    for (reason, style), same in itertools.groupby(drawn, lambda row: (row.reason, row.style)):
        rows = list(same)
        lines += [row.line for row in rows]
        if reason and most > 0:
            most -= 1
            whose = f"these {len(rows)}: " if len(rows) > 1 else ""
            lines.append(Text(shorten(f"  {BRANCH} {whose}{reason}", width), style))
    return lines
