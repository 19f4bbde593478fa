"""What the health table shows of a snapshot: the tables of slots and of cards, the line above them.

A column is one entry of `COLUMNS`. Pure: no I/O, no clock, no state. Does not cover how a table is
drawn (`terminal`), nor the sums of a run in words (`phrases`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

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
from orchestrator.view.tables import Cell, Column, Table, TableRow, Tone, row_of
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
    held_bytes, kept_bytes, cap_bytes = row.allocated_bytes, row.reserved_bytes, row.cap_bytes
    if held_bytes is None or kept_bytes is None or not cap_bytes:
        return None, Tone.PLAIN
    full, part = held_bytes / cap_bytes, kept_bytes / cap_bytes
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
class SlotColumn(Column):
    """A column of the health table, and which keys of a row it shows."""

    numeric: bool = True
    of: str = ""
    """The keys, with blanks between them; their numbers have slashes. Empty: `key` is one."""
    by: int = 0
    """It is sorted by this one of them."""
    digits: int = 0
    """Significant digits of the largest number; 0 shows whole numbers."""
    warns: bool = False
    """Whether a number above 0 is worth a look."""
    shown: Callable[[Row], _Shown] | None = None
    """Makes the cell; `None` for words and numbers as they are."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it shows."""
        return tuple((self.of or self.key).split())

    @property
    def field(self) -> Field:
        """What is known of the key that it is sorted by."""
        return FIELDS[self.keys[self.by]]


#: In the order of the table. Those of a training are only there where something trains.
COLUMNS: Final = (
    SlotColumn("slot", "slot", numeric=False, most_cells=32),
    SlotColumn(
        "card", "card", numeric=False, of="gpu_name", priority=110, most_cells=16, shown=_card
    ),
    SlotColumn("state", "state", numeric=False, shown=_state),
    SlotColumn("train_step", "step", "/of", of="train_step train_steps"),
    SlotColumn("epoch", "epoch", priority=52, digits=3),
    SlotColumn("loss", "loss", "/first", of="loss first_loss", digits=4),
    SlotColumn("samples", "samples", "/s", of="samples_per_s", priority=13, digits=3),
    SlotColumn("tokens", "tokens", "/s", of="tokens_per_s", priority=51, digits=3),
    SlotColumn("micro", "micro", "/acc", of="micro_batch accumulation", priority=15),
    SlotColumn("level", "level", of="memory_level", priority=17),
    SlotColumn("saved", "saved", "step", of="saved_step", priority=16),
    SlotColumn("redone", "redone", "steps", of="redone_steps", priority=53),
    SlotColumn("wait", "data", "wait %", of="data_wait_pct", priority=18, digits=2),
    SlotColumn("mfu", "MFU", "%", of="mfu_pct", priority=19, digits=3),
    SlotColumn("eta", "ETA", of="eta_s", priority=14, shown=_eta),
    SlotColumn("size", "size", "/batch", of="size batch"),
    SlotColumn("dtype", "type", numeric=False, priority=180),
    SlotColumn("tflops", "TFLOP/s", digits=4),
    SlotColumn("baseline", "base", "%", of="baseline_pct", priority=60),
    SlotColumn("peak", "peak", "%", of="peak_pct", priority=160),
    SlotColumn(
        "vram",
        "allocated",
        "/reserved/cap",
        of="allocated_bytes reserved_bytes cap_bytes",
        priority=40,
    ),
    SlotColumn("vram_bar", "VRAM", "of cap", of="reserved_bytes", priority=120, shown=_vram_bar),
    SlotColumn(
        "card_memory", "card", "used/all", of="device_used_bytes device_total_bytes", priority=200
    ),
    SlotColumn("success", "good", "%", of="success_rate", priority=90, shown=_success),
    SlotColumn("oom", "OOM", "/emerg", of="oom_count emergency_count", priority=50, warns=True),
    SlotColumn("restarts", "re-", "starts", priority=190, warns=True),
    SlotColumn("duty", "duty %", "ask/got", of="duty_requested duty_measured", by=1, priority=140),
    SlotColumn("temperature", "temp C", "/margin", of="temperature_c margin_c", priority=70),
    SlotColumn("memory_temperature", "VRAM", "C", of="memory_temperature_c", priority=230),
    SlotColumn("power", "power", "/cap W", of="power_w power_limit_w", priority=150),
    SlotColumn("clock", "clock", "SM MHz", of="sm_clock_mhz", priority=220),
    SlotColumn("utilisation", "card", "busy %", of="utilisation_pct", priority=210),
    SlotColumn("throttle", "slowed", "% time", of="throttle_pct", priority=130),
    SlotColumn("verify", "checks", "/wrong", of="verify_checks", priority=80, shown=_verify),
    SlotColumn("heartbeat", "seen", "s ago", of="heartbeat_age_s", priority=100, digits=2),
)

