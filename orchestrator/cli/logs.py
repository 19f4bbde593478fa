"""The verb `logs`: the last lines that a worker in a slot or a job printed, and what comes after.

Does not know how output is kept (`record/output.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from orchestrator.cli.jobs import snapshot_of, standing_of
from orchestrator.errors import UsageError
from orchestrator.jobs.model import ENDED
from orchestrator.record.archive import head_of, read_run
from orchestrator.record.folders import find_queue, find_run
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.record.output import last_lines

_LOOK_EVERY_S: Final = 0.5


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
