"""The columns of the health table, as data: what each shows, and which go first when the terminal
is narrow.

Covers one cell at a time. Does not cover the layout: widths, lines and the reason under a row are
the table's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.text import Text

from orchestrator.record.model import LOW_SUCCESS_RATE, STATE_STYLES, Row, finite
from orchestrator.view import cells
from orchestrator.view.cells import Glyphs, joined, number, share_pct, whole
from workers.units import GIB, MIB

_BAR_CELLS = 10
_LONGEST_ETA_S = 9_999 * 3600.0

#: Names of the columns, the most important first. A narrow terminal drops them from the end; the
#: first few stay.
KEPT_LONGEST_FIRST = (
    "slot", "state", "size", "tflops", "vram", "oom", "baseline", "temperature", "verify", "success", "heartbeat",
    "card", "vram_bar", "throttle", "duty", "power", "peak", "reason", "dtype", "restarts", "card_memory",
    "utilisation", "clock", "memory_temperature",
)  # fmt: skip
#: How many of the first stay.
NEVER_DROPPED = 4

#: What is there only where something is trained: the more important ones, and the others.
_TRAINING = ("train_step", "loss", "samples", "eta", "micro", "saved", "level", "wait", "mfu")
_TRAINING_LAST = ("tokens", "epoch", "redone")

Cell: TypeAlias = Callable[[Row], Text | None]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: two lines of heading and what it shows of a row (`None` when unknown)."""

    name: str
    title: str
    unit: str
    cell: Cell
    is_words: bool = False
    """Words are aligned to the left, numbers to the right."""


def _trains(row: Row) -> bool:
    return row.progress.train_step is not None


