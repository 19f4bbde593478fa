"""The journal of a queue: one JSON array a line, which is a batch of records that belong together.

A batch is written and synced as a whole before it is carried out, and read back as a whole or not
at all: what a killed head left of its last line is cut off, and its decisions are made again from
the same queue. A line that is damaged before the last is never skipped: reading ends with an error
that says what to do. One process writes, which holds the run folder's lock; others may read.

Does not decide what follows from the records (`queue.py`).
"""

from __future__ import annotations

import errno
import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from orchestrator.errors import ArchiveError
from orchestrator.jobs.lifecycle import IllegalRecordError
from orchestrator.jobs.model import Record
from orchestrator.jobs.queue import Entry, Kept, Queue, QueueKept
from workers.files import flush, open_regular

JOURNAL_NAME = "journal.jsonl"
QUEUE_NAME = "jobs"
"""Of the folder of a queue in its run folder."""
_VERSION = 1
_DECODER = json.JSONDecoder()
_FIRST_LINE = b'{"journal":%d}\n' % _VERSION

#: A journal is compacted when it is larger than this, and so many times larger than its jobs need.
_SMALL_BYTES, _TIMES = 8 * 2**20, 8
_JOB_BYTES = 1024


class JournalError(ArchiveError):
    """A journal that cannot be read to its end."""


class Journal:
    """Appends batches of records to a file."""

    def __init__(self, path: Path) -> None:
        """Open the journal, or begin one. A torn last line is cut off.

        Raises:
            OSError: It cannot be written.
            JournalError: Another version wrote it, or it is no journal.
        """
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.with_name(f"{path.name}.new").unlink(missing_ok=True)
        self._descriptor = _opened(path)
        content = path.read_bytes()
        self._size = _sound_bytes(path, content)
        self.cut_bytes = len(content) - self._size
        """What was cut off the end: the batch that a killed head was writing."""
        if self._size == 0:
            self._write(_FIRST_LINE)
            flush(path.parent)
        elif self.cut_bytes:
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)

    def append(self, records: Iterable[Record]) -> None:
        """Write a batch, and return once it would survive a power cut.

        Raises:
            OSError: It is not in the journal, which is as it was.
        """
        self._write(_line(records))

    def compact(self, queue: Queue) -> bool:
        """Replace the records by what they add up to, where they have become many times that.

        A crash at any time leaves the journal as it was, or the new one.

        Raises:
            OSError: It is as it was.
        """
        if self._size <= max(_SMALL_BYTES, _TIMES * _JOB_BYTES * len(queue.standings)):
            return False
        lines = [_FIRST_LINE, *(_line([entry]) for entry in queue.condensed())]
        content = b"".join(lines)
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.unlink(missing_ok=True)
        descriptor = _opened(fresh)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
            fresh.replace(self._path)
        except BaseException:
            os.close(descriptor)
            fresh.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, len(content)
        flush(self._path.parent)
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        try:
            if os.fstat(self._descriptor).st_size != self._size:  # of a batch that failed
                os.ftruncate(self._descriptor, self._size)
            _write_all(self._descriptor, line)
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)


def records(path: Path) -> Iterator[Record]:
    """Read the records in their order, without those that a compaction has summed up.

    Raises:
        OSError: The file cannot be read.
        JournalError: A line before the last is damaged, or another version wrote it.
    """
    for _, batch in _batches(path):
        for entry in batch:
            if not isinstance(entry, Kept | QueueKept):
                yield entry


def queue_of(folder: Path) -> Queue:
    """Return the queue of a folder as its journal tells it; without a journal, an empty one.

    Raises:
        OSError: The journal cannot be read.
        JournalError: A line before the last is damaged, or another version wrote it.
    """
    queue, path = Queue(), folder / JOURNAL_NAME
    if not path.exists():
        return queue
    was_enabled = gc.isenabled()
    gc.disable()  # a replay makes no circles, and the collector would look at all jobs many times
    try:
        for number, batch in _batches(path):
            try:
                for entry in batch:
                    queue.apply(entry)
            except IllegalRecordError as failure:
                raise _damaged(path, number, str(failure)) from failure
    finally:
        if was_enabled:
            gc.enable()
    return queue


