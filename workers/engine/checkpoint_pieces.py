"""A workload's newest file of its state, in pieces that reports carry to the head.

Pieces keep reports small: the head is never kept busy for long, and needs little memory. Does not
know what the file holds; who reads it verifies it.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Final

from workers.messages import CheckpointPiece
from workers.units import MIB

#: Of a report. A slice of one second then takes little of a home network of 1 Gbit/s.
_PIECE_BYTES: Final = 8 * MIB


class CheckpointPieces:
    """Sends each file once, from its beginning to its end, and after that the newest there is then."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._total_bytes = 0
        self._sent: tuple[int, int] | None = None
        """What tells files apart: inode, and time of the last change in nanoseconds."""
        self._count = 0

    def next(self, newest: Path | None) -> CheckpointPiece | None:
        """Return the next piece.

        `None`: all is sent, there is nothing, or it cannot be read now.
        """
        try:
            if self._file is None and not self._opened(newest):
                return None
            assert self._file is not None  # noqa: S101 - for mypy: it was opened now
            offset_bytes = self._file.tell()
            data = self._file.read(_PIECE_BYTES)
        except OSError:
            self.close()
            return None
        piece = CheckpointPiece(
            number=self._count, offset_bytes=offset_bytes, total_bytes=self._total_bytes, data=data
        )
        if piece.is_last or not data:
            self.close()
        return piece

    def pending(self, newest: Path | None) -> bool:
        """Whether there is something that was not sent yet."""
        return self._file is not None or (
            newest is not None and _identity(newest) not in {None, self._sent}
        )

    def close(self) -> None:
        """Send no more of the present file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _opened(self, newest: Path | None) -> bool:
        """Open a file that was not sent. It stays readable when a newer one takes its name."""
        identity = None if newest is None else _identity(newest)
        if newest is None or identity in {None, self._sent}:
            return False
        self._file = newest.open("rb")
        self._total_bytes = newest.stat().st_size
        self._sent, self._count = identity, self._count + 1
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
