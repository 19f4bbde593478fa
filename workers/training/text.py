"""The user's own text as bytes: a file, or all files of a folder one after the other, cut into windows.

The vocabulary is the 256 values of a byte. Files are read window by window and not mapped: reading a mapped file that
became shorter would end the process.
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

VOCABULARY: Final = 256

#: Read of each file to see whether it is text. Images, archives, programs and UTF-16 have a zero byte in it.
_LOOK_BYTES: Final = 65_536


class TextError(TaskError):
    """There is no text to train on; the message says where, why and what to do."""


class TextData(Dataset[torch.Tensor]):
    """Windows of `seq` + 1 bytes, `seq` apart: each byte but the first is predicted once in an epoch.

    Raises:
        TextError: Nothing is there, it cannot be read, it is no text, or it is shorter than one window.
    """

    def __init__(self, path: str | Path, seq: int) -> None:
        """Look at the files; their bytes are read when they are used."""
        self._root = Path(path).expanduser()
        self._seq = seq
        self._files = list(_files_below(self._root))
        sizes = [_size_of_text(each) for each in self._files]
        self._ends = list(itertools.accumulate(sizes))
        total = self._ends[-1] if self._ends else 0
        if total == 0:
            raise TextError(f"train.data: {self._root} holds no text; name a file or folder that does")
        if total <= seq:
            raise TextError(
                f"train.data: {self._root} has {total} bytes, and one sample takes {seq + 1}; give more text, or lower "
                f"train.seq to {max(2, total - 1)} or less"
            )
        self._windows = (total - 1) // seq

    def __len__(self) -> int:
        """Return how many windows there are."""
        return self._windows

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the window `index` as int64.

        Raises:
            IndexError: There are fewer windows.
            TextError: A file has changed since the training began.
        """
        if not 0 <= index < self._windows:
            raise IndexError(index)
        start, left = index * self._seq, self._seq + 1
        pieces = bytearray()
        place = bisect.bisect_right(self._ends, start)
        while left:
            offset = start - (self._ends[place - 1] if place else 0)
            count = min(left, self._ends[place] - start)
            pieces += _read(self._files[place], offset, count)
            start, left, place = start + count, left - count, place + 1
        return torch.frombuffer(pieces, dtype=torch.uint8).long()

    def fingerprint(self) -> str:
        """Return what changes when a file is added, removed or changes its length: then windows have other numbers."""
        digest = hashlib.blake2b(digest_size=8)
        for file, end in zip(self._files, self._ends, strict=True):
            digest.update(f"{file.relative_to(self._root)} {end}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def _files_below(root: Path) -> Iterator[Path]:
    """Yield the regular files in an order that every machine agrees on; hidden files and folders are left out."""
    if root.is_file():
        yield root
        return
    if not root.exists():
        raise TextError(f"train.data: there is no {root}; name a text file, or a folder of them, on this machine")
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _refuse(failure: OSError) -> None:
    raise TextError(f"train.data: {failure.filename} cannot be read: {failure.strerror}") from failure


def _size_of_text(path: Path) -> int:
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(_LOOK_BYTES):
                raise TextError(
                    f"train.data: {path} is no text (it has zero bytes, as images, archives and UTF-16 have); take it "
                    "out, or convert it to UTF-8"
                )
            return file.seek(0, os.SEEK_END)
    except OSError as failure:
        raise TextError(f"train.data: {path} cannot be read: {failure.strerror}") from failure


def _read(path: Path, offset: int, count: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            found = os.pread(file.fileno(), count, offset)
    except OSError as failure:
        raise TextError(f"train.data: {path} cannot be read any more: {failure.strerror}") from failure
    if len(found) < count:
        raise TextError(f"train.data: {path} became shorter while it was trained on; put it back, or begin anew")
    return found
