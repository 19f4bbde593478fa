"""Makes the tables of slots and of cards, and the headline above them, from a snapshot.

A column is one entry of `COLUMNS`. Pure: no I/O, no clock, no state. Does not draw tables
(`terminal`), nor describe the sums of a run (`phrases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.core.slot import HeadState, SlotState
from orchestrator.record.model import (
    FIELDS,
    LOW_SUCCESS_RATE,
    STATES_WORST_FIRST,
    Field,
    Row,
    Snapshot,
    finite,
    rows_by_card,
    trouble,
    worst_first,
)
from orchestrator.view.cells import MISSING, clean, clock, decimals_for, number, share_pct
from orchestrator.view.tables import Cell, Column, Table, TableRow, Tone, row_of
from workers.messages import NO_PROGRESS, WorkerState
from workers.units import GIB, MIB

#: State -> tone of its cell; no information is in the colour alone.
STATE_TONES: Final[Mapping[SlotState, Tone]] = {
    **dict.fromkeys(STATES_WORST_FIRST, Tone.WARN),
    **dict.fromkeys((HeadState.QUARANTINED, HeadState.LOST, WorkerState.CORRUPT), Tone.BAD),
    **dict.fromkeys((HeadState.STARTING, HeadState.HELD, WorkerState.WARMING), Tone.NOTE),
    **dict.fromkeys((WorkerState.RUNNING, WorkerState.DONE), Tone.GOOD),
    WorkerState.STOPPED: Tone.DIM,
}

#: In these states the reason of a slot is a remark; in the others it says what is wrong.
_QUIET_STATES = frozenset({WorkerState.RUNNING, WorkerState.DONE, WorkerState.STOPPED})


def _cell(text: str | None, tone: Tone = Tone.PLAIN) -> Cell:
    """Return a cell with cleaned text; `None` gives a dim `MISSING`."""
    return Cell(tone=Tone.DIM) if text is None else Cell(text=clean(text) or MISSING, tone=tone)


def _state(row: Row) -> Cell:
    return _cell(row.state.value, STATE_TONES[row.state])


def _card(row: Row) -> Cell:
    # "NVIDIA GeForce RTX 3090" -> "RTX 3090": the vendor's name is the same on every line.
    name = (row.gpu_name or "").removeprefix("NVIDIA ").removeprefix("GeForce ")
    return _cell(name or row.device)


def _success(row: Row) -> Cell:
    rate = row.counts.success_rate
    is_low = rate is not None and rate < LOW_SUCCESS_RATE
    return _cell(share_pct(rate), Tone.BAD if is_low else Tone.PLAIN)


def _verify(row: Row) -> Cell:
    checks, errors = row.counts.verify_checks, row.counts.verify_errors
    if not checks and not errors:
        return _cell(None)  # "0/0" would look like passed checks
    return _cell(f"{number(checks)}/{number(errors)}", Tone.BAD if errors else Tone.PLAIN)


def _eta(row: Row) -> Cell:
    left_s = finite(row.progress.eta_s)
    return _cell(None if left_s is None else clock(left_s))


@dataclass(frozen=True, slots=True)
class SlotColumn(Column):
    """A column of the health table, with the keys of a row that it shows."""

    numeric: bool = True
    of: str = ""
    """The keys, separated by blanks; a cell has slashes between their values. Empty: `key`."""
    digits: int = 0
    """Significant digits of the largest number; 0 shows whole numbers."""
    warns: bool = False
    """Whether numbers above 0 have the tone WARN."""
    shown: Callable[[Row], Cell] | None = None
    """Makes the cell; `None` shows words and numbers unchanged."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it shows."""
        return tuple((self.of or self.key).split())

    @property
    def field(self) -> Field:
        """The description of the first key."""
        return FIELDS[self.keys[0]]


