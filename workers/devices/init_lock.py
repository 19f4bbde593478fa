"""One process at a time on a device.

Workers that start together must neither count each other's context nor grow into the same free bytes. This is a lock
file of this user on this machine, which the kernel releases with the process. Does not keep out other users or
programs. A worker holds it while it opens its device, and again while it obtains memory in stages.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone_on(device: str) -> Iterator[None]:
    """Hold the lock of a device, named by whatever identifies it on this machine, for the duration of a `with`."""
    key = hashlib.sha256(device.encode()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    lock_path = Path(tempfile.gettempdir()) / f"orchestrator-context-{user}-{key}.lock"
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows, where workers then start without a lock
    except ImportError:
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
