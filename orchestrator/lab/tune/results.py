"""What a tuning says: the rows, the result, where it is kept, and the table for people.

    STATE/tunings/ID/tune.json     header and rows, as `tune --json` prints them
    STATE/tunings/ID/tuned.yaml    the user's file with the chosen settings

A result holds for one card, driver, torch and model. Whether it still helps another one is for the
reader to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from orchestrator.lab.tune.statistics import LeverVerdict, ParityClass
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Cell, Column, Table, TableRow, Tone
from orchestrator.view.terminal import plain_text, table_lines
from workers.learned_limits import default_path
from workers.units import MIB

_TONES: Final = {
    LeverVerdict.FASTER: Tone.GOOD,
    LeverVerdict.LESS_MEMORY: Tone.GOOD,
    LeverVerdict.BROKEN: Tone.BAD,
    LeverVerdict.UNAVAILABLE: Tone.DIM,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRow:
    """One lever at one setting.

    Its fields are the keys of `tune --json`; `None` means not known.
    """

    lever: str
    """The key of `train:` or `workload:`; `all chosen`: the chosen ones together."""
    setting: str
    speed_ratio: float | None = None
    """Samples per second divided by the baseline's of the same round, the median."""
    speed_low: float | None = None
    speed_high: float | None = None
    """With `speed_low` the interval of `speed_ratio`."""
    rounds: int = 0
    """Pairs of a turn of the lever and one of the baseline."""
    peak_bytes: int | None = None
    """The highest use of the device by tensors in the first steps."""
    parity_class: ParityClass | None = None
    loss_gap: float | None = None
    """The largest relative difference of the losses of the first steps to the baseline's."""
    verdict: LeverVerdict
    reason: str
    samples_per_s: float | None = None
    """Optimised samples, or tokens where lengths differ; for matmul 10^9 operations; the median."""
    peak_delta_bytes: int | None = None
    """`peak_bytes` less the baseline's."""
    host_bytes: int | None = None
    """Resident memory of the process."""
    host_delta_bytes: int | None = None
    once_s: float | None = None
    """What the first step took beyond another one, such as a compilation."""

    @property
    def name(self) -> str:
        """As `Candidate.name`."""
        return f"{self.lever}={self.setting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """A tuning that is over, or as far as it came."""

    schema: Literal[3] = 3
    tune_id: str
    subject: Mapping[str, str | None]
    """What it holds for: `card` (its UUID, or `cpu`), `driver`, `torch`, and `model`: a preset, or
    `matmul`.
    """
    device_name: str
    """As people know it, such as `NVIDIA GeForce RTX 3090`."""
    created_at: str
    """ISO 8601, UTC."""
    duration_s: float
    rounds: int
    """Of all levers together."""
    rows: tuple[LeverRow, ...] = ()
    """In the order in which they were measured."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section that was tuned, with the chosen values."""
    choice: str = ""
    """Why, in a sentence."""
    decided: bool = False
    """Whether every lever that could have been chosen was measured well enough to tell."""


def tunings_folder() -> Path:
    """Return the folder of all tunings of this user."""
    return default_path().parent / "tunings"


def json_text(result: TuningResult) -> str:
    """Return the result as `tune --json` prints it and `tune.json` keeps it."""
    return json.dumps(asdict(result), indent=2, allow_nan=False)


def result_text(result: TuningResult, width: int | None) -> str:
    """Return what people read: the rows, then their reasons, then what was chosen.

    Args:
        result: What was measured.
        width: Columns of the terminal; `None`: there is none, and no column is left out.
    """
    head = (
        f"Tuning {result.tune_id}: {result.subject['model']} on {result.device_name}; "
        f"{counted(result.rounds, 'round')} in {result.duration_s:.0f} s"
    )
    lines = plain_text(table_lines(tuning_table(result), width))
    return f"{head}\n\n{lines}\n\n{result.choice}"


def tuning_table(result: TuningResult) -> Table:
    """Return the table of a result: what helps first, of equal verdicts the fastest first."""
    order = list(LeverVerdict)
    rows = sorted(
        result.rows, key=lambda row: (order.index(row.verdict), -(row.speed_ratio or 0.0))
    )
    return Table(
        name="tuning",
        columns=_COLUMNS,
        rows=tuple(
            TableRow(
                key=row.name,
                cells=_cells(row),
                reason=row.reason,
                tone=_TONES.get(row.verdict, Tone.PLAIN),
            )
            for row in rows
        ),
    )


_COLUMNS: Final = (
    Column(key="name", title="lever", most_cells=40),
    Column(key="verdict", title="verdict"),
    Column(key="speed_ratio", title="speed", unit="x", numeric=True),
    Column(key="interval", title="interval"),
    Column(key="peak_bytes", title="peak", unit="MiB", numeric=True, priority=1),
    Column(key="rounds", title="rounds", numeric=True, priority=2),
    Column(key="samples_per_s", title="samples", unit="a second", numeric=True, priority=3),
    Column(key="host_bytes", title="host", unit="MiB", numeric=True, priority=4),
    Column(key="once_s", title="once", unit="s", numeric=True, priority=5),
)


def _cells(row: LeverRow) -> tuple[Cell, ...]:
    """Return the cells of a row, in the order of `_COLUMNS`."""
    interval = Cell()
    if row.speed_low is not None:
        interval = Cell(text=f"{row.speed_low:.3f} to {row.speed_high:.3f}", value=row.speed_low)
    return (
        Cell(text=row.name, value=row.name),
        Cell(text=row.verdict, tone=_TONES.get(row.verdict, Tone.PLAIN), value=row.verdict),
        _number(row.speed_ratio, ".3f"),
        interval,
        _mib(row.peak_bytes, row.peak_delta_bytes),
        _number(row.rounds, "d"),
        _number(row.samples_per_s, ".4g"),
        _mib(row.host_bytes, row.host_delta_bytes),
        _number(row.once_s, ".1f"),
    )


def _number(value: float | None, form: str) -> Cell:
    return Cell() if value is None else Cell(text=f"{value:{form}}", value=value)


def _mib(size_bytes: int | None, more_bytes: int | None) -> Cell:
    """Return a size with its difference to the baseline's, such as `24.7 (-1.5)`."""
    if size_bytes is None:
        return Cell()
    more = "" if more_bytes is None else f" ({more_bytes / MIB:+.1f})"
    return Cell(text=f"{size_bytes / MIB:.1f}{more}", value=size_bytes)
