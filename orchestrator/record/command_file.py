"""Commands to a run or to its queue: one file per command, in the folder `commands` of the run or
queue.

A verb writes a file, even while no head runs. Each file is complete, synced to disk and uniquely
named, so verbs never wait for each other, and a stopped verb (SIGSTOP, a debugger) blocks neither
the head nor other verbs. The head processes the files in order of their names, which begin with the
time. It removes a file after it has stored the effects, so a head that is killed in between makes
the next head process the command again.

A program that can write here can have the head run commands, so a folder that other users can write
to is refused. Does not know the contents of commands (`control/`).
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.errors import ArchiveError
from workers.files import flush, read_small, replace_whole

COMMANDS_NAME: Final = "commands"
"""The name of the folder of commands in the folder of a run or of a queue."""
_ENDING: Final = ".json"
#: Encoding that keeps any bytes. The content of a valid command is ASCII.
_ANY_BYTES: Final = "latin-1"
#: Commands that one call reads; the next call reads more.
_ROWS_MOST: Final = 10_000
#: Size limit of a command: ten thousand jobs with their settings need a tenth of it.
_MOST_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """A command that waits for the head."""

    name: str
    """The name of its file."""
    id: str
    until_unix_s: float | None
    """Until when the sender waits for an answer; `None`: it does not wait."""
    content: bytes


def put(folder: Path, content: bytes, *, identity: str, until_unix_s: float | None = None) -> None:
    """Write a command for the head of a folder, and sync it to disk.

    `OSError`: the folder cannot be written; `ArchiveError`: other users could write there.
    """
    _check(folder, 0o022)
    place = folder / COMMANDS_NAME
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
        flush(folder)
    _check(place, 0o077)
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}{_ENDING}"
    head = json.dumps({"id": identity, "until_unix_s": until_unix_s})
    replace_whole(place / name, f"{head}\n{content.decode(_ANY_BYTES)}")
    flush(place)


def waiting(folder: Path) -> list[Row]:
    """Return the commands that wait in a folder, without removing them.

    `ArchiveError`: the folder cannot be read, or other users could write there.
    """
    incoming = Incoming(folder)
    rows = incoming.rows()
    if incoming.problem is not None:
        raise ArchiveError(incoming.problem)
    return rows


def any_waits(folder: Path) -> bool:
    """Return whether a command waits for the head, or for the next one."""
    return bool(Incoming(folder).rows())


class Incoming:
    """The commands that wait in a folder. Nothing in it raises."""

    def __init__(self, folder: Path) -> None:
        """Open no file yet."""
        self._folder, self._place = folder, folder / COMMANDS_NAME
        self._removed: set[str] = set()
        """Names of processed files that could not be removed yet."""
        self.problem: str | None = None
        """A sentence while a file or the folder cannot be read, else `None`."""

    def rows(self) -> list[Row]:
        """Return the waiting commands, oldest first."""
        self.problem, rows = None, list[Row]()
        try:
            if not os.path.lexists(self._place):
                return []
            _check(self._folder, 0o022)
            _check(self._place, 0o077)
            # `os.listdir`: making a `Path` for each entry is slower.
            names = sorted(it for it in os.listdir(self._place) if it.endswith(_ENDING))  # noqa: PTH208
        except ArchiveError as failure:
            self.problem = str(failure)
            return []
        except OSError as failure:
            self.problem = f"{self._place} cannot be read: {failure.strerror}"
            return []
        for name in names[:_ROWS_MOST]:
            if name not in self._removed and (row := self._row(name)) is not None:
                rows.append(row)
        return rows

    def remove(self, rows: Iterable[Row]) -> None:
        """Remove commands whose effects are stored; `rows` does not return them again."""
        self._removed |= {row.name for row in rows}
        for name in tuple(self._removed):
            with suppress(OSError):  # the next call tries again
                (self._place / name).unlink(missing_ok=True)
                self._removed.remove(name)

    def _row(self, name: str) -> Row | None:
        path = self._place / name
        try:
            head, _, content = read_small(path, _MOST_BYTES).partition("\n")
            sent = json.loads(head)
            until_unix_s = None if sent["until_unix_s"] is None else float(sent["until_unix_s"])
            return Row(name, str(sent["id"]), until_unix_s, content.encode(_ANY_BYTES))
        except FileNotFoundError:  # the head has removed it
            return None
        except OSError as failure:
            self.problem = f"{path} cannot be read: {failure.strerror}"
        except (ValueError, LookupError, TypeError, RecursionError) as failure:
            self.problem = f"{path} cannot be read: {failure}; move it away"
        return None


def _check(path: Path, to_others: int) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ArchiveError(f"{path} is not a folder")
    if found.st_uid != os.geteuid():
        raise ArchiveError(f"{path} belongs to another user; no commands are put or read there")
    if found.st_mode & to_others:
        mode = "go-w" if to_others == 0o022 else "700"
        raise ArchiveError(f"{path} is open to other users; type `chmod {mode} {path}`")
