"""The user's own text as bytes: a file, or all files of a folder one after the other, cut into
windows.

Documents of unequal lengths are made of it in `text_documents`.

The vocabulary is the 256 values of a byte. Files are read window by window and not mapped: reading
a mapped file that became shorter would end the process.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch.utils.data import Dataset

from workers.training.errors import TaskError
from workers.training.validation import held_out, spread

VOCABULARY: Final = 256

#: Read of each file to see whether it is text. Images, archives, programs and UTF-16 have a zero
#: byte in it.
_LOOK_BYTES: Final = 65_536


class TextError(TaskError):
    """There is no text to train on; the message says where, why and what to do."""


class TextFiles:
    """A file, or all files of a folder, as one stream of bytes.

    Raises:
        TextError: Nothing is there, it cannot be read, or it is no text.
    """

    def __init__(self, path: str | Path) -> None:
        """Look at the files; their bytes are read when they are used."""
        self.root = Path(path).expanduser()
        self.paths = list(_files_below(self.root))
        self.ends = list(itertools.accumulate(_size_of_text(each) for each in self.paths))
        """Where each file ends in the stream."""
        self.total = self.ends[-1] if self.ends else 0
        if self.total == 0:
            raise TextError(
                f"train.data: {self.root} holds no text; name a file or folder that does"
            )

    def place(self, start: int) -> tuple[Path, int, int]:
        """Return the file in which this byte of the stream is, where it is there, and how many
        bytes follow from it.
        """
        number = bisect.bisect_right(self.ends, start)
        return (
            self.paths[number],
            start - (self.ends[number - 1] if number else 0),
            self.ends[number] - start,
        )

    def read(self, start: int, count: int) -> bytearray:
        """Return bytes of the stream.

        Raises:
            TextError: A file has become shorter, or cannot be read any more.
        """
        pieces = bytearray()
        while count:
            path, offset, left = self.place(start)
            here = min(count, left)
            piece = read_at(path, offset, here)
            if len(piece) < here:
                raise TextError(
                    f"train.data: {path} became shorter while it was trained on; put it back, or "
                    "begin anew"
                )
            pieces += piece
            start, count = start + here, count - here
        return pieces

    def fingerprint(self) -> str:
        """Return what changes when a file is added, removed or changes its length."""
        digest = hashlib.blake2b(digest_size=8)
        for file, end in zip(self.paths, self.ends, strict=True):
            digest.update(f"{file.relative_to(self.root)} {end}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


class TextData(Dataset[torch.Tensor]):
    """Windows of `seq` + 1 bytes, `seq` apart: each byte but the first is predicted once in an
    epoch.

    The last windows are held out where the text is long enough: they are no items of the data set.

    Raises:
        TextError: There is no text, or it is shorter than one window.
    """

    def __init__(self, path: str | Path, seq: int) -> None:
        """Look at the files."""
        self._files = files = TextFiles(path)
        self._seq = seq
        if files.total <= seq:
            raise TextError(
                f"train.data: {files.root} has {files.total} bytes, and one sample takes "
                f"{seq + 1}; give more text, or "
                f"lower train.seq to {max(2, files.total - 1)} or less"
            )
        windows = (files.total - 1) // seq
        held = held_out(windows)
        self._items = held.start
        self.held_out = [self._window(index) for index in spread(held)]
        """Samples that are never trained on; none: the text is too short for that."""

    def __len__(self) -> int:
        """Return how many windows there are to train on."""
        return self._items

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the window `index` as int64.

        Raises:
            IndexError: There are fewer windows.
            TextError: A file has changed since the training began.
        """
        if not 0 <= index < self._items:
            raise IndexError(index)
        return self._window(index)

    def fingerprint(self) -> str:
        """Return what changes when windows get other numbers, or others are held out."""
        return f"windows {self._files.fingerprint()} {self._items}"

    def _window(self, index: int) -> torch.Tensor:
        return as_tokens(self._files.read(index * self._seq, self._seq + 1))


def as_tokens(content: bytearray) -> torch.Tensor:
    """Return bytes as int64."""
    return torch.frombuffer(content, dtype=torch.uint8).long()


def _files_below(root: Path) -> Iterator[Path]:
    """Yield the regular files in an order that every machine agrees on.

    Hidden files and folders are left out.
    """
    if root.is_file():
        yield root
        return
    if not root.exists():
        raise TextError(
            f"train.data: there is no {root}; name a text file, or a folder of them, on this "
            "machine"
        )
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _refuse(failure: OSError) -> None:
    raise TextError(
        f"train.data: {failure.filename} cannot be read: {failure.strerror}"
    ) from failure


def _size_of_text(path: Path) -> int:
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(_LOOK_BYTES):
                raise TextError(
                    f"train.data: {path} is no text (it has zero bytes, as images, archives and "
                    "UTF-16 have); take it "
                    "out, or convert it to UTF-8"
                )
            return file.seek(0, os.SEEK_END)
    except OSError as failure:
        raise TextError(f"train.data: {path} cannot be read: {failure.strerror}") from failure


def read_at(path: Path, offset: int, count: int) -> bytes:
    """Return bytes of a file, fewer where it ends.

    Raises:
        TextError: It cannot be read any more.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), count, offset)
    except OSError as failure:
        raise TextError(
            f"train.data: {path} cannot be read any more: {failure.strerror}"
        ) from failure
