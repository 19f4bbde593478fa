"""Where `top` goes: on a terminal the screen of `app.py`, elsewhere, or with `--once`, one plain
frame; or JSON.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from rich.text import Text

from orchestrator.control import client
from orchestrator.errors import UsageError
from orchestrator.record.archive import Follower
from orchestrator.record.query import WORST_FIRST, QueryError, order_of, parse
from orchestrator.record.summary import SCHEMA, summary_text
from orchestrator.view.jobs import with_jobs
from orchestrator.view.table import header_lines, table_lines
from orchestrator.view.top.view import View


def view_of(sort: str | None, wanted: str | None) -> View:
    """Return the view that the options ask for; `UsageError` where they make no sense."""
    try:
        order = (
            WORST_FIRST
            if sort is None
            else order_of(sort.removeprefix("-"), reverse=sort.startswith("-"))
        )
        return View(order=order, wanted=parse(wanted or ""))
    except QueryError as failure:
        raise UsageError(str(failure)) from failure


def frame_text(folder: Path, view: View, width: int) -> str:
    """Return the run as it is now, once, with all rows."""
    frame = Follower(folder).look()
    rows = view.rows(frame.snapshot.rows)
    header = header_lines(with_jobs(frame.snapshot, frame.queue), width)
    lines = table_lines(rows, width)
    said = [*lines.titles, *lines.rows] if rows else [Text("no slot matches the filter")]
    shown = [line.copy() for line in (*header, *said)]
    for line in shown:
        line.truncate(width)
    return "\n".join(line.plain.rstrip() for line in shown)


def frame_json(folder: Path, view: View) -> str:
    """Return the same as one JSON object: the rows that are shown, in their order."""
    frame = Follower(folder).look()
    snapshot = frame.snapshot
    values = {
        "schema": SCHEMA,
        "run_id": snapshot.run_id,
        "freshness": frame.freshness.value,
        "late_s": round(frame.late_s, 1),
        "outcome": frame.run.outcome,
        "elapsed_s": snapshot.elapsed_s,
        "duration_s": snapshot.duration_s,
        "tflops_total": snapshot.tflops_total,
        "workers": [row.to_dict() for row in view.rows(snapshot.rows)],
        "notices": list(snapshot.notices),
    }
    return summary_text(values)


def watch(folder: Path, view: View, *, read_only: bool) -> None:
    """Show the run on this terminal until the person leaves."""
    from orchestrator.view.top.app import Top  # noqa: PLC0415 - Textual takes half a second to load

    Top(folder, view, None if read_only else partial(client.send, by="top")).run()


def is_terminal() -> bool:
    """Say whether a screen can be drawn and keys be read."""
    streams = (sys.stdin, sys.stdout, sys.stderr)  # Textual draws on the last one
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM") not in {
        None,
        "",
        "dumb",
    }
