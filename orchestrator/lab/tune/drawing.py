"""The table of a tuning, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from orchestrator.lab.tune.rows import Row
from orchestrator.lab.tune.store import Result
from orchestrator.view.cells import aligned
from orchestrator.view.phrases import counted
from workers.units import MIB

_WORDS: Final = frozenset({"lever", "setting", "interval", "verdict"})
_UNKNOWN: Final = "–"  # noqa: RUF001 - the sign for an unknown value

#: Left out one after the other where a terminal is too narrow; what has no value in any row is left
#: out anyway.
_FIRST_TO_GO: Final = (
    "once s",
    "pays after",
    "host MiB",
    "gap x noise",
    "TFLOP/s",
    "MFU %",
    "samples/s",
)

_LONGEST: Final = 40
_LONGEST_IF_NARROW: Final = 18


def table(result: Result, width: int | None) -> Iterator[str]:
    """Yield the lines of a result: the rows, then the reasons, then what was chosen.

    Args:
        result: What was measured.
        width: Columns of the terminal; `None`: there is none, and no column is left out.
    """
    subject = result.subject
    yield f"Tuning {result.tune_id}: {subject.model} on {result.device_name}, torch {subject.torch}"
    dropped = ", ".join(f"{count} for {reason}" for reason, count in result.dropped.items())
    yield (
        f"{counted(result.rounds, 'round')} in {result.duration_s:.0f} s; dropped: "
        f"{dropped or 'none'}"
    )
    yield ""
    yield from _fitting(result.rows, width)
    yield ""
    yield from (
        f"{row.lever} {_cut(row.setting, _LONGEST)}: {row.verdict}: {row.reason}"
        for row in result.rows
    )
    yield ""
    if result.pareto:
        yield f"Not beaten in speed and memory: {'; '.join(result.pareto)}"
    yield f"{'Chosen' if result.decided else 'UNDECIDED, and until it is'}: {result.choice}"


def _fitting(rows: Sequence[Row], width: int | None) -> list[str]:
    """Return the table with as many columns as the terminal has room for."""
    left_out: list[str] = []
    for longest in (_LONGEST, _LONGEST_IF_NARROW):
        cells = [_cells(row, longest) for row in rows]
        kept = [name for name in cells[0] if any(row[name] != _UNKNOWN for row in cells)]
        for gone in (None, *_FIRST_TO_GO):
            left_out = [*left_out, *([] if gone is None else [gone])]
            names = [name for name in kept if name not in left_out]
            lines = list(
                aligned([names, *([row[name] for name in names] for row in cells)], _WORDS)
            )
            if width is None or max(map(len, lines)) <= width:
                return lines
    return lines


def _cells(row: Row, longest: int) -> dict[str, str]:
    interval = _UNKNOWN
    if row.speed_low is not None and row.speed_high is not None:
        interval = f"{row.speed_low:.3f} to {row.speed_high:.3f}"
    return {
        "lever": _cut(row.lever, longest),
        "setting": _cut(row.setting, longest),
        "speed x": _number(row.speed_ratio, ".3f"),
        "interval": interval,
        "samples/s": _number(row.samples_per_s, ".4g"),
        "TFLOP/s": _number(row.tflops, ".3g"),
        "MFU %": _number(row.mfu_pct, ".1f"),
        "peak MiB": _mib(row.peak_bytes, row.peak_delta_bytes),
        "host MiB": _mib(row.host_bytes, row.host_delta_bytes),
        "gap x noise": _number(row.loss_gap_noise, ".2g"),
        "once s": _number(row.once_s, ".1f"),
        "pays after": _UNKNOWN if row.pays_after_s is None else _duration(row.pays_after_s),
        "verdict": str(row.verdict),
    }


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else f"{value:{form}}"


def _mib(size_bytes: int | None, more_bytes: int | None) -> str:
    """Return a size with its difference to the baseline's, such as `24.7 (-1.5)`."""
    if size_bytes is None:
        return _UNKNOWN
    return f"{size_bytes / MIB:.1f}" + (
        f" ({more_bytes / MIB:+.1f})" if more_bytes is not None else ""
    )


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "at once"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
