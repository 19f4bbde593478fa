"""The event log of a run: one JSON object a line, written when the event happens.

Covers making any value a harmless line, and a disk that is full. Does not cover which events there are, nor
reading them. structlog is set up for this one file; its global configuration is left alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import structlog

TEXT_LIMIT_BYTES = 8 * 1024

#: Of a text that is too long, mostly the end is kept: the last line of a traceback is the exception.
_HEAD_BYTES = 2 * 1024
_DEPTH_LIMIT = 6


class EventLog:
    """Writes events as they come. Never raises; `problem` tells what is wrong, if anything.

    Each line goes to the operating system at once and in one piece, so that a killed head loses none.
    """

    def __init__(
        self,
        path: Path,
        unix_s: Callable[[], float] = time.time,
        also: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Prepare; the file is opened at the first line.

        Args:
            path: Of the file. Lines are added to what is there.
            unix_s: The clock.
            also: Told of every event in its harmless form (`at`, `event`, `slot`, then the details), whether or not
                its line can be written. Must not raise, and must not change what it is given.
        """
        self._file = _LineFile(path)
        self._lost_count = 0
        self.problem: str | None = None
        """A sentence for the user while events cannot be written, `None` while they can."""
        self._logger = structlog.wrap_logger(
            self._file,
            processors=[_entry_maker(unix_s, also), structlog.processors.JSONRenderer(serializer=_one_line_json)],
            wrapper_class=structlog.BoundLogger,
            cache_logger_on_first_use=True,
        )

    def write(self, event: str, /, slot: str | None = None, **fields: object) -> None:
        """Write one event.

        Args:
            event: What happened, as a snake_case word.
            slot: The slot it happened in; `None` for the run as a whole.
            fields: Details. Whatever they hold comes out as JSON: numbers that are not finite as null, text of
                more than `TEXT_LIMIT_BYTES` with its middle cut out.
        """
        try:
            # As one argument: a worker's details may have names that mean something to the logger.
            self._logger.info(event, slot=slot, fields=fields)
        except OSError as failure:
            self._lost_count += 1
            self.problem = f"events cannot be written ({self._lost_count} lost so far): {failure}"
        else:
            self.problem = None

    @property
    def incomplete(self) -> bool:
        """Whether an event was ever lost from the file."""
        return self._lost_count > 0

    def close(self) -> None:
        """Close the file. Writing afterwards opens it again."""
        self._file.close()


class _LineFile:
    """Appends lines to a file without a buffer of its own; opened at the first line, and again after a failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw: FileIO | None = None
        self._torn = False
        """The last line is incomplete: the disk was full."""

    def info(self, line: str) -> None:
        """Append one line.

        Raises:
            OSError: The file cannot be opened, or holds only a part of the line.
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


def _entry_maker(
    unix_s: Callable[[], float], also: Callable[[Mapping[str, Any]], None] | None
) -> Callable[[Any, str, MutableMapping[str, Any]], Mapping[str, Any]]:
    """Return the structlog processor that puts `at`, `event` and `slot` first and makes every value harmless."""

    def entry(_logger: object, _method: str, given: MutableMapping[str, Any]) -> Mapping[str, Any]:
        at = datetime.fromtimestamp(unix_s(), tz=UTC).isoformat(timespec="milliseconds")
        first = {"at": at.replace("+00:00", "Z"), "event": _cut(given["event"]), "slot": harmless(given["slot"])}
        # A detail with the name of one of our fields is kept, with an underscore after its name.
        details = {f"{key}_" if key in first else key: value for key, value in given["fields"].items()}
        made = {**first, **{_cut(key): harmless(value) for key, value in details.items()}}
        if also is not None:
            also(made)
        return made

    return entry


def _one_line_json(entry: Mapping[str, Any], **_unused: object) -> str:
    """Return the entry as JSON in ASCII, which cannot break a line or control a terminal."""
    return json.dumps(entry, allow_nan=False, separators=(",", ":"))


def harmless(value: object, depth: int = 0) -> object:
    """Return a value that JSON can hold, whatever was given; `depth` counts the containers around it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python refuses to write thousands of decimal digits; no number of ours needs more than 64 bits.
        return value if value.bit_length() <= 64 else _cut(hex(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping | list | tuple):
        return _harmless_items(value, depth + 1) if depth < _DEPTH_LIMIT else "..."
    return _cut(str(value))


def _harmless_items(
    value: Mapping[object, object] | list[object] | tuple[object, ...], depth: int
) -> dict[str, object] | list[object]:
    if isinstance(value, Mapping):
        return {_cut(str(key)): harmless(item, depth) for key, item in value.items()}
    return [harmless(item, depth) for item in value]


def _cut(text: str) -> str:
    content = text.encode("utf-8", "surrogatepass")
    if len(content) <= TEXT_LIMIT_BYTES:
        return text
    head = content[:_HEAD_BYTES].decode("utf-8", "ignore")
    tail = content[_HEAD_BYTES - TEXT_LIMIT_BYTES :].decode("utf-8", "ignore")
    return f"{head}\n[... {len(content) - TEXT_LIMIT_BYTES} of {len(content)} bytes cut ...]\n{tail}"
