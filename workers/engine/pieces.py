"""The file with a slot's state, cut into pieces that go to the head with the statuses, and to a
worker with the orders.

Pieces keep both small: the head is never kept busy for long, and needs little memory. Who reads
the file verifies it. Imports no torch: head and actor use it, not the process that computes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from workers.messages import CheckpointPiece, KeptBytes
from workers.units import MIB

#: Of a status. One status a second then takes little of a home network of 1 Gbit/s.
PIECE_BYTES: Final = 8 * MIB


class SavedPieces:
    """Sends each file from its beginning to its end, then the newest there is.

    Keeps nothing but the file that is under way: a piece is sent again until `kept` says that the
    other has it, also to another one, or by another process.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        """It stays readable when a newer one takes its name."""

    def piece(self, saved: str | None, kept: KeptBytes | None) -> CheckpointPiece | None:
        """Return the first piece that the other lacks; `saved` is the newest file.

        `None`: it has all, there is nothing, or it cannot be read now.
        """
        with contextlib.suppress(OSError):
            if self._file is not None:
                piece = self._next(self._file, kept)
                if piece is not None:
                    return piece
            self.close()
            if saved is not None:
                self._file = os.open(saved, os.O_RDONLY | os.O_CLOEXEC)
                return self._next(self._file, kept)
        return None

    def pending(self, saved: str | None, kept: KeptBytes | None) -> bool:
        """Whether the other lacks a part of the newest file."""
        whole = None if saved is None else whole_of(Path(saved))
        return whole is not None and whole != kept

    def close(self) -> None:
        """Send no more of the present file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @staticmethod
    def _next(file: int, kept: KeptBytes | None) -> CheckpointPiece | None:
        """Return the next piece of this file; `None` if the other has all, or it became shorter."""
        whole = _whole(os.fstat(file))
        if kept == whole:
            return None
        offset_bytes = 0 if kept is None or kept.number != whole.number else kept.size_bytes
        data = os.pread(file, PIECE_BYTES, offset_bytes)
        if not data and whole.size_bytes:
            return None
        return CheckpointPiece(
            number=whole.number, offset_bytes=offset_bytes, total_bytes=whole.size_bytes, data=data
        )


class ReceivedFile:
    """A file that comes in pieces; a part stands beside it, and takes its place once whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: KeptBytes | None = None
        """How much is here of the file that came last."""

    def take(self, piece: CheckpointPiece) -> bool:
        """Add a piece, unless it is here already or one before it is lacking; say whether it did.

        Raises:
            OSError: It cannot be written.
        """
        kept = self.kept
        here_bytes = kept.size_bytes if kept is not None and kept.number == piece.number else 0
        if piece.offset_bytes != here_bytes:
            return False
        part = self.path.with_suffix(".part")
        if not piece.offset_bytes:
            part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if piece.offset_bytes else "wb") as file:
            file.write(piece.data)
        if piece.is_last:
            part.replace(self.path)
        self.kept = KeptBytes(number=piece.number, size_bytes=here_bytes + len(piece.data))
        return True


def whole_of(path: Path) -> KeptBytes | None:
    """Return what a receiver of all of a file has; `None`: there is no file."""
    with contextlib.suppress(OSError):
        return _whole(path.stat())
    return None


def _whole(found: os.stat_result) -> KeptBytes:
    return KeptBytes(number=found.st_mtime_ns, size_bytes=found.st_size)
