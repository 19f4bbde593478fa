"""The file with a slot's state, cut into pieces that go to the head with the statuses.

Pieces keep statuses small: the head is never kept busy for long, and needs little memory. Who reads
the file verifies it. Imports no torch: the process that answers the head uses it, which is not the
one that computes.
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
    head has it, also to another head, or by another process.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        """It stays readable when a newer one takes its name."""

    def piece(self, saved: str | None, kept: KeptBytes | None) -> CheckpointPiece | None:
        """Return the first piece that the head lacks; `saved` is the newest file.

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
        """Whether the head lacks a part of the newest file."""
        with contextlib.suppress(OSError):
            return saved is not None and not _is_whole(Path(saved).stat(), kept)
        return False

    def close(self) -> None:
        """Send no more of the present file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @staticmethod
    def _next(file: int, kept: KeptBytes | None) -> CheckpointPiece | None:
        """Return the next piece of this file; `None` if the head has all, or it became shorter."""
        found = os.fstat(file)
        if _is_whole(found, kept):
            return None
        number = found.st_mtime_ns
        offset_bytes = 0 if kept is None or kept.number != number else kept.size_bytes
        data = os.pread(file, PIECE_BYTES, offset_bytes)
        if not data and found.st_size:
            return None
        return CheckpointPiece(
            number=number, offset_bytes=offset_bytes, total_bytes=found.st_size, data=data
        )


def _is_whole(found: os.stat_result, kept: KeptBytes | None) -> bool:
    return (
        kept is not None and kept.number == found.st_mtime_ns and kept.size_bytes == found.st_size
    )