def encoded(entries: Iterable[Entry]) -> str:
    """Return records as a JSON array in one line, without what is as it is by default."""
    return json.dumps(
        [{"kind": type(entry).__name__, **_flat(entry)} for entry in entries],
        separators=(",", ":"),
        default=lambda value: _flat(value) if is_dataclass(value) else dict(value),
    )


def decoded(text: str | bytes) -> list[Entry]:
    """Return the records of a JSON array.

    Raises:
        ValueError: It is none, or holds something else.
    """
    # It is ASCII: to find that out for each line takes as long as to parse a short one.
    words = (text if isinstance(text, str) else text.decode("ascii")).rstrip()
    raws, end = _DECODER.raw_decode(words)
    if not isinstance(raws, list) or end < len(words):
        raise ValueError("no batch of records")
    try:
        return [_BUILD[raw.pop("kind")](raw) for raw in raws]
    except (KeyError, TypeError, AttributeError) as failure:
        raise ValueError(f"no batch of records ({failure!r})") from failure


def _line(entries: Iterable[Entry]) -> bytes:
    return encoded(entries).encode("ascii") + b"\n"


def _batches(path: Path) -> Iterator[tuple[int, list[Entry]]]:
    """Read batch by batch, each with the number of its line."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except FileNotFoundError:
        raise
    except OSError as failure:
        raise JournalError(f"{path} cannot be read: {failure.strerror}") from failure
    lines = content[: _sound_bytes(path, content)].splitlines()[1:]
    for number, line in enumerate(lines, 2):
        try:
            yield number, decoded(line)
        except ValueError as failure:
            raise _damaged(path, number, str(failure)) from failure


def _sound_bytes(path: Path, content: bytes) -> int:
    """Return how much of a journal counts: all but a last line that was not written to its end.

    After a power cut such a line may be complete in length and hold zeros.
    """
    first, newline, _ = content.partition(b"\n")
    if not newline:
        if not _FIRST_LINE.startswith(content):
            raise JournalError(f"{path}: this is no journal of a queue")
        return 0
    try:
        version = json.loads(first)["journal"]
    except (ValueError, KeyError, TypeError):
        raise JournalError(f"{path}:1: this is no journal of a queue") from None
    if version != _VERSION:
        raise JournalError(
            f"{path}:1: version {version} of the journal, and this program reads {_VERSION}: "
            "go on with the program that wrote it, or begin another queue with --new"
        )
    size = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, size - 1) + 1
    if last:
        try:
            json.loads(content[last:size])
        except ValueError:
            return last
    return size


def _damaged(path: Path, number: int, why: str) -> JournalError:
    return JournalError(
        f"{path}:{number}: this line is damaged ({why}). The {number - 1} lines before it are "
        f"good: to go on from there, type `cp {path} {path}.damaged && "
        f"head -n {number - 1} {path}.damaged > {path}`; or begin another queue with --new"
    )


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, content: bytes) -> None:
    written = os.write(descriptor, content)
    if written < len(content):  # the disk is full; a second write says so
        written += os.write(descriptor, content[written:])
    if written < len(content):
        raise OSError(errno.ENOSPC, "the disk is full")


def _flat(value: Any) -> dict[str, object]:  # noqa: ANN401 - any of the dataclasses
    """Return the fields of a value that are not as they are by default."""
    found = {}
    for each in fields(value):
        content = getattr(value, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if content != default:
            found[each.name] = content
    return found


def _builder(hint: Any) -> Callable[[Any], Any] | None:  # noqa: ANN401 - any type of a field
    """Return what makes a value of a type from its JSON, which it takes over; `None`: it is that.

    A field that is `None` is so by default, and so not in the JSON.
    """
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        builders = [
            (name, build) for name, inner in hints.items() if (build := _builder(inner)) is not None
        ]

        def build_all(raw: dict[str, Any]) -> object:
            for name, build in builders:
                if name in raw:
                    raw[name] = build(raw[name])
            return hint(**raw)

        return build_all if builders else lambda raw: hint(**raw)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {member.value: member for member in hint}.__getitem__
    inner = [build for each in get_args(hint) if (build := _builder(each))]
    if get_origin(hint) is not tuple:
        return inner[0] if inner else None
    return (lambda raw: tuple(map(inner[0], raw))) if inner else tuple


#: From the fields of a record to the record.
_BUILD: Mapping[str, Any] = {kind.__name__: _builder(kind) for kind in get_args(Entry)}
