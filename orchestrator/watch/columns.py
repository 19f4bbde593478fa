"""The columns of the health table, as data: what each shows, and which go first when the terminal is narrow.

Covers one cell at a time. Does not cover the layout: widths, lines and the reason under a row are the table's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from orchestrator.core.slot import HeadState
from orchestrator.watch import cells
from orchestrator.watch.cells import Glyphs, joined, number, share_pct, whole
from orchestrator.watch.model import LOW_SUCCESS_RATE, Row, finite
from workers.messages import WorkerState
from workers.units import GIB, MIB

#: Colours repeat what the state word says; no information is in the colour alone.
STATE_STYLES = {
    HeadState.QUARANTINED: "bold red",
    HeadState.LOST: "bold red",
    WorkerState.CORRUPT: "bold red",
    HeadState.RESTARTING: "magenta",
    WorkerState.EMERGENCY: "bold yellow",
    WorkerState.PAUSED: "yellow",
    WorkerState.THROTTLED: "yellow",
    WorkerState.BACKOFF: "yellow",
    WorkerState.WARMING: "cyan",
    HeadState.STARTING: "cyan",
    WorkerState.RUNNING: "green",
    WorkerState.STOPPED: "dim",
}

_BAR_CELLS = 10

#: Names of the columns, the most important first. A narrow terminal drops them from the end; the first few stay.
KEPT_LONGEST_FIRST = (
    "slot",
    "state",
    "size",
    "tflops",
    "vram",
    "oom",
    "baseline",
    "temperature",
    "verify",
    "success",
    "heartbeat",
    "card",
    "vram_bar",
    "throttle",
    "duty",
    "power",
    "peak",
    "reason",
    "dtype",
    "restarts",
    "card_memory",
    "clock",
    "memory_temperature",
)
NEVER_DROPPED = KEPT_LONGEST_FIRST[:4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: two lines of heading and what it shows of a row (`None` when unknown)."""

    name: str
    title: str
    unit: str
    cell: Callable[[Row], Text | None]
    left: bool = False
    """Words are aligned to the left, numbers to the right."""


def columns_for(rows: Sequence[Row], glyphs: Glyphs) -> tuple[Column, ...]:
    """Return all columns in the order they are shown, with units and decimals that suit these rows."""
    return (
        *_identity_columns(glyphs),
        *_work_columns(rows, glyphs),
        *_memory_columns(rows, glyphs),
        *_health_columns(glyphs),
    )


def _text(value: str | None, style: str = "") -> Text | None:
    return None if value is None else Text(value, style)


def _words(value: str | None, glyphs: Glyphs, longest: int) -> str | None:
    return glyphs.shorten(glyphs.clean(value), longest) if value else None


def _identity_columns(glyphs: Glyphs) -> tuple[Column, ...]:
    def state(row: Row) -> Text:
        return Text(row.state.value, STATE_STYLES[row.state])

    def card(row: Row) -> Text | None:
        # "NVIDIA GeForce RTX 3090" -> "RTX 3090": the maker's name is the same on every line.
        name = (row.gpu_name or "").removeprefix("NVIDIA ").removeprefix("GeForce ")
        return _text(_words(name or row.device, glyphs, 16))

    return (
        Column(name="slot", title="slot", unit="", left=True, cell=lambda row: _text(_words(row.slot, glyphs, 32))),
        Column(name="card", title="card", unit="", left=True, cell=card),
        Column(name="state", title="state", unit="", left=True, cell=state),
    )


def _work_columns(rows: Sequence[Row], glyphs: Glyphs) -> tuple[Column, ...]:
    tflops_decimals = cells.decimals_for(row.tflops for row in rows)

    def size(row: Row) -> Text | None:
        return _text(joined((whole(row.size), whole(row.batch)), glyphs.missing))

    return (
        Column(name="size", title="size", unit="/batch", cell=size),
        Column(name="dtype", title="type", unit="", left=True, cell=lambda row: _text(_words(row.dtype, glyphs, 10))),
        Column(name="tflops", title="TFLOP/s", unit="", cell=lambda row: _text(number(row.tflops, tflops_decimals))),
        Column(name="baseline", title="base", unit="%", cell=lambda row: _text(number(row.baseline_pct, 0))),
        Column(name="peak", title="peak", unit="%", cell=lambda row: _text(number(row.peak_pct, 0))),
    )


