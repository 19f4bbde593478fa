"""The index of a large text in a file, so that of all processes of a machine one reads the text,
and once.

A file that has another size or was written to since is another text. Without a place to write
nothing is kept, and nothing fails.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from workers.files import locked
from workers.learned_limits import EXPIRY_S, default_path
from workers.training import host_memory
from workers.training.text import TextError, TextFiles
from workers.training.text_index import index_of_lines
from workers.units import MIB

#: Of smaller texts it takes less than a second or two.
_LEAST_BYTES: Final = 64 * MIB

#: For another process that reads the text; after that this one reads it, too.
_PATIENCE_S: Final = 3600.0

_VERSION: Final = 1


def kept_index_of_lines(files: TextFiles, seq: int) -> tuple[Tensor, str]:
    """Return what `index_of_lines` does, of a large text from the file of an earlier process.

    Raises:
        TextError: As `index_of_lines`.
    """
    if files.total < _LEAST_BYTES:
        return index_of_lines(files, seq)
    try:
        path = default_path().parent / "texts" / f"{_key(files, seq)}.index"
        with locked(path.with_name("lock"), _PATIENCE_S):
            found = _read(path)
            if found is None:
                found = index_of_lines(files, seq)
                _write(path, *found)
            return found
    except OSError:  # of the lock
        return index_of_lines(files, seq)


def _key(files: TextFiles, seq: int) -> str:
    digest = hashlib.blake2b(f"{_VERSION} {seq}\n".encode(), digest_size=16)
    for path, end in zip(files.paths, files.ends, strict=True):
        try:
            facts = path.stat()
        except OSError as failure:
            raise TextError(f"train.data: {path} cannot be read: {failure.strerror}") from failure
        digest.update(
            f"{path.resolve()} {end} {facts.st_size} {facts.st_mtime_ns}\n".encode(
                errors="surrogateescape"
            )
        )
    return digest.hexdigest()


def _bytes_of(numbers: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * numbers.nbytes).from_address(numbers.data_ptr())).cast("B")


def _read(path: Path) -> tuple[Tensor, str] | None:
    """Return what was written; `None`: nothing, or not all of it."""
    try:
        with path.open("rb") as file:
            match json.loads(file.readline(1000)):
                case {"numbers": int(length), "crc32": int(crc), "checksum": str(checksum)}:
                    pass
                case _:
                    return None
            if not 0 < 8 * length <= os.fstat(file.fileno()).st_size:
                return None
            index = host_memory.like(torch.empty(length, dtype=torch.int64, device="meta"))
            if (
                file.readinto(_bytes_of(index)) < index.nbytes
                or zlib.crc32(_bytes_of(index)) != crc
            ):
                return None
        os.utime(path)
    except (OSError, ValueError):
        return None
    return index, checksum


def _write(path: Path, index: Tensor, checksum: str) -> None:
    """Write it whole or not at all, and remove those that were not used for a month."""
    if not len(index):
        return
    fresh = path.with_suffix(".new")
    header = {"numbers": len(index), "crc32": zlib.crc32(_bytes_of(index)), "checksum": checksum}
    try:
        for other in path.parent.glob("*.*"):
            if time.time() - other.stat().st_mtime > EXPIRY_S:
                other.unlink()
        with fresh.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.write(_bytes_of(index))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
