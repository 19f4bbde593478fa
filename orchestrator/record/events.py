"""The event log of a run, `events.jsonl`: one JSON object per line, written at once, and read back.

Does not define the events. Does not change structlog's global configuration.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Final

import structlog

from orchestrator.errors import ArchiveError
from workers.files import open_regular

EVENTS_NAME: Final = "events.jsonl"
"""Name of the file in the run folder."""
TEXT_LIMIT_BYTES: Final = 8 * 1024
EVENTS_MOST: Final = 10_000
"""Most events that one call of `read_events` returns by default."""

#: Bytes kept of the start of a text that is too long. Most of the kept text is the end: the last
#: line of a traceback is the exception.
_HEAD_BYTES: Final = 2 * 1024
_DEPTH_LIMIT: Final = 6
_WAITING_MOST_BYTES: Final = 8 * 2**20
"""Most bytes of lines that wait while the file cannot be written; further lines are lost."""


class EventLog:
    """Writes events to the log. Never raises; `problem` says what is wrong, if anything.

    Each line goes to the operating system at once, so a killed head loses none. While the disk is
    full, lines wait.
    """

    def __init__(
        self,
        path: Path,
        unix_s: Callable[[], float] = time.time,
        also: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Open no file yet; the first line opens it, and the next one after a failure. Lines are
        appended to an existing file.

        `also` is called with every event in its `harmless` form (`at`, `event`, `slot`, then the
        details). It must not raise or change the event.
        """
        self._unix_s = unix_s
        self._also = also
        self._file = _LineFile(path)
        self.problem: str | None = None
        """A sentence for the user while events cannot be written, else `None`."""
        self._logger = structlog.wrap_logger(
            self._file,
            # ASCII: it cannot break a line or control a terminal.
            processors=[
                self._entry,
                structlog.processors.JSONRenderer(allow_nan=False, separators=(",", ":")),
            ],
            wrapper_class=structlog.BoundLogger,
            cache_logger_on_first_use=True,
        )

    @property
    def incomplete(self) -> bool:
        """Whether the file lacks an event."""
        return bool(self._file.lost_count or self._file.waiting)

    def write(self, event: str, /, slot: str | None = None, **fields: object) -> None:
        """Write an event (a snake_case word) of a slot, or of the run as a whole.

        Any values in `fields` become JSON: numbers that are not finite become null, and texts above
        `TEXT_LIMIT_BYTES` lose their middle.
        """
        try:
            # `fields` is one argument: its names could clash with parameters of the logger.
            self._logger.info(event, slot=slot, fields=fields)
        except OSError as failure:
            lost = f" ({self._file.lost_count} lost so far)" if self._file.lost_count else ""
            self.problem = f"events cannot be written{lost}: {failure}"
        else:
            self.problem = None

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        self._file.close()

    def _entry(
        self, _logger: object, _method: str, given: MutableMapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the entry: `at`, `event` and `slot` first, and every value `harmless`."""
        at = datetime.fromtimestamp(self._unix_s(), tz=UTC).isoformat(timespec="milliseconds")
        first = {
            "at": at.replace("+00:00", "Z"),
            "event": _cut(given["event"]),
            "slot": harmless(given["slot"]),
        }
        # A detail named like one of these keys gets an underscore after its name.
        details = {
            f"{key}_" if key in first else key: value for key, value in given["fields"].items()
        }
        entry = {**first, **{_cut(key): harmless(value) for key, value in details.items()}}
        if self._also is not None:
            self._also(entry)
        return entry


class _LineFile:
    """Appends lines to a file; bytes that do not fit on the disk wait for the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw: FileIO | None = None
        self.waiting = b""
        self.lost_count = 0

    def info(self, line: str) -> None:
        """Append one line; `OSError` if it waits or is lost."""
        if len(self.waiting) > _WAITING_MOST_BYTES:
            self.lost_count += 1
        else:
            self.waiting += line.encode("ascii") + b"\n"
        if self._raw is None:
            self._raw = FileIO(self._path, "a")
        try:
            self.waiting = self.waiting[self._raw.write(self.waiting) or 0 :]
        except OSError:
            self.close()
            raise
        if self.waiting:
            raise OSError(f"{len(self.waiting)} bytes did not fit on the disk")

    def close(self) -> None:
        """Close the file."""
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()


def harmless(value: object, depth: int = 0) -> object:
    """Return `value` in a form that JSON can hold.

    `depth` is the number of containers around it.
    """
    # Python refuses to write thousands of decimal digits; numbers here need at most 64 bits.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """One line of the event log."""

    number: int
    """Offset of the end of its line in bytes; it increases from event to event."""
    at: str
    """ISO 8601 in UTC."""
    event: str
    slot: str | None
    details: Mapping[str, Any]

    @property
    def at_unix_s(self) -> float | None:
        """The time of the event; `None` if `at` is not a time."""
        try:
            return datetime.fromisoformat(self.at).timestamp()
        except (ValueError, OverflowError, OSError):
            return None


def read_events(
    folder: Path,
    names: Collection[str] = (),
    *,
    after: int = 0,
    slot: str | None = None,
    limit: int = EVENTS_MOST,
) -> tuple[StoredEvent, ...]:
    """Return the last `limit` events of a run folder, oldest first.

    Only events after the one with number `after`, with one of `names` if any are given, and of
    `slot` if it is given. Lines that are not events are skipped. `ArchiveError`: the log cannot be
    read.
    """
    wanted = [f'"event":{json.dumps(name)}'.encode() for name in names]
    of_slot = b"" if slot is None else f'"slot":{json.dumps(slot)}'.encode()
    lines: deque[tuple[int, bytes]] = deque(maxlen=limit)
    try:
        with open_regular(folder / EVENTS_NAME) as file:
            number = file.seek(after)
            for line in file:
                number += len(line)
                # A cheap filter first: parsing every line takes ten times as long.
                if of_slot in line and (not names or any(name in line for name in wanted)):
                    lines.append((number, line))
    except FileNotFoundError:
        return ()
    except OSError as failure:
        why = f"{folder / EVENTS_NAME} cannot be read: {failure.strerror}"
        raise ArchiveError(why) from failure
    events = (_event(number, line) for number, line in lines)
    return tuple(
        it
        for it in events
        if it is not None and (not names or it.event in names) and slot in {None, it.slot}
    )


def _event(number: int, line: bytes) -> StoredEvent | None:
    try:
        details = json.loads(line)
        at, event, slot = (details.pop(key) for key in ("at", "event", "slot"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # a line that is being written, or that a killed head did not finish
    return StoredEvent(number=number, at=str(at), event=str(event), slot=slot, details=details)
