"""The diary of a run, `events.jsonl`: one JSON object a line, written at once, and read back.

Does not say which events there are. structlog's global configuration is left alone.
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
"""The file in the run folder."""
TEXT_LIMIT_BYTES: Final = 8 * 1024
EVENTS_MOST: Final = 10_000
"""Of one look."""

#: Of a text that is too long, mostly the end is kept: the last line of a traceback is the
#: exception.
_HEAD_BYTES: Final = 2 * 1024
_DEPTH_LIMIT: Final = 6
_WAITING_MOST_BYTES: Final = 8 * 2**20
"""Of lines that wait while nothing can be written; what comes then is lost."""


class EventLog:
    """Writes events as they come. Never raises; `problem` tells what is wrong, if anything.

    Each line goes to the operating system at once, so that a killed head loses none. While the disk
    is full, lines wait.
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
        details). It must not raise, and must not change what it is given.
        """
        self._unix_s = unix_s
        self._also = also
        self._file = _LineFile(path)
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

    @property
    def incomplete(self) -> bool:
        """Whether an event is missing in the file."""
        return bool(self._file.lost_count or self._file.waiting)

    def write(self, event: str, /, slot: str | None = None, **fields: object) -> None:
        """Write an event (a snake_case word) of a slot, or of the run as a whole.

        Whatever its details hold comes out as JSON: numbers that are not finite as null, text of
        more than `TEXT_LIMIT_BYTES` with its middle cut out.
        """
        try:
            # As one argument: a worker's details may have names that mean something to the logger.
            self._logger.info(event, slot=slot, fields=fields)
        except OSError as failure:
            lost = f" ({self._file.lost_count} lost so far)" if self._file.lost_count else ""
            self.problem = f"events cannot be written{lost}: {failure}"
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
    """Appends lines to a file; what does not fit on the disk waits for the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw: FileIO | None = None
        self.waiting = b""
        self.lost_count = 0

    def info(self, line: str) -> None:
        """Append one line; `OSError` where it waits, or is lost."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """One line of the diary."""

    number: int
    """Where its line ends, in bytes; a later event has a larger one."""
    at: str
    """ISO 8601 in UTC."""
    event: str
    slot: str | None
    details: Mapping[str, Any]

    @property
    def at_unix_s(self) -> float | None:
        """Its moment; `None` where `at` is none."""
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
    """Return the last events of a run folder after the one of a number, in their order.

    Of some names if any are given, and of one slot if one is. A line that is no event is left out.
    `ArchiveError`: the diary cannot be read.
    """
    wanted = [f'"event":{json.dumps(name)}'.encode() for name in names]
    of_slot = b"" if slot is None else f'"slot":{json.dumps(slot)}'.encode()
    lines: deque[tuple[int, bytes]] = deque(maxlen=limit)
    try:
        with open_regular(folder / EVENTS_NAME) as file:
            number = file.seek(after)
            for line in file:
                number += len(line)
                # Most lines are not asked for, and to parse them all takes ten times as long.
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
        told = json.loads(line)
        at, event, slot = (told.pop(key) for key in ("at", "event", "slot"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # it is being written, or its end was not when a head was killed
    return StoredEvent(number=number, at=str(at), event=str(event), slot=slot, details=told)
