"""Reads a small file that is not trusted: another user may have replaced it by a pipe, a link or a disk image.

Covers refusing those without waiting and without reading them. Does not cover what the text means.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

#: Opening does not wait for a pipe's other end, follow a link, or make a terminal the controlling one.
_CAREFULLY = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


def read_small(path: Path, most_bytes: int) -> str:
    """Return the text of a regular file of at most `most_bytes`.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read; where it is no regular file, or too large, `strerror` says so.
        UnicodeDecodeError: It is no text.
    """
    try:
        descriptor = os.open(path, _CAREFULLY)
    except OSError as failure:
        if failure.errno in {errno.ELOOP, errno.ENXIO}:  # a link, a socket
            raise _refusal(path) from failure
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _refusal(path)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes // 1024} KiB", str(path))
    return content.decode("utf-8")


def _refusal(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file", str(path))
