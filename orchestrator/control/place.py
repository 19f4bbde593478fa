"""Where the socket of a run's head is, and a name for it that is short enough.

In the run folder, or, where its file system has no sockets, in the user's own folder under
$XDG_RUNTIME_DIR.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def places(folder: Path) -> tuple[Path, ...]:
    """Return where the socket of a run folder may be, the better place first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        return (folder / "control.sock",)
    found = folder.stat()
    return folder / "control.sock", Path(
        runtime
    ) / f"orchestrator-{found.st_dev:x}-{found.st_ino:x}.sock"


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield another name of a path: the address of a socket has at most 107 bytes, and run folders
    may lie deep.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
