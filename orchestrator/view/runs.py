"""The table of runs, the newest first: what `runs`, `top` and the page list. Pure.

Does not find and read them (`record/folders.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from orchestrator.record.folders import Listed, run_object
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.view.cells import clock, moment, share_pct
from orchestrator.view.tables import Column, Table, TableRow, Tone, row_of

_COLUMNS: Final = (
    Column(key="run_id", title="run"),
    Column(key="started_at_unix_s", title="started", priority=2),
    Column(key="mode", title="mode", priority=9),
    Column(key="outcome", title="outcome"),
    Column(key="exit_code", title="exit", numeric=True, priority=3),
    Column(key="elapsed_s", title="worked", numeric=True, priority=1),
    Column(key="workers", title="workers", numeric=True, priority=8),
    Column(key="steps_ok", title="steps ok", numeric=True, priority=4),
    Column(key="success_rate", title="good %", numeric=True, priority=5),
    Column(key="oom_count", title="OOM", numeric=True, priority=6),
    Column(key="restart_count", title="restarts", numeric=True, priority=7),
)
"""Their keys are those of a run in JSON."""

OUTCOME_TONES: Final[Mapping[str, Tone]] = {
    "good": Tone.GOOD,
    "degraded": Tone.WARN,
    "interrupted": Tone.WARN,
    "failed": Tone.BAD,
}


def runs_table(listed: Iterable[Listed]) -> Table:
    """Return the table of these runs, in their order."""
    return Table(name="runs", columns=_COLUMNS, rows=tuple(map(_row, listed)))


def _row(one: Listed) -> TableRow:
    told = run_object(one)
    started_s, workers = told["started_at_unix_s"], told["workers"]
    # A queue ends when it is empty.
    spans = ("elapsed_s", "duration_s")[: 1 if (one.folder / QUEUE_NAME).exists() else 2]
    texts = {
        "started_at_unix_s": None if started_s is None else moment(started_s),
        "elapsed_s": None if workers is None else "/".join(clock(told[span]) for span in spans),
        "success_rate": share_pct(told["success_rate"]),
    }
    tones = {"outcome": OUTCOME_TONES.get(one.outcome, Tone.PLAIN)}
    return row_of(_COLUMNS, one.run_id, told, texts, tones)
