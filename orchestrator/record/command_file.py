"""What the user's programs ask of a run or of its queue: one file a command, in the folder
`commands` of its folder.

A verb puts a file, also while no head runs. The file is whole, on the disk and has a name of its
own, so no verb waits for another one, and a verb that is stopped (SIGSTOP, a debugger) holds
neither the head nor other verbs. The head takes the files in the order of their names, which begin
with the time. It removes each once it has stored what follows from it; a command may be seen twice
if a head is killed in between.

A program that can write here has commands run: a folder that others may write to is refused. Does
not know what a command asks for (`control/`).
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
"""The folder of commands in the folder of a run or of a queue."""
_ENDING: Final = ".json"
#: Of the content, which is ASCII where it is a command, each byte is a character.
_ANY_BYTES: Final = "latin-1"
#: More of them wait for the next look.
_ROWS_MOST: Final = 10_000
#: Ten thousand jobs with their settings are a tenth of it.
_MOST_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """A command as it waits."""

    name: str
    """Of its file."""
    id: str
    until_unix_s: float | None
    """Until when its sender waits for an answer; `None`: it waits for none."""
    content: bytes


def put(folder: Path, content: bytes, *, identity: str, until_unix_s: float | None = None) -> None:
    """Leave a command for the head of a folder, durably.

    `OSError`: nothing can be written there; `ArchiveError`: others could have written there.
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
    """Return what waits in a folder, for one that only looks.

    `ArchiveError`: it cannot be read, or is not to be trusted.
    """
    incoming = Incoming(folder)
    rows = incoming.rows()
    if incoming.problem is not None:
        raise ArchiveError(incoming.problem)
    return rows


def any_waits(folder: Path) -> bool:
    """Say whether there is anything for the next head to read."""
    return bool(Incoming(folder).rows())


class Incoming:
    """The commands that wait in a folder. Nothing in it raises."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet."""
        self._folder, self._place = folder, folder / COMMANDS_NAME
        self._removed: set[str] = set()
        """Files that are to be removed, and could not be."""
        self.problem: str | None = None
        """A sentence while something cannot be read; `None`: all can."""

    def rows(self) -> list[Row]:
        """Return what waits, in the order in which it was put."""
        self.problem, rows = None, list[Row]()
        try:
            if not os.path.lexists(self._place):
                return []
            _check(self._folder, 0o022)
            _check(self._place, 0o077)
            # A Path for each takes longer.
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
        """Have commands not come again; what follows from them is stored."""
        self._removed |= {row.name for row in rows}
        for name in tuple(self._removed):
            with suppress(OSError):  # it is tried again
                (self._place / name).unlink(missing_ok=True)
                self._removed.remove(name)

    def _row(self, name: str) -> Row | None:
        path = self._place / name
        try:
            head, _, content = read_small(path, _MOST_BYTES).partition("\n")
            told = json.loads(head)
            until_unix_s = None if told["until_unix_s"] is None else float(told["until_unix_s"])
            return Row(name, str(told["id"]), until_unix_s, content.encode(_ANY_BYTES))
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
        raise ArchiveError(f"{path} is no folder")
    if found.st_uid != os.geteuid():
        raise ArchiveError(f"{path} belongs to another user; no commands are put or read there")
    if found.st_mode & to_others:
        mode = "go-w" if to_others == 0o022 else "700"
        raise ArchiveError(f"{path} is open to other users; type `chmod {mode} {path}`")
