"""Sends the file with a slot's state in pieces: to the head in statuses, to a worker in orders.

Pieces keep statuses and orders small, so that the head is never busy for long and needs little
memory. The reader of the file verifies it. Imports no torch: the head and the actor use it, the
engine does not.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from workers.messages import CheckpointPiece, KeptBytes
from workers.units import MIB

#: Largest piece in a status: at one a second, a small load for a network of 1 Gbit/s.
PIECE_BYTES: Final = 8 * MIB


class SavedPieces:
    """Cuts a file into pieces from beginning to end, then continues with the newest file.

    A piece is returned again until `kept` confirms it. The only state is the open file, so that
    either end may be replaced at any time.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        """The open file; it stays readable after a newer file has replaced it."""

    def piece(self, saved: str | None, kept: KeptBytes | None) -> CheckpointPiece | None:
        """Return the first piece that the receiver lacks; `saved` is the path of the newest file.

        `None`: the receiver has all, there is no file, or it cannot be read now.
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
        """Return whether the receiver lacks a part of the newest file."""
        whole = None if saved is None else whole_of(Path(saved))
        return whole is not None and whole != kept

    def close(self) -> None:
        """Close the present file, and send no more of it."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @staticmethod
    def _next(file: int, kept: KeptBytes | None) -> CheckpointPiece | None:
        """Return the next piece of a file; `None` if the receiver has all, or it was truncated."""
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
    """A file received in pieces: they go to a `.part` file, which replaces it once complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: KeptBytes | None = None
        """How much of the file that is being received is here."""

    def take(self, piece: CheckpointPiece) -> bool:
        """Append a piece if it is the next one; return whether it was appended.

        Raises:
            OSError: The piece cannot be written.
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
    """Return the `KeptBytes` of a receiver that has the whole file; `None` if there is no file."""
    with contextlib.suppress(OSError):
        return _whole(path.stat())
    return None


def _whole(found: os.stat_result) -> KeptBytes:
    return KeptBytes(number=found.st_mtime_ns, size_bytes=found.st_size)
