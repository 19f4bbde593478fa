"""Small files that say what an agent has changed on this machine, so that another can put it back
if it is killed.

One file for each agent, written before anything is changed, gone when all of it is put back. Covers
reading and writing them, and whose they are. Does not put anything back (`agent.py` does).
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from workers.files import locked, read_small, replace_whole
from workers.host.processes import is_alive, start_time
from workers.learned_limits.store import default_path
from workers.node_agent.card_settings import CardChange
from workers.node_agent.mps import Daemon

_SCHEMA: Final = 2
_FOLDER: Final = "kept"
_MOST_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """What one agent has changed, or was about to."""

    node: str
    pid: int
    started: str | None
    """When the agent began, as `processes.start_time` reports it."""
    host: str
    """A home folder may be shared by machines."""
    nvml: str | None
    """Script of a fake NVML; `None` is the driver's."""
    changes: tuple[CardChange, ...] = ()
    daemon: Daemon | None = None

    @property
    def is_guarded(self) -> bool:
        """Say whether the agent is there to put things back itself."""
        return is_alive(self.pid, self.started)


def folder() -> Path:
    """Return where the files are: beside the learned limits."""
    return default_path().parent / _FOLDER


def mine(node: str, nvml: str | None) -> JournalEntry:
    """Return the record of this process, with nothing in it yet."""
    pid = os.getpid()
    return JournalEntry(
        node=node, pid=pid, started=start_time(pid), host=socket.gethostname(), nvml=nvml
    )


def write(kept: JournalEntry) -> None:
    """Write a record, atomically and durably, readable only by this user.

    Raises:
        OSError: It cannot be written; nothing must be changed then.
    """
    path = _path(kept)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_whole(path, json.dumps({"schema": _SCHEMA, **asdict(kept)}))


def remove(kept: JournalEntry) -> None:
    """Forget a record: all of it is put back."""
    _path(kept).unlink(missing_ok=True)


def others(nvml: str | None) -> tuple[JournalEntry, ...]:
    """Return the records of other agents on this machine and NVML, guarded or not.

    What is no record is left alone.
    """
    found = []
    for path in sorted(folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            kept = _read(path)
            is_mine = kept.pid == os.getpid() and kept.started == start_time(os.getpid())
            if kept.host == socket.gethostname() and kept.nvml == nvml and not is_mine:
                found.append(kept)
    return tuple(found)


def one_at_a_time(patience_s: float) -> AbstractContextManager[None]:
    """Keep other agents of this user from changing things meanwhile.

    `OSError` if the lock cannot be had.
    """
    return locked(folder() / "lock", patience_s)


def _path(kept: JournalEntry) -> Path:
    return folder() / f"{kept.host}-{kept.pid}-{kept.started}.json"


def _read(path: Path) -> JournalEntry:
    told = json.loads(read_small(path, _MOST_BYTES))
    if told.pop("schema") != _SCHEMA:
        raise ValueError("written by another version")
    changes = tuple(CardChange(**change) for change in told.pop("changes"))
    daemon = told.pop("daemon")
    return JournalEntry(
        **told, changes=changes, daemon=None if daemon is None else Daemon(**daemon)
    )
