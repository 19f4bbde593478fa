"""What a kept program prints: a pipe that its keeper empties into a file of bounded size.

Standard library alone. Tells the newest of it, and never reads the file.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

#: So many of the newest bytes are told: 100 lines of 160 characters.
TAIL_BYTES: Final = 16 * 2**10

_READ_BYTES: Final = 2**16


class Log:
    """A pipe, the file that it goes to, and the one before that."""

    def __init__(self, path: str, most_bytes: int) -> None:
        """Open both; what the file holds stays. `OSError` where it cannot be opened."""
        self.tail = b""
        """The newest of what was printed."""
        self._untold_bytes = 0
        self._path, self._most_bytes = path, most_bytes
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)

    def pump(self) -> bool:
        """Take what is in the pipe; say whether it was something."""
        try:
            text = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return False
        self.append(text)
        return bool(text)

    def take(self) -> tuple[str, int]:
        """Return the newest of what was printed since the last call, and how many bytes of it were
        left out before that.
        """
        size, self._untold_bytes = self._untold_bytes, 0
        text = self.tail[-size:] if size else b""
        if len(text) < size:  # from the beginning of a line
            text = text.partition(b"\n")[2] or text
        return text.decode("utf-8", "replace"), size - len(text)

    def append(self, text: bytes) -> None:
        """Add it as if the program had printed it. A full disk is not the program's fault."""
        self.tail = (self.tail + text)[-TAIL_BYTES:]
        self._untold_bytes += len(text)
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
