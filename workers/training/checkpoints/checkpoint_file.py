"""One checkpoint in one file: written whole or not at all, and believed only if every byte is as it
was written.

The file is what `torch.save` writes, so `torch.load` opens it, and 68 bytes after it: a mark, the
version of this format, a number that counts up, the length, a BLAKE2b hash of all of that, and a
checksum of these fields. All versions of the format end so.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import IO, Any, Final, cast

import torch

VERSION: Final = 1
TEMPORARY: Final = ".new"

_MARK: Final = b"OOM-snapshot"
_FIELDS: Final = struct.Struct(f"<{len(_MARK)}sIQQ")
_DIGEST_BYTES: Final = 32
_CHECKSUM: Final = struct.Struct("<I")
_TRAILER_BYTES: Final = _FIELDS.size + _DIGEST_BYTES + _CHECKSUM.size
_CHUNK_BYTES: Final = 4 * 2**20


class RefusedError(Exception):
    """This file is not a checkpoint that can be used; its text says why, as the end of a sentence."""


def write(path: Path, content: dict[str, Any], number: int) -> int:
    """Write beside the file, then replace it; return its bytes. One thread of a process at a time.

    The temporary file is named after the process, so that two processes never rename each other's
    half-written file.

    Raises:
        Exception: It could not be written. The file is as it was, and no temporary file is left.
    """
    fresh = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    file = fresh.open("wb", buffering=0)
    try:
        with file:
            sink = _HashingSink(file)
            try:
                torch.save(content, cast("IO[bytes]", sink))
            except RuntimeError:
                if sink.failure is not None:  # torch reports that a write failed, not why
                    raise sink.failure from None
                raise
            fields = _FIELDS.pack(_MARK, VERSION, number, sink.written_bytes)
            sink.write(fields)
            trailer = fields + sink.digest.digest()
            sink.write(trailer[_FIELDS.size :] + _CHECKSUM.pack(zlib.crc32(trailer)))
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # what made the writing fail is what is told
            fresh.unlink()
        raise
    _sync_folder(path.parent)
    return sink.written_bytes


def read_number(path: Path) -> int | None:
    """Return the number that counts up.

    `None`: there is no checkpoint, or its last bytes are damaged.
    """
    try:
        with path.open("rb") as file:
            return _trailer(file)[1]
    except (OSError, RefusedError):
        return None


def read(path: Path) -> dict[str, Any]:
    """Verify a file and return what it holds, on the host.

    Raises:
        RefusedError: It cannot be used.
        RuntimeError: There is no memory for what it holds.
    """
    try:
        with path.open("rb") as file:
            version, _, length, digest = _trailer(file)
            file.seek(0)
            if _digest_of(file, length + _FIELDS.size) != digest:
                raise RefusedError("its bytes are not those that were written (the hash differs)")
            if version != VERSION:
                raise RefusedError(
                    f"it has format version {version}, and this program reads version {VERSION}"
                )
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as failure:
        raise RefusedError(f"it cannot be read: {failure.strerror or failure}") from failure
    except pickle.UnpicklingError as failure:
        raise RefusedError("it holds more than tensors, numbers, strings and lists") from failure
    if not isinstance(content, dict):
        raise RefusedError("it holds no state")
    return content


class _HashingSink(io.RawIOBase):
    """Hashes what it writes, in pieces: neither the hash nor the file system holds up the other
    threads for long.
    """

    def __init__(self, file: io.FileIO) -> None:
        self.digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.written_bytes = 0
        self.failure: OSError | None = None
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has bytes
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            piece = view[start : start + _CHUNK_BYTES]
            self.digest.update(piece)
            try:
                while piece:
                    piece = piece[self._file.write(piece) :]
            except OSError as failure:
                self.failure = failure
                raise
        self.written_bytes += len(view)
        return len(view)


def _trailer(file: io.BufferedReader) -> tuple[int, int, int, bytes]:
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER_BYTES:
        raise RefusedError(f"it has only {size} bytes")
    file.seek(size - _TRAILER_BYTES)
    end = file.read(_TRAILER_BYTES)
    trailer, checksum = end[: -_CHECKSUM.size], end[-_CHECKSUM.size :]
    mark, version, number, length = _FIELDS.unpack(trailer[: _FIELDS.size])
    whole = (
        mark == _MARK
        and length == size - _TRAILER_BYTES
        and checksum == _CHECKSUM.pack(zlib.crc32(trailer))
    )
    if not whole:
        raise RefusedError("it is no checkpoint, or its end is damaged or cut off")
    return version, number, length, trailer[_FIELDS.size :]


def _digest_of(file: io.BufferedReader, length: int) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    while length and (piece := file.read(min(length, _CHUNK_BYTES))):
        digest.update(piece)
        length -= len(piece)
    return digest.digest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
