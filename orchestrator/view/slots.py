"""What the health table shows of a snapshot: the tables of slots and of cards, the line above them.

A column is one entry of `COLUMNS`. Pure: no I/O, no clock, no state. Does not cover how a table is
drawn (`terminal`), nor the sums of a run in words (`phrases`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from orchestrator.core.slot import HeadState, SlotState
from orchestrator.record.model import (
    FIELDS,
    LOW_SUCCESS_RATE,
    STATES_WORST_FIRST,
    Row,
    Snapshot,
    Value,
    finite,
    rows_by_card,
    trouble,
    worst_first,
)
from orchestrator.view.cells import (
    MISSING,
    bar,
    clean,
    clock,
    decimals_for,
    number,
    share_pct,
    whole,
)
from orchestrator.view.phrases import tflops_words, time_words
from orchestrator.view.tables import Cell, Column, Table, TableRow, Tone
from workers.messages import NO_PROGRESS, WorkerState
from workers.units import GIB, MIB

#: What the colour of a state says; no information is in the colour alone.
STATE_TONES: Final[Mapping[SlotState, Tone]] = {
    **dict.fromkeys(STATES_WORST_FIRST, Tone.WARN),
    **dict.fromkeys((HeadState.QUARANTINED, HeadState.LOST, WorkerState.CORRUPT), Tone.BAD),
    **dict.fromkeys((HeadState.STARTING, HeadState.HELD, WorkerState.WARMING), Tone.NOTE),
    **dict.fromkeys((WorkerState.RUNNING, WorkerState.DONE), Tone.GOOD),
    WorkerState.STOPPED: Tone.DIM,
}

#: Of a slot in one of these states, a reason only says more; of the others, it says what is wrong.
_QUIET_STATES = frozenset({WorkerState.RUNNING, WorkerState.DONE, WorkerState.STOPPED})

#: What says little of a slot that trains: in a run that trains, these columns go first.
_LAST_IN_TRAINING = frozenset({"size", "tflops"})
_LAST_PRIORITY = 1_000

_LONGEST_ETA_S = 9_999 * 3600.0
_BAR_CELLS = 10
_PROGRESS_CELLS = 16

_Shown: TypeAlias = tuple[str | None, Tone]
"""The text of a cell, `None` where it is unknown, and its tone."""


def _state(row: Row) -> _Shown:
    return row.state.value, STATE_TONES[row.state]


def _card(row: Row) -> _Shown:
    # "NVIDIA GeForce RTX 3090" -> "RTX 3090": the maker's name is the same on every line.
    name = (row.gpu_name or "").removeprefix("NVIDIA ").removeprefix("GeForce ")
    return clean(name or row.device or "") or None, Tone.PLAIN


def _vram_bar(row: Row) -> _Shown:
    if row.allocated_bytes is None or row.reserved_bytes is None or not row.cap_bytes:
        return None, Tone.PLAIN
    # min() first: two huge whole numbers cannot be divided as floats.
    full, part = (
        min(held, row.cap_bytes) / row.cap_bytes
        for held in (row.allocated_bytes, row.reserved_bytes)
    )
    return bar(full=full, part=part, width=_BAR_CELLS), Tone.NOTE


def _success(row: Row) -> _Shown:
    rate = row.counts.success_rate
    is_low = rate is not None and rate < LOW_SUCCESS_RATE
    return share_pct(rate), Tone.BAD if is_low else Tone.PLAIN


def _verify(row: Row) -> _Shown:
    checks, errors = row.counts.verify_checks, row.counts.verify_errors
    if not checks and not errors:
        return None, Tone.PLAIN  # a workload that checks nothing has not passed any check
    return f"{whole(checks)}/{whole(errors)}", Tone.BAD if errors else Tone.PLAIN


def _eta(row: Row) -> _Shown:
    left_s = finite(row.progress.eta_s)
    return None if left_s is None else clock(min(left_s, _LONGEST_ETA_S)), Tone.PLAIN


@dataclass(frozen=True, slots=True)
class SlotColumn:
    """A column of the health table: what it is called, and which keys of a row it shows."""

    name: str
    """In `--sort` and in filters."""
    key: str
    """It is sorted by this key of a row, and shows it where it names no others."""
    title: str
    unit: str = ""
    """The second line of the heading."""
    priority: int = 0
    """As in `Column`."""
    keys: tuple[str, ...] = ()
    """The keys of the numbers that it shows, with slashes between them."""
    digits: int = 0
    """Significant digits of the largest number; 0 shows whole numbers."""
    most_cells: int | None = None
    """As in `Column`."""
    warns: bool = False
    """Whether a number above 0 is worth a look."""
    shown: Callable[[Row], _Shown] | None = None
    """Makes the cell; `None` for words and numbers as they are."""


#: In the order of the table. Those of a training are only there where something trains.
COLUMNS: Final = (
    SlotColumn("slot", "slot", "slot", most_cells=32),
    SlotColumn("card", "gpu_name", "card", priority=110, most_cells=16, shown=_card),
    SlotColumn("state", "state", "state", shown=_state),
    SlotColumn("train_step", "train_step", "step", "/of", keys=("train_step", "train_steps")),
    SlotColumn("epoch", "epoch", "epoch", priority=52, digits=3),
    SlotColumn("loss", "loss", "loss", "/first", keys=("loss", "first_loss"), digits=4),
    SlotColumn("samples", "samples_per_s", "samples", "/s", 13, digits=3),
    SlotColumn("tokens", "tokens_per_s", "tokens", "/s", 51, digits=3),
    SlotColumn("micro", "micro_batch", "micro", "/acc", 15, keys=("micro_batch", "accumulation")),
    SlotColumn("level", "memory_level", "level", priority=17),
    SlotColumn("saved", "saved_step", "saved", "step", 16),
    SlotColumn("redone", "redone_steps", "redone", "steps", 53),
    SlotColumn("wait", "data_wait_pct", "data", "wait %", 18, digits=2),
    SlotColumn("mfu", "mfu_pct", "MFU", "%", 19, digits=3),
    SlotColumn("eta", "eta_s", "ETA", priority=14, shown=_eta),
    SlotColumn("size", "size", "size", "/batch", keys=("size", "batch")),
    SlotColumn("dtype", "dtype", "type", priority=180),
    SlotColumn("tflops", "tflops", "TFLOP/s", digits=4),
    SlotColumn("baseline", "baseline_pct", "base", "%", 60),
    SlotColumn("peak", "peak_pct", "peak", "%", 160),
    SlotColumn(
        "vram",
        "allocated_bytes",
        "allocated",
        "/reserved/cap",
        40,
        keys=("allocated_bytes", "reserved_bytes", "cap_bytes"),
    ),
    SlotColumn("vram_bar", "reserved_bytes", "VRAM", "of cap", 120, shown=_vram_bar),
    SlotColumn(
        "card_memory",
        "device_used_bytes",
        "card",
        "used/all",
        200,
        keys=("device_used_bytes", "device_total_bytes"),
    ),
    SlotColumn("success", "success_rate", "good", "%", 90, shown=_success),
    SlotColumn(
        "oom", "oom_count", "OOM", "/emerg", 50, keys=("oom_count", "emergency_count"), warns=True
    ),
    SlotColumn("restarts", "restarts", "re-", "starts", 190, warns=True),
    SlotColumn(
        "duty", "duty_measured", "duty %", "ask/got", 140, keys=("duty_requested", "duty_measured")
    ),
    SlotColumn(
        "temperature", "temperature_c", "temp C", "/margin", 70, keys=("temperature_c", "margin_c")
    ),
    SlotColumn("memory_temperature", "memory_temperature_c", "VRAM", "C", 230),
    SlotColumn("power", "power_w", "power", "/cap W", 150, keys=("power_w", "power_limit_w")),
    SlotColumn("clock", "sm_clock_mhz", "clock", "SM MHz", 220),
    SlotColumn("utilisation", "utilisation_pct", "card", "busy %", 210),
    SlotColumn("throttle", "throttle_pct", "slowed", "% time", 130),
    SlotColumn("verify", "verify_checks", "checks", "/wrong", 80, shown=_verify),
    SlotColumn("heartbeat", "heartbeat_age_s", "seen", "s ago", 100, digits=2),
)

_OF_CARD: Final = frozenset(
    column.name for column in COLUMNS if FIELDS[column.key].of == "card"
) - {"card"}

#: A column that is made for some rows, and what makes its cells.
_Made: TypeAlias = tuple[Column, Callable[[Row], Cell]]


def slots_table(snapshot: Snapshot, rows: Sequence[Row] | None = None) -> Table:
    """Return the slots of a run with their reasons.

    `rows` are some of the snapshot's in an order of their own; `None`: all, the worst first. Units
    and decimals are chosen for all rows.
    """
    made = _made(snapshot.rows)
    return Table(
        name="slots",
        columns=tuple(column for column, _ in made),
        rows=tuple(
            TableRow(
                key=row.slot,
                cells=tuple(cell(row) for _, cell in made),
                reason=clean(row.reason),
                tone=_reason_tone(row),
            )
            for row in (worst_first(snapshot.rows) if rows is None else rows)
        ),
    )


def cards_table(snapshot: Snapshot) -> Table:
    """Return the cards of a run with what their sensors say, in the order of their first slots."""
    columns = (
        Column(key="node", title="node"),
        Column(key="card", title="card"),
        Column(key="workers", title="workers", numeric=True),
        Column(key="tflops", title="TFLOP/s", unit="sum", numeric=True),
    )
    of_card = [each for each in _made(snapshot.rows) if each[0].key in _OF_CARD]
    rows = []
    for (node, card), workers in rows_by_card(snapshot.rows).items():
        flops = [known for row in workers if (known := finite(row.tflops)) is not None]
        total = sum(flops) if flops else None
        own = (
            _cell(clean(node)),
            _cell(next((name for row in workers if (name := _card(row)[0])), None)),
            _cell(str(len(workers)), value=len(workers)),
            _cell(number(total, decimals_for((total,))), value=total),
        )
        # A worker that has ended says nothing of the card: the first one that does is asked.
        cells = (list(map(cell, workers)) for _, cell in of_card)
        told = (next((one for one in each if one.text != MISSING), each[0]) for each in cells)
        rows.append(TableRow(key=f"{node}/{card}", cells=(*own, *told)))
    return Table(
        name="cards", columns=(*columns, *(column for column, _ in of_card)), rows=tuple(rows)
    )


def headline(snapshot: Snapshot) -> tuple[Cell, ...]:
    """Return what stands above the table: nodes, states, throughput and time.

    The value of a cell is the state that it counts.
    """
    seen, planned = len(snapshot.nodes_seen), len(snapshot.nodes_planned)
    said = [
        Cell(text=f"nodes {seen}/{planned}", tone=Tone.PLAIN if seen >= planned else Tone.BAD),
        *(
            Cell(text=f"{count} {state}", tone=STATE_TONES[state], value=state.value)
            for state, count in snapshot.state_counts.items()
        ),
        Cell(text=tflops_words(snapshot.tflops_total)),
        Cell(text=time_words(snapshot)),
    ]
    if snapshot.jobs is not None:
        said.append(Cell(text=f"jobs: {snapshot.jobs}"))
    elif snapshot.starting_s is None:
        share = (
            min(1.0, snapshot.elapsed_s / snapshot.duration_s) if snapshot.duration_s > 0 else 1.0
        )
        done = bar(full=share, part=0.0, width=_PROGRESS_CELLS)
        said.append(Cell(text=f"{done} {int(share * 100)} %", tone=Tone.GOOD))
        said.append(Cell(text=f"{clock(snapshot.remaining_s)} left"))
    return tuple(said)


def _reason_tone(row: Row) -> Tone:
    if row.state not in _QUIET_STATES:
        return STATE_TONES[row.state]
    return Tone.BAD if trouble(row) else Tone.DIM


def _made(rows: Sequence[Row]) -> list[_Made]:
    """Return the columns of these rows, with units and decimals for their values."""
    is_training = any(row.progress.train_step is not None for row in rows)
    made = []
    for column in COLUMNS:
        if is_training or not hasattr(NO_PROGRESS, column.key):
            is_last = is_training and column.name in _LAST_IN_TRAINING
            made.append(_make(column, rows, _LAST_PRIORITY if is_last else column.priority))
    return made


def _make(declared: SlotColumn, rows: Sequence[Row], priority: int) -> _Made:
    field = FIELDS[declared.key]
    is_words = field.type is str
    keys = declared.keys or (declared.key,)
    title, times, decimals = declared.title, 1.0, 0
    values = [] if is_words else [finite(row.value(key)) for row in rows for key in keys]
    if declared.digits:
        decimals = decimals_for(values, significant=declared.digits)
    elif field.unit == "ratio":
        times = 100.0
    elif field.unit == "bytes":
        # The caps of a rehearsal are a sixteenth of the real ones: in GiB they would all read 0.2.
        largest = max((value for value in values if value is not None), default=GIB)
        unit, unit_bytes = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
        title, times = f"{unit} {title}", 1 / unit_bytes
        decimals = decimals_for((largest * times,), significant=3)

    def drawn(row: Row) -> _Shown:
        if is_words:
            return clean(row.value(declared.key) or "") or None, Tone.PLAIN
        numbers = [row.value(key) for key in keys]
        texts = [_number(value, times, decimals) for value in numbers]
        text = "/".join(text or MISSING for text in texts) if any(texts) else None
        return text, Tone.WARN if declared.warns and any(numbers) else Tone.PLAIN

    def cell(row: Row) -> Cell:
        text, tone = (declared.shown or drawn)(row)
        return _cell(text, tone, text if is_words else field.value(row))

    column = Column(
        key=declared.name,
        title=title,
        unit=declared.unit,
        numeric=not is_words,
        priority=priority,
        most_cells=declared.most_cells,
    )
    return column, cell


def _number(value: int | float | None, times: float, decimals: int) -> str | None:
    if isinstance(value, int) and times == 1.0:
        return whole(value)
    known = finite(value)
    return None if known is None else number(known * times, decimals)


def _cell(text: str | None, tone: Tone = Tone.PLAIN, value: Value = None) -> Cell:
    if text is None:
        return Cell(tone=Tone.DIM, value=value)
    return Cell(text=text, tone=tone, value=text if value is None else value)
