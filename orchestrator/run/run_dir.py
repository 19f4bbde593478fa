"""The folder of one run: made, checked before it is written to, and locked against other heads; and
the copies of the slots' states in it, assembled from the pieces that statuses carry.

A worker begins with the copy if its node has nothing newer: on another PC, or after its disk was
lost. The copies are not synced to the disk, which would delay the head; readers verify them.
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

#: The folder, in a run folder, of the copies of the slots' states.
STATES: Final = "states"


def new_folder(config: Config) -> Path:
    """Make `runs/<run_id>/`; `UsageError` if it cannot be made."""
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(config.run.dir) / run_id
    try:
        folder.mkdir(mode=0o755, parents=True)  # also if groups may write: commands come here
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def weights_of(runs_dir: Path, start: str) -> Path:
    """Return the path of the weights that `train.from` names, in the folder of that run."""
    run_id, _, slot = start.partition("/")
    return runs_dir / run_id / STATES / f"{slot}.weights"


def check_mine(folder: Path) -> None:
    """Raise `UsageError` for a folder in which another user may have placed links or the address of
    another cluster.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{folder} belongs to another user, or other users may write in it; copy it into your "
            "own run folder if you trust it, and resume the copy"
        )


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Write this process's id into the run folder, and lock the folder against every other head.

    The kernel releases the lock with the process, however that ends.

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
    """Keeps the copies of the states of one run. If they cannot be written, the run continues."""

    def __init__(self, folder: Path) -> None:
        """Touch no file yet."""
        self._folder = folder
        self._files: dict[str, ReceivedFile] = {}
        self._sent: dict[str, SavedPieces] = {}
        """Copies that are being sent, keyed by the slot that waits for one."""
        self._copied: dict[str, KeptBytes | None] = {}
        """How much of a copy its actor has, keyed by slot."""
        self.problem: str | None = None
        """Why copies cannot be written, in a sentence; `None`: they can be."""

    def take(self, status: Status) -> None:
        """Write the piece of a state that a status carries, unless it is here already."""
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
            # It counts as kept, since nothing must wait for it.
            file.kept = KeptBytes(number=piece.number, size_bytes=piece.total_bytes)

    def note_copied(self, status: Status) -> None:
        """Note how much of a copy the actor has, whichever process the status describes."""
        self._copied[status.slot] = status.copied

    def kept(self, slot: str) -> KeptBytes | None:
        """Return how much is here of the last file that the slot has sent."""
        return self._files[slot].kept if slot in self._files else None

    def copy_for(
        self, slot: str, incarnation: int, start: object = None
    ) -> tuple[KeptBytes | None, CheckpointPiece | None]:
        """Return the size of the copy for a later process of a slot, and the next piece that its
        actor lacks; without a copy, those of the weights that `start`, its `train.from`, names.

        `None`: there is no file, and no piece is lacking.
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
        """Stop sending a copy: the process of the slot has begun."""
        if (sent := self._sent.pop(slot, None)) is not None:
            sent.close()

    def _path(self, slot: str) -> Path:
        return self._folder / f"{slot}.pt"
