"""Builds the summary of a run: the JSON object that `run --json` prints and `summary.json` keeps.

Does not print it. Scripts rely on the keys: names and order stay the same, or `schema` increases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.record.model import FIELDS, Snapshot, finite
from workers.files import made_whole
from workers.messages import NO_COUNTS

SCHEMA = 1

_COUNTS = tuple(key for key in FIELDS if hasattr(NO_COUNTS, key))
_CHECKS = ("verify_checks", "verify_errors")


def summary_dict(
    snapshot: Snapshot,
    outcome: str,
    exit_code: int,
    started_at: str,
    error: str | None = None,
    *,
    faults: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the summary of a run, with values that JSON can hold without `NaN` or `Infinity`.

    The key `duration_s` is the time that the run took; `started_at` is ISO 8601 in UTC. The key
    `error` is absent if there was no error. `faults` are the processes and nodes that `--chaos`
    ended, each with its recovery.
    """
    counts = snapshot.counts
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "run_id": snapshot.run_id,
        "outcome": outcome,
        "exit_code": exit_code,
        "started_at": started_at,
        "duration_s": finite(snapshot.elapsed_s),
        "nodes_planned": list(snapshot.nodes_planned),
        "nodes_seen": list(snapshot.nodes_seen),
        "workers_planned": len(snapshot.rows),
        **{name: getattr(counts, name) for name in _COUNTS if name not in _CHECKS},
        "restart_count": snapshot.restart_count,
        "tflops_total": snapshot.tflops_total,
        **{name: getattr(counts, name) for name in _CHECKS},
        "workers": [row.to_dict() for row in snapshot.rows],
        "notices": list(snapshot.notices),
        "faults": [dict(fault) for fault in faults],
    }
    return summary if error is None else {**summary, "error": error}


def failure_dict(error: str, exit_code: int, outcome: str = "failed") -> dict[str, Any]:
    """Return the summary of a run that never began: no workers, counts of 0, the rest unknown."""
    nothing = Snapshot(run_id="", now_unix_s=0.0, elapsed_s=0.0, duration_s=0.0)
    unknown = {"run_id": None, "started_at": None, "duration_s": None, "workers_planned": None}
    return {**summary_dict(nothing, outcome, exit_code, "", error), **unknown}


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return the summary as indented JSON without a final newline.

    `ValueError` if a number is not finite.
    """
    return json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)


def write_file(path: Path, text: str) -> None:
    """Write a file atomically, readable by other users.

    `OSError` if the folder cannot be written.
    """
    with made_whole(path) as fresh:
        # Text that is not valid Unicode, such as a file name, becomes \udcXX: a valid JSON escape.
        fresh.write_bytes(text.encode("utf-8", "backslashreplace"))