def _memory_columns(rows: Sequence[Row], glyphs: Glyphs) -> tuple[Column, ...]:
    largest_cap = max((row.cap_bytes or row.budget_bytes or 0 for row in rows), default=0)
    # A rehearsal's caps are a sixteenth of the real ones: in GiB they would all read 0.2.
    unit_bytes, unit = (GIB, "GiB") if largest_cap >= GIB or not largest_cap else (MIB, "MiB")
    decimals = cells.decimals_for((largest_cap / unit_bytes,), significant=3) if unit_bytes == GIB else 0

    def amount(value_bytes: int | None) -> str | None:
        return None if value_bytes is None else number(min(value_bytes, 2**80) / unit_bytes, decimals)

    def bar(row: Row) -> Text | None:
        if row.allocated_bytes is None or row.reserved_bytes is None or not row.cap_bytes:
            return None
        full = _ratio(row.allocated_bytes, row.cap_bytes)
        part = _ratio(row.reserved_bytes, row.cap_bytes)
        return Text(glyphs.bar(full=full, part=part, width=_BAR_CELLS), "cyan")

    def amounts(row: Row) -> Text | None:
        return _text(joined(map(amount, (row.allocated_bytes, row.reserved_bytes, row.cap_bytes)), glyphs.missing))

    def card_memory(row: Row) -> Text | None:
        known = (row.device_used_bytes, row.device_total_bytes)
        in_gib = (None if value is None else number(min(value, 2**80) / GIB, 1) for value in known)
        return _text(joined(in_gib, glyphs.missing))

    return (
        Column(name="vram_bar", title="VRAM", unit="of cap", left=True, cell=bar),
        Column(name="vram", title=f"{unit} allocated", unit="/reserved/cap", cell=amounts),
        Column(name="card_memory", title="card GiB", unit="used/all", cell=card_memory),
    )


def _ratio(part_bytes: int, whole_bytes: int) -> float:
    # min() first: two huge whole numbers cannot be divided as floats.
    return min(part_bytes, whole_bytes) / whole_bytes


def _health_columns(glyphs: Glyphs) -> tuple[Column, ...]:
    def oom(row: Row) -> Text:
        noted = f"{whole(row.counts.oom_count)}/{whole(row.counts.emergency_count)}"
        return Text(noted, "yellow" if row.counts.oom_count or row.counts.emergency_count else "")

    def success(row: Row) -> Text | None:
        rate = row.counts.success_rate
        low = rate is not None and rate < LOW_SUCCESS_RATE
        return _text(share_pct(rate), "red" if low else "")

    def duty(row: Row) -> Text | None:
        known = (row.duty_requested, row.duty_measured)
        in_pct = (None if value is None else number(value * 100, 0) for value in known)
        return _text(joined(in_pct, glyphs.missing))

    def temperature(row: Row) -> Text | None:
        return _text(joined((number(row.temperature_c, 0), number(row.margin_c, 0)), glyphs.missing))

    def memory_temperature(row: Row) -> Text | None:
        return _text(number(row.memory_temperature_c, 0))

    def power(row: Row) -> Text | None:
        return _text(joined((number(row.power_w, 0), number(row.power_limit_w, 0)), glyphs.missing))

    def verify(row: Row) -> Text | None:
        if not row.counts.verify_checks and not row.counts.verify_errors:
            return None  # a workload that checks nothing has not passed any check
        noted = f"{whole(row.counts.verify_checks)}/{whole(row.counts.verify_errors)}"
        return Text(noted, "bold red" if row.counts.verify_errors else "")

    def restarts(row: Row) -> Text:
        return Text(whole(row.restarts) or "", "magenta" if row.restarts else "")

    def heartbeat(row: Row) -> Text | None:
        age_s = finite(row.heartbeat_age_s)
        return _text(number(age_s, 0 if age_s is not None and age_s >= 10 else 1))

    return (
        Column(name="oom", title="OOM", unit="/emerg", cell=oom),
        Column(name="success", title="good", unit="%", cell=success),
        Column(name="duty", title="duty %", unit="ask/got", cell=duty),
        Column(name="temperature", title="temp C", unit="/margin", cell=temperature),
        Column(name="memory_temperature", title="VRAM", unit="C", cell=memory_temperature),
        Column(name="power", title="power", unit="/cap W", cell=power),
        Column(name="clock", title="clock", unit="SM MHz", cell=lambda row: _text(number(row.sm_clock_mhz, 0))),
        Column(name="throttle", title="slowed", unit="% time", cell=lambda row: _text(number(row.throttle_pct, 0))),
        Column(name="verify", title="checks", unit="/wrong", cell=verify),
        Column(name="restarts", title="re-", unit="starts", cell=restarts),
        Column(name="heartbeat", title="seen", unit="s ago", cell=heartbeat),
    )
