"""Commands to a queue of jobs: what is submitted to it, and what is said of its jobs.

A message is a batch of `Submitted` and `UserOrder`, and is one file beside the queue
(`record/command_file.py`). Its sender waits for no answer: the head may be dead. Does not know what
the queue does about it (`jobs/queue.py`).
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
    """What is no message to a queue."""


def put(folder: Path, message: Message) -> None:
    """Leave a message for the queue of a folder, durably.

    `ArchiveError` where nothing can be written, or others could have written.
    """
    values = _MESSAGE.dump_python(tuple(message), mode="json", exclude_defaults=True)
    # In ASCII: a name of a file that is no UTF-8 comes back, which pydantic's own JSON refuses.
    content = json.dumps(values).encode("ascii")
    try:
        command_file.put(folder, content, identity=secrets.token_hex(8))
    except OSError as failure:
        why = f"the commands of run {folder.parent.name} cannot be written: {failure.strerror}"
        raise ArchiveError(why) from failure


def say(
    folder: Path, order: JobOrder, names: Sequence[str | None], *, by: str, identity: str = ""
) -> None:
    """Leave an order about jobs for the queue of a folder; `None` is the queue itself.

    `by` is who says it. Of words with the same `identity` the first is obeyed alone; by default
    each has its own. `ArchiveError` as of `put`.
    """
    identity = identity or secrets.token_hex(8)
    orders = [UserOrder(id=f"{identity}-{name}", order=order, job=name, by=by) for name in names]
    put(folder, orders)


def waiting(folder: Path) -> list[Sent]:
    """Return what the head of a folder has not taken yet, in its order.

    `ArchiveError` where it cannot be read, or is not to be trusted.
    """
    found: list[Sent] = []
    for row in command_file.waiting(folder):
        with suppress(NoMessageError):
            found += message_of(row.content)
    return found


def message_of(content: bytes) -> Message:
    """Return the message that a file holds; `NoMessageError` if it holds none."""
    try:
        return _MESSAGE.validate_python(json.loads(content), extra="forbid")
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise NoMessageError(one_line(f"{where[:80]}: {first['msg']}")) from failure
    except (ValueError, RecursionError) as failure:
        raise NoMessageError(one_line(f"it is no JSON: {failure}")) from failure
