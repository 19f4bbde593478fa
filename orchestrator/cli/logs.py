"""The verb `logs`: the last lines that a worker in a slot or a job printed, and what comes after;
and `jobs submit --wait`, which prints all of them.

Does not know how output is kept (`record/output.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import typer

from orchestrator.cli.jobs import snapshot_of, standing_of, waiting_jobs
from orchestrator.errors import UsageError
from orchestrator.jobs.journal import QUEUE_NAME
from orchestrator.jobs.model import ENDED, Job, JobState, Standing
from orchestrator.record.archive import head_of, read_run
from orchestrator.record.folders import command_for, find_queue, find_run, go_on_command
from orchestrator.record.jobs import QueueReader
from orchestrator.record.output import Follower, last_lines

_LOOK_EVERY_S: Final = 0.5
_INTERRUPTED: Final = 130
_EXIT_MOST: Final = 255


def output_of(runs_dir: Path, run_id: str, name: str, *, follow: bool) -> Iterator[str]:
    """Yield the last lines of a slot (`pc1/3`) or a job, and with `follow` those that it prints
    until it has ended.

    Raises:
        UsageError: There is no such run, slot or job.
    """
    folder = _folder(runs_dir, run_id, name)
    state, is_over = _state(folder, name)
    lines = last_lines(folder, name)
    follow = follow and not is_over
    if not lines and not follow:
        yield f"{name} has printed nothing{state}"
    yield from lines
    while follow:
        time.sleep(_LOOK_EVERY_S)
        follow = not _state(folder, name)[1]  # before the last look at its lines
        before, lines = lines, last_lines(folder, name)
        yield from _added(before, lines)


def wait_for(folder: Path, job: Job) -> int:
    """Print what a job of a run folder prints, until it has ended; return the exit code for it.

    That of its program, 0 where it is DONE, else 1. Ctrl-C ends this and not the job: 130.

    Raises:
        UsageError: The queue has not taken the job.
    """
    output, reader = Follower(folder, job.name), QueueReader(folder)
    had_head, ended = True, None
    try:
        while ended is None:
            has_head = head_of(folder) is not None
            if had_head and not has_head:
                typer.echo(f"the queue waits for a head: `{go_on_command(folder)}`", err=True)
            had_head = has_head
            standing = _standing(folder, reader, job)
            if standing is not None and standing.state in ENDED:
                ended = standing
            typer.echo(output.more(is_last=ended is not None), nl=False)
            if ended is None:
                time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        see = command_for(folder, "jobs", "show", job.name)
        typer.echo(f"{job.name} goes on without this; look at it: {see}", err=True)
        return _INTERRUPTED
    typer.echo(f"{job.name} is {ended.state}: {ended.reason}", err=True)
    if ended.state is JobState.DONE:
        return 0
    code = ended.exit_code if ended.state is JobState.FAILED else None
    return code if code is not None and 0 < code <= _EXIT_MOST else 1


def _standing(folder: Path, reader: QueueReader, job: Job) -> Standing | None:
    """Return how a job stands that was submitted; `None`: the head has not taken it yet."""
    waits = any(one.name == job.name for one in waiting_jobs(folder))  # before the look at others
    snapshot = reader.look((), time.time())
    found = [one for one in snapshot.standings if one.job.name == job.name] if snapshot else []
    if found and found[0].job.id == job.id:
        return found[0]
    if waits:
        return None
    raise UsageError(f"the queue has refused {job.name}: events.jsonl in {folder} says why")


def _folder(runs_dir: Path, run_id: str, name: str) -> Path:
    """Return the run that is meant: for the name of a job, the newest with a queue."""
    if not _is_slot(name):
        with suppress(UsageError):
            return find_queue(runs_dir, run_id)
    return find_run(runs_dir, run_id)


def _is_slot(name: str) -> bool:
    return "/" in name


def _state(folder: Path, name: str) -> tuple[str, bool]:
    """Return how a job stands, in words, and whether nothing more will be printed."""
    is_over = head_of(folder) is None
    if not _is_slot(name) and (folder / QUEUE_NAME).is_dir():
        standing = standing_of(snapshot_of(folder), name)
        words = f"; it is {standing.state.value}: {standing.reason}"
        return words, is_over or standing.state in ENDED
    known = [record.slot for record in read_run(folder).slots]
    if name not in known:
        raise UsageError(f"run {folder.name} has no slot {name!r}; valid: {', '.join(known)}")
    return "", is_over


def _added(before: Sequence[str], lines: Sequence[str]) -> Sequence[str]:
    """Return the lines that are new since a look before."""
    for begin in range(len(before)):
        common = before[begin:]
        if lines[: len(common)] == common:
            return lines[len(common) :]
    return lines