#: A column that is made for some rows, and what makes its cells.
_Made: TypeAlias = tuple[Column, Callable[[Row], Cell]]


def slots_table(snapshot: Snapshot) -> Table:
    """Return the slots of a run with their reasons, the worst first."""
    made = _made(snapshot.rows)
    rows = (
        TableRow(
            key=row.slot,
            cells=tuple(cell(row) for _, cell in made),
            reason=clean(row.reason),
            tone=_reason_tone(row),
        )
        for row in worst_first(snapshot.rows)
    )
    return Table(name="slots", columns=tuple(column for column, _ in made), rows=tuple(rows))


_CARDS: Final = (
    Column(key="node", title="node"),
    Column(key="card", title="card"),
    Column(key="workers", title="workers", numeric=True),
    Column(key="tflops", title="TFLOP/s", unit="sum", numeric=True),
)
_SENSORS: Final = tuple(each for each in COLUMNS if each.field.of == "card")[1:]
"""Columns with what is known of a card, besides its name."""


def cards_table(snapshot: Snapshot) -> Table:
    """Return the cards of a run with what their sensors say, in the order of their first slots."""
    sensors = [_make(each, snapshot.rows, each.priority) for each in _SENSORS]
    rows = []
    for (node, card), workers in rows_by_card(snapshot.rows).items():
        total = replace(snapshot, rows=tuple(workers)).tflops_total
        name = next((name for row in workers if (name := _card(row)[0])), None)
        values = {"node": node, "card": name, "workers": len(workers), "tflops": total}
        texts = {"tflops": number(total, decimals_for((total,)))}
        own = row_of(_CARDS, f"{node}/{card}", values, texts)
        # A worker that has ended says nothing of the card: the first one that does is asked.
        cells = (map(cell, workers) for _, cell in sensors)
        told = (
            next((one for one in each if one.text != MISSING), Cell(tone=Tone.DIM))
            for each in cells
        )
        rows.append(replace(own, cells=(*own.cells, *told)))
    columns = (*_CARDS, *(column for column, _ in sensors))
    return Table(name="cards", columns=columns, rows=tuple(rows))


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
    priorities = dict.fromkeys(_LAST_IN_TRAINING, _LAST_PRIORITY) if is_training else {}
    return [
        _make(column, rows, priorities.get(column.key, column.priority))
        for column in COLUMNS
        if is_training or not hasattr(NO_PROGRESS, column.field.key)
    ]


def _make(column: SlotColumn, rows: Sequence[Row], priority: int) -> _Made:
    field, title, shown = column.field, column.title, column.shown
    if shown is None and column.numeric:
        title, shown = _figures(column, rows)
    elif shown is None:
        shown = lambda row: (clean(row.value(field.key) or "") or None, Tone.PLAIN)  # noqa: E731

    def cell(row: Row) -> Cell:
        text, tone = shown(row)
        value = field.value(row) if column.numeric else text
        return Cell(tone=Tone.DIM) if text is None else Cell(text=text, tone=tone, value=value)

    return replace(column, title=title, priority=priority), cell


def _figures(column: SlotColumn, rows: Sequence[Row]) -> tuple[str, Callable[[Row], _Shown]]:
    """Return the title of a column of numbers, with the unit of bytes, and what shows a row's."""
    keys, title, times, decimals = column.keys, column.title, 1.0, 0
    values = [finite(row.value(key)) for row in rows for key in keys]
    largest = max((value for value in values if value is not None), default=GIB)
    if column.digits:
        decimals = decimals_for(values, significant=column.digits)
    elif column.field.unit == "ratio":
        times = 100.0
    elif column.field.unit == "bytes":
        # The caps of a rehearsal are a sixteenth of the real ones: in GiB they would all read 0.2.
        name, unit_bytes = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
        title, times = f"{name} {title}", 1 / unit_bytes
        decimals = decimals_for((largest * times,), significant=3)

    def shown(row: Row) -> _Shown:
        numbers = [row.value(key) for key in keys]
        texts = [_number(value, times, decimals) for value in numbers]
        text = "/".join(text or MISSING for text in texts) if any(texts) else None
        return text, Tone.WARN if column.warns and any(numbers) else Tone.PLAIN

    return title, shown


def _number(value: int | float | None, times: float, decimals: int) -> str | None:
    if isinstance(value, int) and times == 1.0:
        return whole(value)
    known = finite(value)
    return None if known is None else number(known * times, decimals)