#: In the order of the table. Columns of a training appear only if a slot trains.
COLUMNS: Final = (
    SlotColumn("slot", "slot", numeric=False, most_cells=32),
    SlotColumn(
        "card", "card", numeric=False, of="gpu_name", priority=75, most_cells=16, shown=_card
    ),
    SlotColumn("state", "state", numeric=False, shown=_state),
    SlotColumn("train_step", "step", "/of", of="train_step train_steps"),
    SlotColumn("epoch", "epoch", priority=52, digits=3),
    SlotColumn("loss", "loss", "/first", of="loss first_loss", digits=4),
    SlotColumn("samples", "samples", "/s", of="samples_per_s", priority=13, digits=3),
    SlotColumn("tokens", "tokens", "/s", of="tokens_per_s", priority=51, digits=3),
    SlotColumn("micro", "micro", "/acc", of="micro_batch accumulation", priority=15),
    SlotColumn("team", "team", numeric=False, of="team_state", priority=12),
    SlotColumn("share", "share", "%", of="team_share_pct", priority=12, digits=2),
    SlotColumn("wire", "wire", "s/step", of="team_wire_s", priority=13, digits=4),
    SlotColumn("level", "level", of="memory_level", priority=17),
    SlotColumn("saved", "saved", "step", of="saved_step", priority=16),
    SlotColumn("redone", "redone", "steps", of="redone_steps", priority=53),
    SlotColumn("wait", "data", "wait %", of="data_wait_pct", priority=18, digits=2),
    SlotColumn("mfu", "MFU", "%", of="mfu_pct", priority=19, digits=3),
    SlotColumn("eta", "ETA", of="eta_s", priority=14, shown=_eta),
    SlotColumn("size", "size", "/batch", of="size batch", priority=20),
    SlotColumn("dtype", "type", numeric=False, priority=180),
    SlotColumn("tflops", "TFLOP/s", priority=21, digits=4),
    SlotColumn("baseline", "base", "%", of="baseline_pct", priority=60),
    SlotColumn("peak", "peak", "%", of="peak_pct", priority=160),
    SlotColumn(
        "vram",
        "allocated",
        "/reserved/cap",
        of="allocated_bytes reserved_bytes cap_bytes",
        priority=40,
    ),
    SlotColumn(
        "card_memory", "card", "used/all", of="device_used_bytes device_total_bytes", priority=200
    ),
    SlotColumn("success", "good", "%", of="success_rate", priority=90, shown=_success),
    SlotColumn("oom", "OOM", "/emerg", of="oom_count emergency_count", priority=50, warns=True),
    SlotColumn("restarts", "re-", "starts", priority=190, warns=True),
    SlotColumn("duty", "duty %", "got/ask", of="duty_measured duty_requested", priority=140),
    SlotColumn("temperature", "temp C", "/margin", of="temperature_c margin_c", priority=70),
    SlotColumn("memory_temperature", "VRAM", "C", of="memory_temperature_c", priority=230),
    SlotColumn("power", "power", "/cap W", of="power_w power_limit_w", priority=150),
    SlotColumn("clock", "clock", "SM MHz", of="sm_clock_mhz", priority=220),
    SlotColumn("utilisation", "card", "busy %", of="utilisation_pct", priority=210),
    SlotColumn("throttle", "slowed", "% time", of="throttle_pct", priority=130),
    SlotColumn("verify", "checks", "/wrong", of="verify_checks", priority=80, shown=_verify),
    SlotColumn("heartbeat", "seen", "s ago", of="heartbeat_age_s", priority=100, digits=2),
)


def slots_table(snapshot: Snapshot) -> Table:
    """Return the slots of a run with their reasons, the worst first."""
    rows = worst_first(snapshot.rows)
    is_training = any(row.progress.train_step is not None for row in rows)
    drawn = [
        _with_cells(column, rows)
        for column in COLUMNS
        if is_training or not hasattr(NO_PROGRESS, column.field.key)
    ]
    shown = []
    for row, *cells in zip(rows, *(cells for _, cells in drawn), strict=True):
        tone = STATE_TONES[row.state]
        if row.state in _QUIET_STATES:
            tone = Tone.BAD if trouble(row) else Tone.DIM
        reason = clean(row.reason)
        shown.append(TableRow(key=row.slot, cells=tuple(cells), reason=reason, tone=tone))
    return Table(name="slots", columns=tuple(column for column, _ in drawn), rows=tuple(shown))


_CARDS: Final = (
    Column("node", "node"),
    Column("card", "card"),
    Column("workers", "workers", numeric=True),
    Column("tflops", "TFLOP/s", "sum", numeric=True),
)
_SENSORS: Final = tuple(each for each in COLUMNS if each.field.of == "card")[1:]
"""Columns with values of a card, besides its name."""


