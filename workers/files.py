"""Small files that are not trusted, or that several processes write: read with care, replaced as a
whole, locked.

Another user may have replaced such a file by a pipe, a link or a disk image: that is refused
without waiting, and is not read. Does not cover what the text means.
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
#: one; no child of this process gets to hold the file.
#: Windows, where only `resilient` works, has none of them.
_CAREFULLY: Final = sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_NOCTTY", "O_CLOEXEC")
)
_LOOK_EVERY_S: Final = 0.005


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: It cannot be opened, or is a pipe, a link, a device or a folder.
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
        FileNotFoundError: There is none.
        OSError: It cannot be read; where it is no regular file, or too large (EFBIG), `strerror`
            says so.
        UnicodeDecodeError: It is no text.
    """
    with open_regular(path) as file:
        # What is asked for is allocated at once, in a worker near its cap as well.
        content = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes // 1024} KiB", str(path))
    return content.decode("utf-8")


def replace_whole(path: Path, text: str) -> None:
    """Replace a file, or make it, atomically and durably, readable only by this user. One writer at
    a time.

    Raises:
        OSError: It cannot be written; then it is as it was.
    """
    with made_whole(path) as fresh:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8"))


@contextmanager
def made_whole(to: Path) -> Iterator[Path]:
    """Give a name beside `to` for a file or a folder of files, and give what is made there the name
    `to` once it is on the disk. However this ends, there is no half of it under that name.

    What processes that were killed have left beside it is removed. One writer at a time.

    Raises:
        OSError: It cannot be written, or there is a full folder of that name.
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
    """Remove what processes that were killed in `made_whole` have left, as far as possible."""
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
    """Have a file, or the names in a folder, be on the disk when this returns."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(lock: Path, patience_s: float) -> Iterator[None]:
    """Keep others out who lock the same file. It is made, with its folder, and stays: else there
    could be two of them.

    Raises:
        TimeoutError: Another process has held it for so long.
        OSError: It cannot be made.
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
                    told = f"another process has kept it locked for {patience_s:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, told, str(lock)) from None
                time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        # Not left to `close`: a child that was forked meanwhile may hold the descriptor open.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _refusal(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file", str(path))
