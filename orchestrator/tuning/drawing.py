"""The table of a tuning, for people."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.tuning.rows import Row
from orchestrator.tuning.store import Result
from orchestrator.watch.cells import aligned
from orchestrator.watch.phrases import counted
from workers.units import MIB

_HEADINGS = ("lever", "setting", "guide says", "speed x", "interval", "peak MiB", "parity", "gap x noise", "verdict")
_WORDS = {"lever", "setting", "guide says", "interval", "parity", "verdict"}
_UNKNOWN = "–"  # noqa: RUF001 - the sign for an unknown value

_LONGEST_SETTING = 40


def table(result: Result) -> Iterator[str]:
    """Yield the lines of a result: the rows, then the reasons, then what was chosen."""
    subject = result.subject
    yield f"Tuning {result.tune_id}: {subject.model} on {result.device_name}, torch {subject.torch}"
    dropped = ", ".join(f"{count} for {reason}" for reason, count in result.dropped.items())
    yield f"{counted(result.rounds, 'round')} in {result.duration_s:.0f} s; dropped: {dropped or 'none'}"
    yield ""
    yield from aligned([_HEADINGS, *(_cells(row) for row in result.rows)], _WORDS)
    yield ""
    yield from (f"{row.lever} {_cut(row.setting)}: {row.verdict}: {row.reason}" for row in result.rows)
    yield ""
    if result.pareto:
        yield f"Not beaten in speed and memory: {'; '.join(result.pareto)}"
    yield f"{'Chosen' if result.decided else 'UNDECIDED, and until it is'}: {result.choice}"


def _cells(row: Row) -> tuple[str, ...]:
    interval = _UNKNOWN
    if row.speed_low is not None and row.speed_high is not None:
        interval = f"{row.speed_low:.3f} to {row.speed_high:.3f}"
    return (
        row.lever,
        _cut(row.setting),
        row.claim or _UNKNOWN,
        _UNKNOWN if row.speed_ratio is None else f"{row.speed_ratio:.3f}",
        interval,
        _UNKNOWN if row.peak_bytes is None else f"{row.peak_bytes / MIB:.1f}",
        row.parity_class or _UNKNOWN,
        _UNKNOWN if row.loss_gap_noise is None else f"{row.loss_gap_noise:.2g}",
        str(row.verdict),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SETTING else f"{text[: _LONGEST_SETTING - 1]}…"
