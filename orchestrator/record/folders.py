"""Finds runs: lists the run folders, and resolves a run id that the user typed.

Names of runs are hostile input, and a run may have no store. Does not read stores (`archive.py`). A
folder that cannot be read is an `ArchiveError`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.errors import ArchiveError, NothingStoredError, UsageError, one_line
from orchestrator.record.archive import StoredRun, head_of, read_run
from orchestrator.record.jobs import QUEUE_NAME

LATEST = "latest"
RUNNING = "running"
UNREADABLE = "unreadable"
"""The outcome of a run whose store cannot be read."""

_RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
"""The form of run ids: time in UTC, and four random hexadecimal digits."""

_DEFAULT_RUNS_DIR = Path(RunConfig.model_fields["dir"].default)
_SUFFIX = re.compile(r"[0-9a-f-]{4,20}")
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run folder, with or without a readable store."""

    folder: Path
    outcome: str
    run: StoredRun | None = None
    """`None`: nothing was stored, or the store cannot be read."""
    error: str | None = None
    """Why the run ended early, or why it cannot be read."""

    @property
    def run_id(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def started_at_unix_s(self) -> float | None:
        """When the run began, from its store, or to the second from its name."""
        if self.run is not None:
            return self.run.facts.started_at_unix_s
        try:
            named = datetime.strptime(self.run_id[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
        except ValueError:
            return None
        return named.timestamp()


def command_for(folder: Path, *words: str) -> str:
    """Return a command line such as `report` for the run in `folder`, which it names.

    `jobs run` is not given a name: it finds the queue itself.
    """
    name = [folder.name] if words[0] != "jobs" else ["--run", folder.name] * (words[1] != "run")
    command = ["python", "-m", "orchestrator", *words, *name]
    if folder.parent != _DEFAULT_RUNS_DIR:
        command += ["--run-dir", str(folder.parent)]
    return shlex.join(command)


def go_on_command(folder: Path) -> str:
    """Return the command that starts another head to continue a run."""
    if (folder / QUEUE_NAME).is_dir() and find_queue(folder.parent, LATEST) == folder:
        return command_for(folder, "jobs", "run")
    return command_for(folder, "run", "--resume")


def list_runs(runs_dir: Path) -> Iterator[ListedRun]:
    """Yield every run in the folder, newest first, read one by one; none if there is no folder."""
    return (listed_run(runs_dir / run_id) for run_id in _run_ids(runs_dir))


def run_object(one: ListedRun) -> dict[str, Any]:
    """Return a run as an object for JSON; `None` is unknown."""
    run, facts, snapshot = one.run, None, None
    if run is not None:
        facts, snapshot = run.facts, run.snapshot()
    counts = snapshot and snapshot.counts
    return {
        "run_id": one.run_id,
        "started_at_unix_s": one.started_at_unix_s,
        "mode": facts and facts.mode,
        "outcome": one.outcome,
        "exit_code": run and run.exit_code,
        "elapsed_s": run and run.elapsed_s,
        "duration_s": facts and facts.duration_s,
        "remaining_s": run and run.remaining_s,
        "heads": facts and facts.heads,
        "workers": run and len(run.slots),
        "steps_ok": counts and counts.steps_ok,
        "success_rate": counts and counts.success_rate,
        "oom_count": counts and counts.oom_count,
        "restart_count": snapshot and snapshot.restart_count,
        "incomplete": run and run.incomplete,
        "error": one.error,
    }


def find_run(runs_dir: Path, run_id: str) -> Path:
    """Return a run's folder by its name, by the end of its name (4 characters or more), or by
    `latest` or `running`. `UsageError` if no run or several match.

    `latest` is the newest run that had workers or may still get some, else the newest of all;
    `running` is the newest whose head is at work.
    """
    names, runs = _run_ids(runs_dir), list_runs(runs_dir)
    if run_id == LATEST:
        # A run that was refused before it had a worker, such as without a cluster, shows nothing.
        worked = (
            it.run_id
            for it in runs
            if it.outcome != "failed"
            or (it.run is not None and (it.run.slots or not it.run.was_refused))
        )
        matching = list(islice(worked, 1)) or names[:1]
    elif run_id == RUNNING:
        going = (run.run_id for run in runs if run.outcome == RUNNING)
        matching = list(islice(going, 1))
    else:
        matching = [name for name in names if _SUFFIX.fullmatch(run_id) and name.endswith(run_id)]
    if len(matching) == 1:
        return runs_dir / matching[0]

    if matching:
        why = f"{len(matching)} runs end in {run_id}: {', '.join(matching[:_NAMED])}"
    elif run_id == RUNNING:
        why = f"no run is running in {runs_dir}; `python -m orchestrator runs` lists all runs"
    elif not names:
        why = f"there is no run in {runs_dir}; `python -m orchestrator run` makes one"
    else:
        newest = ", ".join(names[:_NAMED])
        why = f"there is no run {run_id[:80]!r} in {runs_dir}; the newest: {newest}"
    raise UsageError(one_line(why))


def find_queue(runs_dir: Path, run_id: str) -> Path:
    """Return the folder of a run with a queue of jobs, by the name of the run or its end;
    `UsageError` if there is none.

    `latest` is the newest run with a queue, even if its head has ended.
    """
    begin = "`python -m orchestrator jobs run FILE` begins one"
    if run_id == LATEST:
        names = (name for name in _run_ids(runs_dir) if (runs_dir / name / QUEUE_NAME).is_dir())
        newest = next(names, None)
        if newest is None:
            raise UsageError(one_line(f"there is no queue of jobs in {runs_dir}; {begin}"))
        return runs_dir / newest
    folder = find_run(runs_dir, run_id)
    if not (folder / QUEUE_NAME).is_dir():
        raise UsageError(one_line(f"run {folder.name} has no queue of jobs; {begin}"))
    return folder


def _run_ids(runs_dir: Path) -> list[str]:
    """Return the names of the run folders, newest first. Symbolic links are skipped: they may lead
    anywhere.
    """
    try:
        entries = [
            entry for entry in runs_dir.iterdir() if entry.is_dir() and not entry.is_symlink()
        ]
    except FileNotFoundError:
        return []
    except OSError as failure:
        raise ArchiveError(
            f"{runs_dir} cannot be read: {failure.strerror}; name the right folder with --run-dir"
        ) from failure
    return sorted((entry.name for entry in entries if _RUN_ID.fullmatch(entry.name)), reverse=True)


def listed_run(folder: Path) -> ListedRun:
    """Return the run in a folder, with the outcome that its files show."""
    try:
        run = read_run(folder)
    except NothingStoredError:
        return ListedRun(folder=folder, outcome=RUNNING if head_of(folder) else "interrupted")
    except ArchiveError as failure:
        return ListedRun(folder=folder, outcome=UNREADABLE, error=str(failure))
    return ListedRun(folder=folder, outcome=run.outcome, run=run, error=run.error)
