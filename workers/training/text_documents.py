"""The documents of the user's own text, of unequal lengths: they are filled up, bucketed or packed
as made ones are.

Does not hold the text: a sample is read from its file when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from workers.training.text import TextError, TextFiles, as_tokens, read_at
from workers.training.text_cache import kept_index_of_lines
from workers.training.text_index import LENGTH_BITS, index_of_files, is_json, text_of
from workers.training.validation import held_out, spread

_LENGTH = 2**LENGTH_BITS - 1


class TextDocuments(Dataset[Tensor]):
    """Documents, and pieces of those that are longer than `seq` + 1 bytes. The last ones are held
    out.

    Raises:
        TextError: There is no text, no document in it, or a line that is none.
    """

    def __init__(self, path: str | Path, seq: int, unit: Literal["files", "lines"]) -> None:
        """Find the documents; of lines that takes one pass over all files, once on a machine."""
        self._files = files = TextFiles(path)
        self._seq = seq
        self._unit = unit
        self._index, checksum = (
            kept_index_of_lines(files, seq) if unit == "lines" else (index_of_files(files, seq), "")
        )
        if not len(self._index):
            raise TextError(
                f"train.data: no {unit.removesuffix('s')} of {files.root} has two bytes or more; "
                "name a file or folder "
                "with text in it"
            )
        held = held_out(len(self._index))
        self._items = held.start
        self.held_out = [self._piece(index) for index in spread(held)]
        """Samples that are never trained on; none: there are too few documents for that."""
        self._fingerprint = f"{unit} {files.fingerprint()} {checksum} {self._items}"

    def __len__(self) -> int:
        """Return how many pieces there are to train on."""
        return self._items

    def __getitem__(self, index: int) -> Tensor:
        """Return a piece as int64; see `__getitems__`."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return several pieces.

        Raises:
            IndexError: There are fewer.
            TextError: A file has changed since the training began.
        """
        if not all(0 <= index < self._items for index in indices):
            raise IndexError(indices)
        return [self._piece(index) for index in indices]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return how many bytes these pieces have."""
        found: list[int] = (self._index[torch.as_tensor(indices)] & _LENGTH).tolist()
        return found

    def fingerprint(self) -> str:
        """Return what changes when documents get other numbers or, where they are lines, other
        bytes.
        """
        return self._fingerprint

    def _piece(self, index: int) -> Tensor:
        start, length = self._place(index)
        if self._unit == "files":
            return as_tokens(self._files.read(start, length))
        path, offset, _ = self._files.place(start)
        return as_tokens(
            self._of_json(index, path, offset)
            if is_json(path)
            else self._of_line(index, path, offset)
        )

    def _place(self, index: int) -> tuple[int, int]:
        entry = int(self._index[index])
        return entry >> LENGTH_BITS, entry & _LENGTH

    def _goes_on(self, index: int) -> bool:
        """Whether the piece `index` is of the same line as the one before."""
        if not 0 < index < len(self._index):
            return False
        start, length = self._place(index - 1)
        return length == self._seq + 1 and self._place(index)[0] == start + self._seq

    def _of_line(self, index: int, path: Path, offset: int) -> bytearray:
        before = int(offset > 0 and not self._goes_on(index))
        _, length = self._place(index)
        found = read_at(path, offset - before, before + length + 1)
        text, after = found[before : before + length], found[before + length :]
        moved = before and found[:1] != b"\n"
        if (
            moved
            or len(text) < length
            or (after not in (b"", b"\n", b"\r") and not self._goes_on(index + 1))
        ):
            raise _changed(path, offset)
        return bytearray(text)

    def _of_json(self, index: int, path: Path, offset: int) -> bytearray:
        start, length = self._place(index)
        before = int(offset > 0)
        line = _line_at(path, offset - before, before, most_bytes=2 * length)
        if before and line[:1] != b"\n":
            raise _changed(path, offset)
        try:
            text = text_of(line[before:], "")
        except TextError as failure:
            raise _changed(path, offset) from failure
        first = int(
            torch.searchsorted(self._index, start << LENGTH_BITS)
        )  # pieces of a line have one start
        place = (index - first) * self._seq
        piece = bytearray(text[place : place + self._seq + 1])
        if len(piece) != length:
            raise _changed(path, offset)
        return piece


def _line_at(path: Path, offset: int, skipped: int, most_bytes: int) -> bytes:
    """Return the bytes from `offset` to the end of a line, that after the first `skipped` ones."""
    count = most_bytes + 4096
    while True:
        found = read_at(path, offset, count)
        if (end := found.find(b"\n", skipped)) >= 0:
            return found[:end]
        if len(found) < count:
            return found
        count *= 4


def _changed(path: Path, offset: int) -> TextError:
    return TextError(
        f"train.data: {path} was changed while it was trained on: the line at byte {offset} is "
        "not the one "
        "that was there; put it back, or begin anew"
    )
