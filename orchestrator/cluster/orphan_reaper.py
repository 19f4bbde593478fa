"""Cleans up after a rehearsal whose head was killed. Runs as a process of its own; standard library
only.

The kernel ends raylets and GCS with the head, and workers end with their raylet, unless they hang
or were started while the head was ending. So when the head's pipe closes without a `bye`, this
process finds the processes that work in the rehearsal's private folder, ends them by process id
until nothing is left, and removes the folder.

    python orphan_reaper.py FOLDER        standard input: `bye` from a head that ends well
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Ray's processes, by the file they execute. Other programs that use the folder, such as a shell,
#: are left alone.
_PROGRAMS = ("python", "raylet", "gcs_server")

#: Raylets die with the head at once; a worker that one of them was just starting shows within a
#: second or so.
_QUIET_S = 2.0
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.1


def main(folder: str) -> None:
    """Wait for the head to end, and clean up if it did not do so itself."""
    for line in sys.stdin:
        if line.strip() == "bye":
            return
    began_s = quiet_since_s = time.monotonic()
    while time.monotonic() - quiet_since_s < _QUIET_S and time.monotonic() - began_s < _PATIENCE_S:
        for pid in _at_work_in(folder):
            quiet_since_s = time.monotonic()
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # Again and again: a process that is being ended may still write.
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_LOOK_EVERY_S)


def _at_work_in(folder: str) -> Iterator[int]:
    """Yield the processes of Ray that have the folder in their command line, or a file of it open.

    Both, because Ray's workers overwrite their command line with a title of their own, `ray::…`. A
    notebook of the user that only reads a log has neither.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                program = (entry / "exe").readlink().name
                if program.startswith(_PROGRAMS) and _works_in(folder, entry):
                    yield int(entry.name)


def _works_in(folder: str, process: Path) -> bool:
    typed = (process / "cmdline").read_bytes().decode("utf-8", "replace")
    if _is_in(folder, typed):
        return True
    return typed.startswith("ray::") and any(_is_in(folder, path) for path in _open_files(process))


def _open_files(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            yield str(descriptor.readlink())


def _is_in(folder: str, text: str) -> bool:
    """Say whether the text names something in the folder.

    Another folder may begin with the same letters.
    """
    return f"{folder}/" in text


if __name__ == "__main__":
    main(sys.argv[1])
