"""What users ask of a run, or of its queue: rows of `commands.sqlite` in its folder.

A verb puts a row, also while no head runs. The head reads the rows, and removes each once it has
stored what follows from it; a row may be seen twice if a head is killed in between.

A verb that is stopped (SIGSTOP, a debugger) inside its transaction keeps the file's write lock as
long as it is stopped. The head is not held: in WAL mode a reader waits for no writer, and the head
removes rows only where it gets the lock at once. Other verbs are not held either: one that does not
get the lock within `_PATIENCE_S` uses the next of a few files, all of which the head reads. A file
for each row would do as well, but then 300 rows are 300 files to sync, read and remove.

A program that can write here has commands run: a folder that others may write to, and files of
others, are refused. Does not know what a row asks for (`control/`).
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from orchestrator.errors import ArchiveError
from workers.files import flush

COMMANDS_NAME: Final = "commands.sqlite"
"""The first file of commands in a folder."""
_NAMES: Final = (COMMANDS_NAME, *(f"commands-{number}.sqlite" for number in range(1, 5)))
#: How long a verb waits for the lock of each of them.
_PATIENCE_S: Final = 1.0
#: More of them wait for the next look.
_ROWS_MOST: Final = 10_000

_CREATE: Final = """CREATE TABLE IF NOT EXISTS commands (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, put_at_unix_s REAL NOT NULL,
    until_unix_s REAL, content BLOB NOT NULL
)"""
_INSERT: Final = "INSERT INTO commands (id, put_at_unix_s, until_unix_s, content) VALUES (?,?,?,?)"
_SELECT: Final = f"""SELECT number, id, put_at_unix_s, until_unix_s, content FROM commands
ORDER BY number LIMIT {_ROWS_MOST}"""  # noqa: S608 - a number of this module
#: It has no table yet, or the verb that makes one has the lock.
_MADE_JUST_NOW: Final = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DELETE: Final = "DELETE FROM commands WHERE number IN (SELECT value FROM json_each(?))"


class CommandFileError(ArchiveError):
    """Commands that cannot be put or read, or are not to be trusted."""


@dataclass(frozen=True, slots=True)
class Row:
    """A command as it waits."""

    file: str
    number: int
    id: str
    put_at_unix_s: float
    until_unix_s: float | None
    """Until when its sender waits for an answer; `None`: it waits for none."""
    content: bytes


def put(folder: Path, content: bytes, *, identity: str, until_unix_s: float | None = None) -> None:
    """Leave a command for the head of a folder, durably.

    Raises:
        OSError: Nothing can be written there.
        CommandFileError: The same, or others could have written there.
    """
    _check(folder, stat.S_ISDIR, 0o022)
    failure: sqlite3.Error | None = None
    for name in _NAMES:
        path = folder / name
        with suppress(FileExistsError):
            # SQLite would make it readable for all, and gives its log the mode of the file.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            flush(folder)
        _check(path, stat.S_ISREG, 0o077)
        try:
            with closing(_connected(path, _PATIENCE_S)) as file:
                file.execute("PRAGMA journal_mode = WAL")
                file.execute(_CREATE)
                file.execute(_INSERT, (identity, time.time(), until_unix_s, content))
        except sqlite3.Error as error:
            failure = error
        else:
            return
    raise CommandFileError(f"{folder / COMMANDS_NAME} cannot be written: {failure}")


def waiting(folder: Path) -> list[Row]:
    """Return the rows of a folder for one that only looks.

    Raises:
        CommandFileError: They cannot be read, or are not to be trusted.
    """
    with closing(Incoming(folder, _PATIENCE_S)) as incoming:
        rows = incoming.rows()
        if incoming.problem is not None:
            raise CommandFileError(incoming.problem)
        return rows


def any_waits(folder: Path) -> bool:
    """Say whether there is anything for the next head to read."""
    with closing(Incoming(folder, _PATIENCE_S)) as incoming:
        return bool(incoming.rows())


@dataclass(eq=False)
class _File:
    """A file that the head has open."""

    identity: tuple[int, int]
    connection: sqlite3.Connection
    removed: set[int] = field(default_factory=set)
    """Rows that are to be removed, and could not be."""


class Incoming:
    """The rows of a folder. Nothing in it raises, and for its head nothing waits.

    One that looks, and ends, closes files: SQLite locks a file while its last user closes it. To
    another that looks a locked file would seem empty, hence its patience.
    """

    def __init__(self, folder: Path, patience_s: float = 0.0) -> None:
        """Touch nothing yet."""
        self._folder, self._patience_s = folder, patience_s
        self._files: dict[str, _File] = {}
        self.problem: str | None = None
        """A sentence while something cannot be read; `None`: all can."""

    def rows(self) -> list[Row]:
        """Return what waits, in the order in which it was put."""
        self.problem, rows = None, list[Row]()
        for name in _NAMES:
            path = self._folder / name
            try:
                rows += self._rows_of(name, path)
            except CommandFileError as failure:
                self.problem = str(failure)
            except OSError as failure:
                self.problem = f"{path} cannot be read: {failure.strerror}"
            except sqlite3.Error as failure:
                if failure.sqlite_errorcode & 0xFF not in _MADE_JUST_NOW:
                    self.problem = f"{path} cannot be read: {failure}; move it away"
        return sorted(rows, key=lambda row: row.put_at_unix_s)

    def remove(self, rows: Iterable[Row]) -> None:
        """Have rows not come again; what follows from them is stored."""
        for row in rows:
            if (file := self._files.get(row.file)) is not None:
                file.removed.add(row.number)
        for file in self._files.values():
            if file.removed:
                with suppress(sqlite3.Error):  # a verb has the lock; it is tried again
                    file.connection.execute(_DELETE, [json.dumps(sorted(file.removed))])
                    file.removed.clear()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            with suppress(sqlite3.Error):
                self._files.popitem()[1].connection.close()

    def _rows_of(self, name: str, path: Path) -> list[Row]:
        if not os.path.lexists(path):
            return []
        _check(self._folder, stat.S_ISDIR, 0o022)
        _check(path, stat.S_ISREG, 0o077)
        status, file = path.lstat(), self._files.get(name)
        identity = (status.st_dev, status.st_ino)
        if file is None or file.identity != identity:  # the user may have moved it away
            if file is not None:
                file.connection.close()
            file = self._files[name] = _File(identity, _connected(path, self._patience_s))
            # A checkpoint syncs: that is left to verbs.
            file.connection.execute("PRAGMA wal_autocheckpoint = 0")
            file.connection.execute("PRAGMA synchronous = NORMAL")
        lines = file.connection.execute(_SELECT).fetchall()
        return [Row(name, *line) for line in lines if line[0] not in file.removed]


def _connected(path: Path, patience_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=patience_s, isolation_level=None)


def _check(path: Path, is_kind: Callable[[int], bool], to_others: int) -> None:
    found = path.lstat()
    if not is_kind(found.st_mode):
        raise CommandFileError(
            f"{path} is no {'folder' if is_kind is stat.S_ISDIR else 'regular file'}"
        )
    if found.st_uid != os.geteuid():
        raise CommandFileError(f"{path} belongs to another user; no commands are put or read there")
    if found.st_mode & to_others:
        mode = "go-w" if to_others == 0o022 else "600"
        raise CommandFileError(f"{path} is open to other users; type `chmod {mode} {path}`")
