"""The folder of one run: created, checked before it is written to, and locked against other heads;
and the copies of the slots' states in it, put together from the pieces that statuses carry.

A worker begins at the copy where its own node has nothing newer: on another PC, or after its disk
was lost. Not written through to the disk: that would hold up the head, and a copy is verified when
it is read.
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
from typing import Final

from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from orchestrator.record.archive import NOTE_NAME
from workers.engine.pieces import ReceivedFile, SavedPieces, whole_of
from workers.keeper.processes import start_time
from workers.messages import CheckpointPiece, KeptBytes, Status

#: Of a run folder: the copies of the slots' states.
STATES: Final = "states"


def new_folder(config: Config) -> Path:
    """Make `runs/<run_id>/`; `UsageError` if it cannot be made."""
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(config.run.dir) / run_id
    try:
        folder.mkdir(mode=0o755, parents=True)  # also where groups may write: it takes commands
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def weights_of(runs_dir: Path, start: str) -> Path:
    """Return where the weights are that `train.from` names: in the folder of that run."""
    run_id, _, slot = start.partition("/")
    return runs_dir / run_id / STATES / f"{slot}.weights"


def check_mine(folder: Path) -> None:
    """Refuse, as a `UsageError`, a folder in which another user may have placed links or another
    cluster's address.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{folder} belongs to another user, or other users may write in it; copy it into your "
            "own run folder if you trust it, and resume the copy"
        )


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
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


class CheckpointKeeper:
    """The copies of one run; a folder that cannot be written costs only them."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet."""
        self._folder = folder
        self._files: dict[str, ReceivedFile] = {}
        self._sent: dict[str, SavedPieces] = {}
        """Of slots that wait for their copy."""
        self._copied: dict[str, KeptBytes | None] = {}
        """Slot -> how much of a copy its actor has."""
        self.problem: str | None = None
        """One sentence; `None`: there is none."""

    def take(self, status: Status) -> None:
        """Add the piece that a status brings, unless it is here already."""
        piece = status.checkpoint
        if piece is None:
            return
        file = self._files.setdefault(status.slot, ReceivedFile(self._path(status.slot)))
        try:
            if file.take(piece):
                self.problem = None
        except OSError as failure:
            self.problem = (
                f"states of the workers are not kept in {self._folder}: {failure.strerror}"
            )
            # Nothing waits for what cannot be kept.
            file.kept = KeptBytes(number=piece.number, size_bytes=piece.total_bytes)

    def note_copied(self, status: Status) -> None:
        """Note how much of a copy is at the actor, whichever process it tells of."""
        self._copied[status.slot] = status.copied

    def kept(self, slot: str) -> KeptBytes | None:
        """Return how much is here of the file that the slot has sent last."""
        return self._files[slot].kept if slot in self._files else None

    def copy_for(
        self, slot: str, incarnation: int, start: object = None
    ) -> tuple[KeptBytes | None, CheckpointPiece | None]:
        """Return the size of the copy for a later process of a slot, and the part of it that its
        actor lacks; where there is no copy, of the weights that `start`, its `train.from`, names.

        `None`: there are none, and nothing is lacking.
        """
        paths = [self._path(slot)] if incarnation else []
        if start is not None:
            paths.append(weights_of(self._folder.parent.parent, str(start)))
        for path in paths:
            if (whole := whole_of(path)) is not None:
                sent = self._sent.setdefault(slot, SavedPieces())
                return whole, sent.piece(str(path), self._copied.get(slot))
        return None, None

    def drop_copy(self, slot: str) -> None:
        """Send no more of a copy: the process of the slot has begun."""
        if (sent := self._sent.pop(slot, None)) is not None:
            sent.close()

    def _path(self, slot: str) -> Path:
        return self._folder / f"{slot}.pt"
