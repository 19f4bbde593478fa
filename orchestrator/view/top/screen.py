"""Where `top` goes: on a terminal the screen of `app.py`, elsewhere, or with `--once`, one plain
frame; or JSON.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from orchestrator.record.archive import Follower
from orchestrator.record.summary import SCHEMA, summary_text
from orchestrator.view.health import header_lines
from orchestrator.view.jobs import with_jobs
from orchestrator.view.orders import give
from orchestrator.view.slots import slots_table
from orchestrator.view.terminal import plain_text, table_lines
from orchestrator.view.top.view import View, column_of


def view_of(sort: str | None, wanted: str | None) -> View:
    """Return the view that the options ask for; `UsageError` where no column is called so."""
    by = sort or ""
    column = column_of(by.removeprefix("-")) if by else None
    return View(words=wanted or "", column=column, reverse=by.startswith("-"))


def frame_text(folder: Path, view: View, width: int) -> str:
    """Return the run as it is now, once, with all rows."""
    frame = Follower(folder).look()
    table = view.of(slots_table(frame.snapshot))
    header = header_lines(with_jobs(frame.snapshot, frame.queue), width)
    lines = table_lines(table, width) if table.rows else [Text("no slot matches the filter")]
    return plain_text([*header, *lines])


def frame_json(folder: Path, view: View) -> str:
    """Return the same as one JSON object: the rows that are shown, in their order."""
    frame = Follower(folder).look()
    snapshot = frame.snapshot
    rows = {row.slot: row for row in snapshot.rows}
    values = {
        "schema": SCHEMA,
        "run_id": snapshot.run_id,
        "freshness": frame.freshness.value,
        "late_s": round(frame.late_s, 1),
        "outcome": frame.run.outcome,
        "elapsed_s": snapshot.elapsed_s,
        "duration_s": snapshot.duration_s,
        "tflops_total": snapshot.tflops_total,
        "workers": [rows[row.key].to_dict() for row in view.of(slots_table(snapshot)).rows],
        "notices": list(snapshot.notices),
    }
    return summary_text(values)


def watch(folder: Path, view: View, *, read_only: bool) -> None:
    """Show the run on this terminal until the person leaves."""
    from orchestrator.view.top.app import Top  # noqa: PLC0415 - Textual takes half a second to load

    Top(folder, view, None if read_only else partial(give, by="top")).run()


def is_terminal() -> bool:
    """Say whether a screen can be drawn and keys be read; Textual draws on the last stream."""
    return sys.stdin.isatty() and sys.stdout.isatty() and Console(stderr=True).is_interactive
