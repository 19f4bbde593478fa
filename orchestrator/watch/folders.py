"""Finds runs: lists the run folders, and resolves a run id as the user typed it.

Covers the names of runs, which are hostile input, and runs that left no store. Does not cover what is in a store
(`archive.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.errors import ArchiveError, NothingStoredError, UsageError, one_line
from orchestrator.watch.archive import StoredRun, read_run
from orchestrator.watch.head_process import head_of
from orchestrator.watch.safe_read import read_small

LATEST = "latest"
UNREADABLE = "unreadable"
"""The outcome of a run whose store cannot be read."""

_RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
"""As `run` makes them: the moment in UTC, and four digits of chance."""
_SUMMARY_NAME = "summary.json"
_SUMMARY_MOST_BYTES = 16 * 2**20
"""A summary of ten thousand workers and ten thousand faults has 13 MiB."""
_SUFFIX = re.compile(r"[0-9a-f-]{4,19}")
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One run folder, whatever is left in it."""

    run_id: str
    folder: Path
    outcome: str
    exit_code: int | None
    run: StoredRun | None
    """`None` where nothing was stored, or what was cannot be read."""
    error: str | None
    """Why the run ended early, or why it cannot be read."""

    @property
    def started_at_unix_s(self) -> float | None:
        """When the run began; its name tells as well, to the second."""
        if self.run is not None:
            return self.run.facts.started_at_unix_s
        try:
            return datetime.strptime(self.run_id[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
        except ValueError:
            return None


def list_runs(runs_dir: Path) -> tuple[Listed, ...]:
    """Return every run in the folder, the newest first; none if there is no such folder.

    Raises:
        ArchiveError: The folder cannot be read.
    """
    return tuple(_listed(runs_dir / run_id) for run_id in _run_ids(runs_dir))


def find_run(runs_dir: Path, run_id: str) -> Path:
    """Return the folder of a run.

    Args:
        runs_dir: Where run folders are.
        run_id: The name of a run, its end (four characters or more) if no other run ends so, or `latest`.

    Raises:
        UsageError: There is no such run, or the end of more than one.
        ArchiveError: The folder cannot be read.
    """
    known = _run_ids(runs_dir)
    if run_id == LATEST:
        meant = known[:1]
    elif _RUN_ID.fullmatch(run_id):
        meant = [name for name in known if name == run_id]
    else:
        meant = [name for name in known if _SUFFIX.fullmatch(run_id) and name.endswith(run_id)]
    if len(meant) == 1:
        return runs_dir / meant[0]
    if meant:
        raise UsageError(one_line(f"{len(meant)} runs end in {run_id}: {', '.join(meant[:_NAMED])}"))
    if not known:
        raise UsageError(one_line(f"there is no run in {runs_dir}; `python -m orchestrator run` makes one"))
    newest = ", ".join(known[:_NAMED])
    raise UsageError(one_line(f"there is no run {run_id[:80]!r} in {runs_dir}; the newest: {newest}"))


def summary_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the content of a run's summary.json; `None` if there is none that can be read."""
    try:
        return _summary(folder)
    except ArchiveError:
        return None


def _summary(folder: Path) -> Mapping[str, Any] | None:
    """Return what is in summary.json; `None` if there is none, or none that was written to its end.

    Raises:
        ArchiveError: What is there is nothing that a run wrote.
    """
    path = folder / _SUMMARY_NAME
    try:
        told = json.loads(read_small(path, _SUMMARY_MOST_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as failure:
        raise ArchiveError(one_line(f"{path} cannot be read: {failure.strerror}")) from failure
    return told if isinstance(told, dict) else None


def _run_ids(runs_dir: Path) -> list[str]:
    """Return the names of the run folders, the newest first. Links are skipped: they may lead anywhere."""
    try:
        return sorted(
            (
                entry.name
                for entry in runs_dir.iterdir()
                if _RUN_ID.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
            ),
            reverse=True,
        )
    except FileNotFoundError:
        return []
    except OSError as failure:
        raise ArchiveError(
            one_line(f"{runs_dir} cannot be read: {failure.strerror}; name the right folder with --run-dir")
        ) from failure


def _listed(folder: Path) -> Listed:
    try:
        run = read_run(folder)
    except NothingStoredError:
        return _without_store(folder)
    except ArchiveError as failure:
        return _entry(folder, UNREADABLE, error=str(failure))
    return _entry(folder, run.outcome, exit_code=run.exit_code, run=run, error=run.error)


def _without_store(folder: Path) -> Listed:
    """Return a run that ended before it stored anything: as its summary says, else by its head."""
    try:
        told = _summary(folder)
    except ArchiveError as failure:
        return _entry(folder, UNREADABLE, error=str(failure))
    if told is None:
        return _entry(folder, "interrupted" if head_of(folder) is None else "running")
    code, error = told.get("exit_code"), told.get("error")
    return _entry(
        folder,
        str(told.get("outcome")),
        exit_code=code if isinstance(code, int) else None,
        error=None if error is None else str(error),
    )


def _entry(
    folder: Path, outcome: str, *, exit_code: int | None = None, run: StoredRun | None = None, error: str | None = None
) -> Listed:
    return Listed(run_id=folder.name, folder=folder, outcome=outcome, exit_code=exit_code, run=run, error=error)
