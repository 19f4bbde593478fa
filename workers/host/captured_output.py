"""Catches what this process prints: its file descriptors 1 and 2 lead to a file that is emptied
after each slice.

A file and not a pipe: a step that prints natively while it holds Python's lock would wait for a
reader of this very process. Until it is emptied the file grows by what one slice prints. It stays
where it is when the process dies. The next process of the slot on the same machine tells its
content; where none comes, the user can read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from workers.messages import PrintedOutput

#: Of one slice: 100 lines of 160 characters. The newest are kept.
KEPT_BYTES: Final = 16 * 2**10

_LINE_BUFFERED: Final = 1  # _IOLBF of glibc and musl (stdio.h)
_ENDED: Final = b"\n[the process ended here; another one begins]\n"


class CapturedOutput:
    """The output of one slot's process.

    Where no file can be written, it goes where it went before.
    """

    def __init__(self, name: str) -> None:
        """Redirect both descriptors of this process into a file called after `name`."""
        self._before = b""
        self._dropped_bytes = 0
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(
                file_of(name), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
            self._before, self._dropped_bytes = self._read()
            self._before += _ENDED if self._before else b""
            _flush()
            for descriptor in (1, 2):
                os.dup2(self._file, descriptor)
            _print_by_lines()

    def take(self) -> PrintedOutput | None:
        """Return what was printed since the last call, at most its newest `KEPT_BYTES`.

        `None`: nothing.
        """
        if self._file is None:
            return None
        _flush()
        try:
            printed, dropped_bytes = self._read()
        except OSError:
            return None
        content, dropped_bytes = self._before + printed, self._dropped_bytes + dropped_bytes
        self._before, self._dropped_bytes = b"", 0
        if not content:
            return None
        return PrintedOutput(text=content.decode("utf-8", "replace"), dropped_bytes=dropped_bytes)

    def _read(self) -> tuple[bytes, int]:
        """Empty the file; what a thread writes just between the two calls is lost."""
        assert self._file is not None  # noqa: S101 - asked only where there is one
        size = os.fstat(self._file).st_size
        if not size:
            return b"", 0
        content = os.pread(self._file, KEPT_BYTES, max(0, size - KEPT_BYTES))
        os.ftruncate(self._file, 0)
        if size > len(content):
            content = content.partition(b"\n")[2] or content  # from the beginning of a line
        return content, size - len(content)


def file_of(name: str) -> Path:
    """Return the file: in the folder of the file to which this process prints now, that of Ray's
    logs.
    """
    with contextlib.suppress(OSError):
        printed = Path("/proc/self/fd/1").readlink()
        if printed.is_file():
            return printed.parent / f"orchestrator-{name.replace('/', '-')}.log"
    return Path(tempfile.gettempdir()) / f"orchestrator-{os.geteuid()}-{name.replace('/', '-')}.log"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a step may have put anything there
            stream.flush()


def _print_by_lines() -> None:
    """Have Python and the C library hand on each line: what they still held when a process dies
    would be lost.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        library = ctypes.CDLL(None)
        library.setvbuf(
            ctypes.c_void_p.in_dll(library, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0)
        )
