"""Copies of the slots' states in the run folder, put together from the pieces that reports carry.

A worker begins at the copy where its own node has nothing newer: on another PC, or after its disk
was lost. Not written through to the disk: that would hold up the head, and a copy is verified when
it is read.
"""

from __future__ import annotations

from pathlib import Path

from workers.messages import CheckpointPiece, Report


class CheckpointKeeper:
    """The copies of one run; a folder that cannot be written costs only them."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet."""
        self._folder = folder
        self._under_way: dict[str, tuple[int, int, int]] = {}
        """Slot -> incarnation, number of the file, and how many bytes of it are here."""
        self._given: dict[str, int] = {}
        """Slot -> the incarnation that was given its copy."""
        self.problem: str | None = None
        """One sentence; `None`: there is none."""

    def take(self, report: Report) -> None:
        """Add the piece of a report.

        One that does not continue what is here is dropped, with all before it.
        """
        piece = report.checkpoint
        if piece is None:
            return
        told = (report.incarnation, piece.number, piece.offset_bytes)
        if piece.offset_bytes and self._under_way.pop(report.slot, None) != told:
            return
        try:
            self._add(report.slot, piece)
        except OSError as failure:
            self.problem = (
                f"states of the workers are not kept in {self._folder}: {failure.strerror}"
            )
            return
        self.problem = None
        if not piece.is_last:
            self._under_way[report.slot] = (*told[:2], piece.offset_bytes + len(piece.data))

    def copy_for(self, slot: str, incarnation: int) -> bytes | None:
        """Return the copy for a process of the slot that is not its first one, once for each.

        `None`: there is none.
        """
        if incarnation == 0 or self._given.get(slot) == incarnation:
            return None
        self._given[slot] = incarnation
        try:
            return self._path(slot).read_bytes()
        except OSError:
            return None

    def _add(self, slot: str, piece: CheckpointPiece) -> None:
        path = self._path(slot)
        part = path.with_suffix(".part")
        if not piece.offset_bytes:
            path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if piece.offset_bytes else "wb") as file:
            file.write(piece.data)
        if piece.is_last:
            part.replace(path)

    def _path(self, slot: str) -> Path:
        return self._folder / f"{slot}.pt"
