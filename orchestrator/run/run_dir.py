"""The folder of one run: created, checked before it is written to, and locked against other heads.

Does not know its content, apart from the note with the head's process id, which `head_process.py` reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.cluster.orphan_reaper import start_time
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from orchestrator.watch.head_process import NOTE_NAME


def new_folder(config: Config) -> Path:
    """Make `runs/<run_id>/`.

    Raises:
        UsageError: It cannot be made.
    """
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(config.run.dir) / run_id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def check_mine(folder: Path) -> None:
    """Refuse a folder in which another user may have placed links or another cluster's address.

    Raises:
        UsageError: It is such a folder.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{folder} belongs to another user, or other users may write in it; copy it into your own run "
            f"folder if you trust it, and resume the copy"
        )


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Leave this process's id in the run folder, and keep every other head out of it.

    The kernel releases the lock with the process, however it ends.

    Raises:
        UsageError: Another head works on this run, or the folder cannot be written.
    """
    try:
        descriptor = os.open(folder / NOTE_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        _claim(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _claim(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"another process works on run {folder.name}; end it first: python -m orchestrator stop"
        ) from error
    note = json.dumps({"pid": os.getpid(), "started": start_time(os.getpid())})
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, note.encode("ascii"))
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write the run folder {folder}: {error.strerror}; choose another with --run-dir")