def cards_table(snapshot: Snapshot) -> Table:
    """Return the cards of a run with the values of their sensors, in the order of their slots."""
    cards = rows_by_card(snapshot.rows)

    def known(row: Row) -> int:
        return sum(row.value(column.keys[0]) is not None for column in _SENSORS)

    # A worker that has ended reports no sensors: use the row with the most values.
    fullest = [max(workers, key=known) for workers in cards.values()]
    drawn = [_with_cells(column, fullest) for column in _SENSORS]
    by_card = zip(*(cells for _, cells in drawn), strict=True)
    rows = []
    for ((node, card), workers), row, cells in zip(cards.items(), fullest, by_card, strict=True):
        total = replace(snapshot, rows=tuple(workers)).tflops_total
        texts = {"node": node, "card": _card(row).text, "workers": len(workers)}
        own = row_of(_CARDS, f"{node}/{card}", {**texts, "tflops": _tflops(total)})
        rows.append(replace(own, cells=(*own.cells, *cells)))
    columns = (*_CARDS, *(column for column, _ in drawn))
    return Table(name="cards", columns=columns, rows=tuple(rows))


def _tflops(tflops: float | None) -> str:
    return number(tflops, decimals_for((tflops,))) or MISSING


def headline(snapshot: Snapshot) -> tuple[Cell, ...]:
    """Return the cells above the table: nodes, states, throughput, time, and jobs of a queue."""
    alive, planned = len(snapshot.nodes_seen), len(snapshot.nodes_planned)
    return (
        Cell(text=f"nodes {alive}/{planned}", tone=Tone.PLAIN if alive >= planned else Tone.BAD),
        *(
            Cell(text=f"{count} {state}", tone=STATE_TONES[state])
            for state, count in snapshot.state_counts.items()
        ),
        Cell(text=f"{_tflops(snapshot.tflops_total)} TFLOP/s"),
        *(Cell(text=words) for words in _time(snapshot)),
    )


def _time(snapshot: Snapshot) -> Iterator[str]:
    """Yield the time that the run has worked, or has been starting, which does not count as work.

    A queue has no planned duration; its jobs are counted instead.
    """
    starting_s, jobs = snapshot.starting_s, snapshot.jobs
    if starting_s is not None:
        then = "" if jobs is not None else f", then {clock(snapshot.remaining_s)} of work"
        yield f"starting for {clock(starting_s)}{then}"
    elif jobs is not None:
        yield f"{clock(snapshot.elapsed_s)} so far"
    else:
        yield f"{clock(snapshot.elapsed_s)} of {clock(snapshot.duration_s)}"
    if jobs is not None:
        yield f"jobs: {jobs}"


def _with_cells(column: SlotColumn, rows: Sequence[Row]) -> tuple[Column, list[Cell]]:
    """Return a column with its cells for these rows; the title gets the unit of bytes, if any."""
    if (shown := column.shown) is not None:
        return column, [shown(row) for row in rows]
    if not column.numeric:
        return column, [_cell(row.value(column.keys[0])) for row in rows]
    title, factor, decimals = column.title, 1.0, 0
    numbers = [[finite(row.value(key)) for key in column.keys] for row in rows]
    known = [value for of_row in numbers for value in of_row if value is not None]
    if column.digits:
        decimals = decimals_for(known, significant=column.digits)
    elif column.field.unit == "ratio":
        factor = 100.0
    elif column.field.unit == "bytes":
        # A rehearsal has a sixteenth of the real caps: in GiB all of them would read 0.2.
        largest = max(known, default=GIB)
        name, unit_bytes = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
        title, factor = f"{name} {title}", 1 / unit_bytes
        decimals = decimals_for((largest * factor,), significant=3)
    cells = []
    for of_row in numbers:
        texts = [None if value is None else number(value * factor, decimals) for value in of_row]
        text = "/".join(each or MISSING for each in texts) if any(texts) else None
        cells.append(_cell(text, Tone.WARN if column.warns and any(of_row) else Tone.PLAIN))
    return replace(column, title=title), cells
