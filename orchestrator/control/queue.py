"""Messages to a queue of jobs: submitted jobs, and orders for jobs or the queue.

A message is a batch of `Submitted` and `UserOrder` in one file of the queue's folder
(`record/command_file.py`). The sender does not wait for an answer, because the head may be dead.
Does not apply messages (`jobs/queue.py`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from pydantic import TypeAdapter, ValidationError

from orchestrator.errors import ArchiveError, one_line
from orchestrator.jobs.model import JobOrder, Sent, UserOrder
from orchestrator.record import command_file

Message: TypeAlias = Sequence[Sent]

_MESSAGE: Final = TypeAdapter(tuple[Sent, ...])


class NoMessageError(ValueError):
    """Content that is not a message to a queue."""


def put(folder: Path, message: Message) -> None:
    """Write a message to the queue of a folder, and sync it to disk.

    `ArchiveError`: the folder cannot be written, or other users could write there.
    """
    values = _MESSAGE.dump_python(tuple(message), mode="json", exclude_defaults=True)
    # Not pydantic's own JSON, which refuses names of files that are not UTF-8; ASCII keeps them.
    content = json.dumps(values).encode("ascii")
    try:
        command_file.put(folder, content, identity=secrets.token_hex(8))
    except OSError as failure:
        why = f"the commands of run {folder.parent.name} cannot be written: {failure.strerror}"
        raise ArchiveError(why) from failure


def say(
    folder: Path, order: JobOrder, names: Sequence[str | None], *, by: str, identity: str = ""
) -> None:
    """Write an order for jobs to the queue of a folder; the name `None` is the queue itself.

    `by` names the sender. Of orders with the same `identity` only the first is obeyed; by default
    each call has its own. `ArchiveError` as for `put`.
    """
    identity = identity or secrets.token_hex(8)
    orders = [UserOrder(id=f"{identity}-{name}", order=order, job=name, by=by) for name in names]
    put(folder, orders)


def waiting(folder: Path) -> list[Sent]:
    """Return the messages that the head of a folder has not processed yet, oldest first.

    `ArchiveError`: the folder cannot be read, or other users could write there.
    """
    found: list[Sent] = []
    for row in command_file.waiting(folder):
        with suppress(NoMessageError):
            found += message_of(row.content)
    return found


def message_of(content: bytes) -> Message:
    """Return the message in the content of a file; `NoMessageError` if there is none."""
    try:
        return _MESSAGE.validate_python(json.loads(content), extra="forbid")
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise NoMessageError(one_line(f"{where[:80]}: {first['msg']}")) from failure
    except (ValueError, RecursionError) as failure:
        raise NoMessageError(one_line(f"it is not JSON: {failure}")) from failure
