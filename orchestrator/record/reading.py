"""Opens SQLite files of a run read-only: what is in them is not trusted, and who writes them is not
disturbed.

A file may come from anywhere: it can only cause an `ArchiveError`. Does not know what is in the
tables (`archive.py`, `jobs.py`).
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from orchestrator.errors import ArchiveError, NothingStoredError

_PATIENCE_S = 2.0
"""A reader can wait for a lock."""
_READING_MOST_S = 5.0
"""A run of ten thousand workers is read in less than one; a file that takes longer was not written
by this program.
"""
_CLOCK_EVERY = 1_000
"""SQLite checks the time after so many of its own steps. Ctrl-C also waits for this check."""
_VALUE_MOST_BYTES = 16 * 2**20
"""Of one value, and of one line; SQL functions could otherwise make a gigabyte of text."""

#: SQLite's words (their low byte) for "there is a file, but I may not make what I need beside it".
_CANNOT_SHARE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})

#: What a damaged file raises.
DAMAGE = (sqlite3.Error, ValueError, LookupError, TypeError, RecursionError, OverflowError)


@contextmanager
def opened(
    path: Path, tables: Sequence[str], version: int, most_s: float | None = None
) -> Iterator[sqlite3.Connection]:
    """Open a file with these tables of this version for one consistent look, which may take
    `most_s`.

    Read-only; a writer may be active. That needs a shared file beside the store. Where none can be
    made (a folder that is read-only or another user's) no writer can use this path either, and a
    private copy is read.

    Raises:
        NothingStoredError: There is none, or nothing in it yet.
        ArchiveError: It cannot be opened, or what is done with it fails because it is damaged.
    """
    if path.is_symlink() or not path.is_file():
        raise NothingStoredError(path.parent, path.name)
    most_s = _READING_MOST_S if most_s is None else most_s
    with explained(path), ExitStack() as stack:
        try:
            store = stack.enter_context(_connected(f"{path.absolute().as_uri()}?mode=ro", most_s))
        except sqlite3.OperationalError as failure:
            if failure.sqlite_errorcode & 0xFF not in _CANNOT_SHARE:
                raise
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orchestrator-")))
            for source in path.parent.glob(f"{path.name}*"):  # with its log
                shutil.copyfile(source, place / source.name)
            store = stack.enter_context(_connected((place / path.name).as_uri(), most_s))
        _check_schema(store, path, tables, version)
        yield store


@contextmanager
def _connected(uri: str, most_s: float) -> Iterator[sqlite3.Connection]:
    """Hold a connection that aborts statements that take too long or grow too large."""
    until_s = time.monotonic() + most_s
    try:
        with closing(
            sqlite3.connect(uri, uri=True, timeout=_PATIENCE_S, isolation_level=None)
        ) as store:
            store.set_progress_handler(lambda: time.monotonic() > until_s, _CLOCK_EVERY)
            store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_MOST_BYTES)
            store.row_factory = sqlite3.Row
            store.text_factory = lambda content: content.decode("utf-8", "replace")
            store.execute("PRAGMA trusted_schema = OFF")
            store.execute("BEGIN")
            # Only now is the file opened.
            store.execute("SELECT count(*) FROM sqlite_master").fetchone()
            yield store
    except sqlite3.OperationalError as failure:
        if failure.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        if time.monotonic() <= until_s:
            # Nothing but a signal ends the look at the clock early, and SQLite keeps to itself what
            # that raised.
            raise KeyboardInterrupt from failure
        raise ValueError(f"it takes longer than {most_s:.0f} s") from failure


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what a damaged file raises into a sentence."""
    try:
        yield
    except OSError as failure:
        raise ArchiveError(f"{path} cannot be read: {failure.strerror}") from failure
    except DAMAGE as failure:
        raise ArchiveError(
            f"{path} cannot be read, it is damaged or no record of a run: {failure}; "
            "events.jsonl of the run has what happened as text, and moving the run's folder away "
            "takes it out of the list"
        ) from failure


def _check_schema(
    store: sqlite3.Connection, path: Path, tables: Sequence[str], version: int
) -> None:
    if store.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
        raise NothingStoredError(path.parent, path.name)
    for name in tables:
        # Anything else of that name (a view, a column that is computed) runs the file's own SQL.
        # Not from sqlite_master: a file may say anything there, and SQLite goes by the statement
        # alone. SQLite itself reports a missing table.
        if any(entry["type"] != "table" for entry in store.execute(f"PRAGMA table_list({name})")):
            raise ValueError(f"{name} is no table")
        if any(column["hidden"] for column in store.execute(f"PRAGMA table_xinfo({name})")):
            raise ValueError(f"{name} has computed columns")
    line = store.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    found = int(line["value"]) if line is not None else 0
    if found < 1:
        raise ValueError("it does not say which schema it has")
    if found != version:
        raise ArchiveError(
            f"{path} was written by another version of this program (schema {found}, this one "
            f"reads {version}): look at it with that one"
        )