def kept_longest_first(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the names of the columns of these rows, and `reason`, the most important first."""
    if not any(map(_trains, rows)):
        return KEPT_LONGEST_FIRST
    slot, state, size, tflops, *others = KEPT_LONGEST_FIRST
    return (slot, state, *_TRAINING, *others[:2], *_TRAINING_LAST, *others[2:], size, tflops)


def columns_for(rows: Sequence[Row], glyphs: Glyphs) -> tuple[Column, ...]:
    """Return all columns in the order they are shown, with units and decimals that suit these rows."""
    tflops_decimals = cells.decimals_for(row.tflops for row in rows)
    largest_cap = max((row.cap_bytes or row.budget_bytes or 0 for row in rows), default=0)
    # A rehearsal's caps are a sixteenth of the real ones: in GiB they would all read 0.2.
    unit, unit_bytes = ("GiB", GIB) if largest_cap >= GIB or not largest_cap else ("MiB", MIB)
    decimals = (
        cells.decimals_for((largest_cap / unit_bytes,), significant=3) if unit_bytes == GIB else 0
    )

    def words(get: Callable[[Row], str | None], longest: int) -> Cell:
        return lambda row: _text(
            glyphs.shorten(glyphs.clean(value), longest) if (value := get(row)) else None
        )

    def figures(*fields: str, decimals: int = 0, times: float = 1.0) -> Cell:
        """Return the cell of some numbers with slashes between them."""

        def shown(value: float | None) -> str | None:
            # A whole number of any length would not become a float.
            known = min(value, 2**80) if isinstance(value, int) else value
            return None if known is None else number(known * times, decimals)

        return lambda row: _text(
            joined((shown(getattr(row, name)) for name in fields), glyphs.missing)
        )

    def card(row: Row) -> str | None:
        # "NVIDIA GeForce RTX 3090" -> "RTX 3090": the maker's name is the same on every line.
        return (row.gpu_name or "").removeprefix("NVIDIA ").removeprefix("GeForce ") or row.device

    def size(row: Row) -> Text | None:
        return _text(joined((whole(row.size), whole(row.batch)), glyphs.missing))

    def bar(row: Row) -> Text | None:
        if row.allocated_bytes is None or row.reserved_bytes is None or not row.cap_bytes:
            return None
        # min() first: two huge whole numbers cannot be divided as floats.
        full, part = (
            min(held, row.cap_bytes) / row.cap_bytes
            for held in (row.allocated_bytes, row.reserved_bytes)
        )
        return Text(glyphs.bar(full=full, part=part, width=_BAR_CELLS), "cyan")

    return (
        Column("slot", "slot", "", words(lambda row: row.slot, 32), is_words=True),
        Column("card", "card", "", words(card, 16), is_words=True),
        Column(
            "state",
            "state",
            "",
            lambda row: Text(row.state.value, STATE_STYLES[row.state]),
            is_words=True,
        ),
        *(_training_columns(rows, glyphs) if any(map(_trains, rows)) else ()),
        Column("size", "size", "/batch", size),
        Column("dtype", "type", "", words(lambda row: row.dtype, 10), is_words=True),
        Column("tflops", "TFLOP/s", "", figures("tflops", decimals=tflops_decimals)),
        Column("baseline", "base", "%", figures("baseline_pct")),
        Column("peak", "peak", "%", figures("peak_pct")),
        Column("vram_bar", "VRAM", "of cap", bar, is_words=True),
        Column(
            "vram",
            f"{unit} allocated",
            "/reserved/cap",
            figures(
                "allocated_bytes",
                "reserved_bytes",
                "cap_bytes",
                decimals=decimals,
                times=1 / unit_bytes,
            ),
        ),
        Column(
            "card_memory",
            "card GiB",
            "used/all",
            figures("device_used_bytes", "device_total_bytes", decimals=1, times=1 / GIB),
        ),
        Column("utilisation", "card", "busy %", figures("utilisation_pct")),
        Column("oom", "OOM", "/emerg", _oom),
        Column("success", "good", "%", _success),
        Column("duty", "duty %", "ask/got", figures("duty_requested", "duty_measured", times=100)),
        Column("temperature", "temp C", "/margin", figures("temperature_c", "margin_c")),
        Column("memory_temperature", "VRAM", "C", figures("memory_temperature_c")),
        Column("power", "power", "/cap W", figures("power_w", "power_limit_w")),
        Column("clock", "clock", "SM MHz", figures("sm_clock_mhz")),
        Column("throttle", "slowed", "% time", figures("throttle_pct")),
        Column("verify", "checks", "/wrong", _verify),
        Column(
            "restarts",
            "re-",
            "starts",
            lambda row: Text(whole(row.restarts) or "", "magenta" if row.restarts else ""),
        ),
        Column("heartbeat", "seen", "s ago", _heartbeat),
    )


def _training_columns(rows: Sequence[Row], glyphs: Glyphs) -> tuple[Column, ...]:
    """Return what is shown of slots that train."""
    told = [row.progress for row in rows]

    def count(*names: str) -> Cell:
        return lambda row: _text(
            joined((whole(getattr(row.progress, name)) for name in names), glyphs.missing)
        )

    def figure(*names: str, significant: int = 3) -> Cell:
        values = (getattr(progress, name) for progress in told for name in names)
        decimals = cells.decimals_for(values, significant=significant)
        return lambda row: _text(
            joined(
                (number(getattr(row.progress, name), decimals) for name in names), glyphs.missing
            )
        )

    def micro(row: Row) -> Text | None:
        parts = (whole(row.progress.micro_batch), whole(row.progress.accumulation))
        return _text(None if None in parts else "x".join(map(str, parts)))

    def eta(row: Row) -> Text | None:
        seconds = finite(row.progress.eta_s)
        return _text(None if seconds is None else cells.clock(min(seconds, _LONGEST_ETA_S)))

    return (
        Column("train_step", "step", "/of", count("train_step", "train_steps")),
        Column("loss", "loss", "/first", figure("loss", "first_loss", significant=4)),
        Column("samples", "samples", "/s", figure("samples_per_s")),
        Column("tokens", "tokens", "/s", figure("tokens_per_s")),
        Column("eta", "ETA", "", eta),
        Column("epoch", "epoch", "", figure("epoch")),
        Column("micro", "micro", "x acc", micro),
        Column("level", "level", "", count("memory_level")),
        Column("saved", "saved", "step", count("saved_step")),
        Column("redone", "redone", "steps", count("redone_steps")),
        Column("wait", "data", "wait %", figure("data_wait_pct", significant=2)),
        Column("mfu", "MFU", "%", figure("mfu_pct")),
    )


def _text(value: str | None, style: str = "") -> Text | None:
    return None if value is None else Text(value, style)


def _oom(row: Row) -> Text:
    counts = row.counts
    noted = f"{whole(counts.oom_count)}/{whole(counts.emergency_count)}"
    return Text(noted, "yellow" if counts.oom_count or counts.emergency_count else "")


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
