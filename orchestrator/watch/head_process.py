"""Whether the head of a run still lives on this machine.

Covers identifying a process by its id and its start time. Does not cover heads on other machines, nor what to do with
one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil

from orchestrator.cluster.orphan_reaper import start_time
from orchestrator.watch.safe_read import read_small

NOTE_NAME = "head.json"
"""The note in a run folder that says which process works on it."""
_NOTE_MOST_BYTES = 64 * 2**10


def head_of(folder: Path) -> psutil.Process | None:
    """Return the head of a run folder if it still runs, by the note in it; `None` as well if it is this process.

    The same process id, and not started after the note was written; started exactly then, where the note says when.
    """
    note = folder / NOTE_NAME
    try:
        told = json.loads(read_small(note, _NOTE_MOST_BYTES))
        pid = told["pid"]
        if type(pid) is not int or pid <= 1:  # true is an int, and 1 is init
            return None
        process = psutil.Process(pid)
        is_head = process.create_time() <= note.stat().st_mtime + 1.0 and process.pid != os.getpid()
        began = told.get("started")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, psutil.Error):
        return None
    if not is_head or (began is not None and start_time(pid) != began):
        return None
    return process if not (folder / "summary.json").exists() else None


def lives(pid: int, started: str) -> bool:
    """Say whether a process lives here.

    Args:
        pid: Its id.
        started: When it began, in the kernel's ticks as `start_time` gives them.
    """
    try:
        # A zombie is still listed.
        return start_time(pid) == started and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False
