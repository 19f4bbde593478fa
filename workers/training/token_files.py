"""Samples of tokens in files below the state folder: one process writes them, and each process maps
them.

A mapped file takes no memory that a worker's cap counts, and is in RAM once, for all workers that
read it. Does not know where tokens come from.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from workers.files import locked, made_whole
from workers.learned_limits import STATE_DIR_VARIABLE, default_path
from workers.training.errors import TaskError

#: Low bits of an index entry: the length of the sample, of which `train.seq` allows 2^20 tokens.
#: The other bits are the offset of its first token.
_LENGTH_BITS: Final = 21
_LENGTH_MASK: Final = 2**_LENGTH_BITS - 1

#: Version of the files' content; raise it when the program writes something else for the same key.
_VERSION: Final = 2

#: Files that were not opened for this time (seconds) are removed when others are written.
_UNUSED_S: Final = 30 * 24 * 3600.0

#: Type codes of the module `array` for tokens.
_TYPE_CODES: Final = {"uint8": "B", "int32": "i"}

TokenType = Literal["uint8", "int32"]


def written_once(
    key: object,
    columns: Mapping[str, TokenType],
    write: Callable[..., None],
    *,
    seq: int | None = None,
) -> dict[str, TokenSamples]:
    """Return the columns that `write` fills; it runs once on this PC for each key.

    Args:
        key: Everything that determines the content; compared by its `repr`.
        columns: The type of the tokens in each column.
        write: Called with a `SampleWriter` for each column.
        seq: See `SampleWriter`.

    Raises:
        TaskError: The files cannot be written.
        Exception: Whatever `write` raises; the next call starts again.
    """
    root = default_path().parent / "tokens"
    folder = root / hashlib.blake2b(repr((_VERSION, key)).encode(), digest_size=16).hexdigest()
    try:
        with locked(folder.with_suffix(".lock"), patience_s=math.inf):
            if not folder.exists():
                for path in root.iterdir():
                    if path.is_dir() and path.stat().st_mtime < time.time() - _UNUSED_S:
                        shutil.rmtree(path, ignore_errors=True)
                with made_whole(folder) as fresh, ExitStack() as stack:
                    fresh.mkdir(mode=0o700)
                    writers = [SampleWriter(fresh, *each, seq=seq) for each in columns.items()]
                    for writer in writers:
                        stack.callback(writer.close)
                    write(*writers)
            os.utime(folder)
    except OSError as failure:
        raise TaskError(
            f"the tokens of train.data cannot be kept in {root}: {failure.strerror or failure}; "
            f"free its disk, or name another folder in {STATE_DIR_VARIABLE}"
        ) from failure
    return {name: TokenSamples(folder, name) for name in columns}


class SampleWriter:
    """Writes sequences of tokens, cut into samples of `seq` + 1 tokens. Each sample begins with the
    last token of the one before, so each token except the first of a sequence is predicted once.
    """

    def __init__(self, folder: Path, name: str, kind: TokenType, *, seq: int | None) -> None:
        """Create the files. `kind`: type of a token. `seq`: `None` cuts nothing."""
        self._seq = seq
        self._code = _TYPE_CODES[kind]
        self._tokens = (folder / f"{name}.{kind}").open("wb")
        self._samples = (folder / f"{name}.samples").open("wb")
        self._begin = self._end = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current sequence."""
        self._tokens.write(array(self._code, tokens))
        self._end += len(tokens)

    def end(self) -> None:
        """End the current sequence."""
        length = self._end - self._begin
        starts = range(1) if self._seq is None else range(0, length - 1, self._seq)
        most = length if self._seq is None else self._seq + 1
        entries = (
            (self._begin + start) << _LENGTH_BITS | min(length - start, most) for start in starts
        )
        array("q", entries).tofile(self._samples)
        self._begin = self._end

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._samples.close()


class TokenSamples:
    """Samples that a `SampleWriter` has written; the files are mapped when one is read."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._name = name

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Tensor:
        """Return the tokens of a sample, in the type and the memory of the file: read only."""
        entry = int(self._samples[index])
        start, length = entry >> _LENGTH_BITS, entry & _LENGTH_MASK
        return self._tokens[start : start + length]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return the lengths of samples in tokens."""
        lengths: list[int] = (self._samples[torch.as_tensor(indices)] & _LENGTH_MASK).tolist()
        return lengths

    def __getstate__(self) -> dict[str, Any]:
        # Loader processes map the files themselves.
        return {"folder": self.folder, "_name": self._name}

    @cached_property
    def _samples(self) -> Tensor:
        return _mapped(self.folder / f"{self._name}.samples", torch.int64)

    @cached_property
    def _tokens(self) -> Tensor:
        path = next(path for path in self.folder.glob(f"{self._name}.*int*"))
        return _mapped(path, getattr(torch, path.suffix.removeprefix(".")))


def _mapped(path: Path, dtype: torch.dtype) -> Tensor:
    count = path.stat().st_size // dtype.itemsize
    # Shared, because the cap of a worker on a CPU counts private mappings.
    return (
        torch.from_file(str(path), shared=True, size=count, dtype=dtype)
        if count
        else (torch.empty(0, dtype=dtype))
    )
