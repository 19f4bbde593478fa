"""The output of a kept program: a pipe that its keeper copies into a file of bounded size.

Standard library only. Keeps the newest output in memory, and never reads the file.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

#: Newest output kept in memory, in bytes: 100 lines of 160 characters.
TAIL_BYTES: Final = 16 * 2**10

_READ_BYTES: Final = 2**16


class Log:
    """A pipe, its log file, and the previous log file."""

    def __init__(self, path: str, most_bytes: int) -> None:
        """Open the pipe, and the file for appending; raise `OSError` if that fails."""
        self.tail = b""
        """The newest output."""
        self._unsent_bytes = 0
        self._path, self._most_bytes = path, most_bytes
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)

    def pump(self) -> bool:
        """Copy up to 64 KiB from the pipe to the log; return whether there were any."""
        try:
            text = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return False
        self.append(text)
        return bool(text)

    def take(self) -> tuple[str, int]:
        """Return the newest output since the last call, and the number of bytes dropped before."""
        size, self._unsent_bytes = self._unsent_bytes, 0
        text = self.tail[-size:] if size else b""
        if len(text) < size:  # begin at a line
            text = text.partition(b"\n")[2] or text
        return text.decode("utf-8", "replace"), size - len(text)

    def append(self, text: bytes) -> None:
        """Append text as if the program had printed it. Errors of the disk are ignored."""
        self.tail = (self.tail + text)[-TAIL_BYTES:]
        self._unsent_bytes += len(text)
        if self._size + len(text) > self._most_bytes and self._file is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(OSError):
                os.replace(self._path, f"{self._path}.1")  # noqa: PTH105 - no Path for each byte
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                self._size = 0
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._size += os.write(self._file, text)
