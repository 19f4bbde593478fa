"""The inbox of a queue: messages as files, so that jobs come in while the head works or is dead.

A message is a batch of `Submitted`, `SweepSubmitted`, `Said` and `QueueHeld`, taken as a whole. It
is written aside, synced and renamed, so that it is there as a whole or not at all; and removed only
once the queue with it is stored, so that it may be seen twice (`Queue.why_refused`). Who can write
here has commands run: only the user's own files in a folder of mode 0700 are read.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from orchestrator.errors import ArchiveError
from orchestrator.jobs.codec import decoded, encoded
from orchestrator.jobs.model import QueueHeld, Said, Submitted, SweepSubmitted
from workers.files import read_small, replace_whole

_Sent: TypeAlias = Submitted | SweepSubmitted | Said | QueueHeld
Message: TypeAlias = Sequence[_Sent]

_MOST_BYTES = 64 * 2**20


class InboxError(ArchiveError):
    """A message, or a folder of messages, that is not to be trusted or cannot be read."""


def put(folder: Path, message: Message) -> Path:
    """Leave a message for the queue of a folder, durably, and return its file.

    Raises:
        OSError: It could not be written, and is not there.
        InboxError: The inbox belongs to another user, or others may write to it.
    """
    inbox = folder / "inbox"
    inbox.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(inbox, stat.S_ISDIR)
    path = inbox / f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
    replace_whole(path, encoded(message))
    return path


def waiting(folder: Path) -> Iterator[tuple[Path, Message | InboxError]]:
    """Return the messages in the order in which they came; in place of one that is not to be
    trusted or cannot be read, why.

    Raises:
        InboxError: The inbox itself is not to be trusted.
        OSError: It cannot be listed.
    """
    inbox = folder / "inbox"
    if not os.path.lexists(inbox):
        return
    _check(inbox, stat.S_ISDIR)
    for path in sorted(inbox.glob("[!.]*.json")):
        try:
            yield path, _message(path)
        except FileNotFoundError:
            continue
        except InboxError as failure:
            yield path, failure
        except (OSError, ValueError) as failure:
            yield path, InboxError(f"{path}: cannot be read: {failure}; remove it")


def remove(path: Path) -> None:
    """Remove a message that is stored in the queue, or was refused."""
    path.unlink(missing_ok=True)


def _message(path: Path) -> Message:
    _check(path, stat.S_ISREG)
    entries = decoded(read_small(path, _MOST_BYTES))
    message = [entry for entry in entries if isinstance(entry, _Sent)]
    if len(message) < len(entries):
        raise ValueError("it holds records that only the queue itself makes")
    return message


def _check(path: Path, is_kind: Callable[[int], bool]) -> None:
    found = path.lstat()
    if not is_kind(found.st_mode):
        raise InboxError(f"{path} is no {'folder' if is_kind is stat.S_ISDIR else 'regular file'}")
    if found.st_uid != os.geteuid():
        raise InboxError(f"{path} belongs to another user; nothing of it is read")
    if found.st_mode & 0o077:
        wanted = "700" if is_kind is stat.S_ISDIR else "600"
        raise InboxError(f"{path} is open to other users; type `chmod {wanted} {path}`")
