"""The folder of one run: created, checked before it is written to, and locked against other heads.

Does not know its content, apart from the note with the head's process id, which `archive.py` reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shlex
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from orchestrator.record.archive import NOTE_NAME
from workers.host.processes import start_time


def new_folder(config: Config) -> Path:
    """Make `runs/<run_id>/`; `UsageError` if it cannot be made."""
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(config.run.dir) / run_id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def check_mine(folder: Path) -> None:
    """Refuse, as a `UsageError`, a folder in which another user may have placed links or another
    cluster's address.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{folder} belongs to another user, or other users may write in it; copy it into your "
            "own run "
            f"folder if you trust it, and resume the copy"
        )


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Leave this process's id in the run folder, and keep every other head out of it.

    The kernel releases the lock with the process, however it ends.

    Raises:
        UsageError: Another head works on this run, or the folder cannot be written.
    """
    note = json.dumps({"pid": os.getpid(), "started": start_time(os.getpid())})
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder / NOTE_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, note.encode("ascii"))
        except BlockingIOError as error:
            raise UsageError(
                f"another process works on run {folder.name}; end it first: "
                f"python -m orchestrator stop --run-dir {shlex.quote(str(folder.parent))}"
            ) from error
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write the run folder {folder}: {error.strerror}; choose another with --run-dir"
    )
