"""Small files that are untrusted or shared: checked reads, atomic replacement, locks.

Another user may have replaced such a file by a pipe, a link or a disk image: these are refused
without blocking and without reading them. Does not interpret the text.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

#: Opening does not wait for a pipe's other end, follow a link, or make a terminal the controlling
#: one, and child processes do not inherit the file. Windows, where only `resilient` works, has none
#: of these flags.
_CAREFULLY: Final = sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_NOCTTY", "O_CLOEXEC")
)
_POLL_S: Final = 0.005


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: It cannot be opened, or is not a regular file (a pipe, link, device or folder).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _CAREFULLY)
    except OSError as failure:
        if failure.errno in {errno.ELOOP, errno.ENXIO}:  # a link, a socket
            raise _refusal(path) from failure
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refusal(path)
    return os.fdopen(descriptor, "rb")


def read_small(path: Path, most_bytes: int) -> str:
    """Return the text of a regular file of at most `most_bytes`.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: It cannot be read, is not a regular file, or is too large (EFBIG); see its
            `strerror`.
        UnicodeDecodeError: It is not UTF-8 text.
    """
    with open_regular(path) as file:
        # `read` allocates the requested size at once; a worker near its cap may not have
        # `most_bytes`.
        content = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes // 1024} KiB", str(path))
    return content.decode("utf-8")


def replace_whole(path: Path, text: str) -> None:
    """Replace or create a file atomically and durably, readable only by this user. For one writer.

    Raises:
        OSError: It cannot be written; the old content is unchanged.
    """
    with made_whole(path) as fresh:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8"))


@contextmanager
def made_whole(to: Path) -> Iterator[Path]:
    """Yield a temporary path beside `to`, for a file or a folder of files, and rename it to `to`
    once its content is on disk. `to` is never incomplete, however this ends.

    Temporary files of killed processes beside it are removed. One writer at a time.

    Raises:
        OSError: It cannot be written, or `to` is a folder that is not empty.
    """
    remove_halves(to)
    fresh = to.with_name(f"{to.name}.{os.getpid()}.new")
    try:
        yield fresh
        for place in (*(fresh.iterdir() if fresh.is_dir() else ()), fresh):
            flush(place)
        fresh.rename(to)
    except BaseException:
        _remove(fresh)
        raise
    flush(to.parent)


def remove_halves(to: Path) -> None:
    """Remove what processes killed in `made_whole` have left beside `to`; ignore errors."""
    for left in to.parent.glob(f"{glob.escape(to.name)}.*.new"):
        process = left.name.split(".")[-2]
        if process == str(os.getpid()) or not Path("/proc", process).exists():
            _remove(left)


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        place.unlink()


def flush(place: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(lock: Path, patience_s: float) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created with its folder if missing. The file is
    never deleted: otherwise two processes could lock different files of the same name.

    Raises:
        TimeoutError: Another process has held the lock for `patience_s`.
        OSError: The file cannot be created.
    """
    import fcntl  # noqa: PLC0415 - only on Unix

    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | _CAREFULLY, 0o600)
    until_s = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    text = f"another process has kept it locked for {patience_s:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, text, str(lock)) from None
                time.sleep(_POLL_S)
        yield
    finally:
        # `close` is not enough: a child forked meanwhile may hold the descriptor open.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _refusal(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file", str(path))
