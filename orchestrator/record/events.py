"""The event log of a run: one JSON object a line, written when the event happens.

Does not say which events there are, nor read them. structlog's global configuration is left alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import structlog

TEXT_LIMIT_BYTES = 8 * 1024

#: Of a text that is too long, mostly the end is kept: the last line of a traceback is the
#: exception.
_HEAD_BYTES = 2 * 1024
_DEPTH_LIMIT = 6


class EventLog:
    """Writes events as they come. Never raises; `problem` tells what is wrong, if anything.

    Each line goes to the operating system at once and in one piece, so that a killed head loses
    none.
    """

    def __init__(
        self,
        path: Path,
        unix_s: Callable[[], float] = time.time,
        also: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Prepare; the file is opened at the first line, and again after a failure. Lines are added
        to what is there.

        `also` is told of every event in its harmless form (`at`, `event`, `slot`, then the
        details), whether or not its line can be written. It must not raise, and must not change
        what it is given.
        """
        self._unix_s = unix_s
        self._also = also
        self._file = _LineFile(path)
        self._lost_count = 0
        self.incomplete = False
        """Whether an event was ever lost from the file."""
        self.problem: str | None = None
        """A sentence for the user while events cannot be written, `None` while they can."""
        self._logger = structlog.wrap_logger(
            self._file,
            # In ASCII, which cannot break a line or control a terminal.
            processors=[
                self._entry,
                structlog.processors.JSONRenderer(allow_nan=False, separators=(",", ":")),
            ],
            wrapper_class=structlog.BoundLogger,
            cache_logger_on_first_use=True,
        )

    def write(self, event: str, /, slot: str | None = None, **fields: object) -> None:
        """Write an event (a snake_case word) of a slot, or of the run as a whole.

        Whatever its details hold comes out as JSON: numbers that are not finite as null, text of
        more than `TEXT_LIMIT_BYTES` with its middle cut out.
        """
        try:
            # As one argument: a worker's details may have names that mean something to the logger.
            self._logger.info(event, slot=slot, fields=fields)
        except OSError as failure:
            self._lost_count += 1
            self.incomplete = True
            self.problem = f"events cannot be written ({self._lost_count} lost so far): {failure}"
        else:
            self.problem = None

    def close(self) -> None:
        """Close the file. Writing afterwards opens it again."""
        self._file.close()

    def _entry(
        self, _logger: object, _method: str, given: MutableMapping[str, Any]
    ) -> Mapping[str, Any]:
        """Put `at`, `event` and `slot` first and make every value harmless."""
        at = datetime.fromtimestamp(self._unix_s(), tz=UTC).isoformat(timespec="milliseconds")
        first = {
            "at": at.replace("+00:00", "Z"),
            "event": _cut(given["event"]),
            "slot": harmless(given["slot"]),
        }
        # A detail with the name of one of our fields is kept, with an underscore after its name.
        details = {
            f"{key}_" if key in first else key: value for key, value in given["fields"].items()
        }
        entry = {**first, **{_cut(key): harmless(value) for key, value in details.items()}}
        if self._also is not None:
            self._also(entry)
        return entry


class _LineFile:
    """Appends lines to a file without a buffer of its own.

    Opened at the first line, and again after a failure.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw: FileIO | None = None
        self._torn = False
        """The last line is incomplete: the disk was full."""

    def info(self, line: str) -> None:
        """Append one line.

        `OSError` where the file cannot be opened, or holds only a part of the line.
        """
        if self._raw is None:
            self._raw = FileIO(self._path, "a")
        content = (("\n" if self._torn else "") + line + "\n").encode("ascii")
        written = 0
        try:
            written = self._raw.write(content) or 0
        except OSError:
            self.close()
            raise
        self._torn = written < len(content)
        if self._torn:
            raise OSError(f"only {written} of {len(content)} bytes fitted on the disk")

    def close(self) -> None:
        """Close the file."""
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()


def harmless(value: object, depth: int = 0) -> object:
    """Return a value that JSON can hold, whatever was given.

    `depth` counts the containers around it.
    """
    # Python refuses to write thousands of decimal digits; no number of ours needs more than 64
    # bits.
    if value is None or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping | list | tuple) and depth >= _DEPTH_LIMIT:
        return "..."
    if isinstance(value, Mapping):
        return {_cut(str(key)): harmless(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [harmless(item, depth + 1) for item in value]
    return _cut(hex(value) if isinstance(value, int) else str(value))


def _cut(text: str) -> str:
    content = text.encode("utf-8", "surrogatepass")
    if len(content) <= TEXT_LIMIT_BYTES:
        return text
    head = content[:_HEAD_BYTES].decode("utf-8", "ignore")
    tail = content[_HEAD_BYTES - TEXT_LIMIT_BYTES :].decode("utf-8", "ignore")
    return (
        f"{head}\n[... {len(content) - TEXT_LIMIT_BYTES} of {len(content)} bytes cut ...]\n{tail}"
    )
