"""What a report says of a slice: the counts of what happened, and the next piece of the workload's
saved state.

Pieces keep reports small: the head is never kept busy for long, and needs little memory. Who reads
the file verifies it. Decides nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from workers.messages import (
    NO_COUNTS,
    CheckpointPiece,
    Directive,
    StepCounts,
    WorkerEvent,
    WorkerState,
)
from workers.settings import Scalar
from workers.units import MIB


@dataclass(slots=True, kw_only=True)
class SliceStats:
    """The running counts of one slice. The only mutable thing a slice owns."""

    slot: str
    directive: Directive
    state: WorkerState = WorkerState.WARMING
    reason: str = "opening the device"
    size: int | None = None
    batch: int | None = None
    counts: StepCounts = NO_COUNTS
    longest_step_s: float = 0.0
    """Of its good steps."""
    error: str | None = None
    """Traceback of the workload's own exception."""
    events: list[WorkerEvent] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the slice began."""
        return time.monotonic() - self.started_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the slice should end.

        0 after that time, and when it has done all steps that it may.
        """
        limit = self.directive.step_limit
        if limit is not None and self.counts.steps_ok >= limit:
            return 0.0
        return max(0.0, self.directive.duration_s - self.elapsed_s)

    def event(self, name: str, **detail: Scalar) -> None:
        """Add an event for events.jsonl."""
        self.events.append(WorkerEvent(name=name, at_unix_s=time.time(), detail=detail))

    def settle(self, state: WorkerState, reason: str) -> None:
        """Set the state and the reason that the table shows."""
        self.state, self.reason = state, reason

    def use(self, size: int, batch: int) -> None:
        """Set the size and batch that the table shows."""
        self.size, self.batch = size, batch


#: Of a report. A slice of one second then takes little of a home network of 1 Gbit/s.
_PIECE_BYTES: Final = 8 * MIB


class CheckpointPieces:
    """Sends each file once, from its beginning to its end, then the newest there is."""

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
