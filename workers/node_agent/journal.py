"""Small files that say what an agent has changed on this machine, so that another can put it back if it is killed.

One file for each agent, written before anything is changed, gone when all of it is put back. Covers reading and writing
them, and whose they are. Does not put anything back (`agent.py` does).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import platformdirs

from workers.host.processes import is_alive, start_time
from workers.learned_limits.store import STATE_DIR_VARIABLE
from workers.node_agent.mps import Daemon
from workers.node_agent.power_limits import PowerChange

_SCHEMA: Final = 1
_FOLDER: Final = "kept"
_CAREFULLY: Final = os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK_EVERY_S: Final = 0.05


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
    power: tuple[PowerChange, ...] = ()
    daemon: Daemon | None = None

    @property
    def is_guarded(self) -> bool:
        """Say whether the agent is there to put things back itself."""
        return is_alive(self.pid, self.started)


def folder() -> Path:
    """Return where the files are: below `ORCHESTRATOR_STATE_DIR` if that is set, else in the user's state folder."""
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    return (Path(chosen) if chosen else platformdirs.user_state_path("oom-orchestrator")) / _FOLDER


def mine(node: str, nvml: str | None) -> JournalEntry:
    """Return the record of this process, with nothing in it yet."""
    pid = os.getpid()
    return JournalEntry(node=node, pid=pid, started=start_time(pid), host=socket.gethostname(), nvml=nvml)


def write(kept: JournalEntry) -> None:
    """Write a record, atomically and durably, readable only by this user.

    Raises:
        OSError: It cannot be written; nothing must be changed then.
    """
    path = _path(kept)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump({"schema": _SCHEMA, **asdict(kept)}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def remove(kept: JournalEntry) -> None:
    """Forget a record: all of it is put back."""
    _path(kept).unlink(missing_ok=True)


def others(nvml: str | None) -> tuple[JournalEntry, ...]:
    """Return the records of other agents on this machine and NVML, guarded or not. What is no record is left alone."""
    found = []
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            kept = _read(path)
            is_mine = kept.pid == os.getpid() and kept.started == start_time(os.getpid())
            if kept.host == socket.gethostname() and kept.nvml == nvml and not is_mine:
                found.append(kept)
    return tuple(found)


@contextlib.contextmanager
def one_at_a_time(patience_s: float) -> Iterator[None]:
    """Keep other agents of this user from changing things meanwhile.

    Raises:
        OSError: The lock cannot be had.
    """
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder() / "lock", os.O_RDWR | os.O_CREAT | _CAREFULLY, 0o600)
    until_s = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"another run has held {folder() / 'lock'} for {patience_s:g} s") from None
                time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        os.close(descriptor)  # releases the lock: no child inherits it


def _path(kept: JournalEntry) -> Path:
    return folder() / f"{kept.host}-{kept.pid}-{kept.started}.json"


def _read(path: Path) -> JournalEntry:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _CAREFULLY)
    with os.fdopen(descriptor, encoding="ascii") as file:
        told = json.load(file)
    if told.pop("schema") != _SCHEMA:
        raise ValueError("written by another version")
    power = tuple(PowerChange(**change) for change in told.pop("power"))
    daemon = told.pop("daemon")
    return JournalEntry(**told, power=power, daemon=None if daemon is None else Daemon(**daemon))
