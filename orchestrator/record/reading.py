"""Opens the store of a run read-only: its head is not disturbed.

A file that is damaged, or of another version, is refused in one sentence. Does not know what is in
the tables (`archive.py`, `jobs.py`, `history.py`).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from orchestrator.errors import ArchiveError, NothingStoredError
from orchestrator.record.store import SCHEMA_VERSION, STORE_NAME

_PATIENCE_S: Final = 2.0
"""A reader can wait for a lock."""

#: What a damaged file raises.
_DAMAGE: Final = (
    *(sqlite3.Error, ValueError, LookupError, TypeError, AttributeError),
    *(RecursionError, OverflowError),
)


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the store of a run folder for one consistent look.

    Raises:
        NothingStoredError: There is none, or nothing in it yet.
        ArchiveError: It cannot be opened, or what is done with it fails because it is damaged.
    """
    path = folder / STORE_NAME
    if not folder.is_dir():
        raise ArchiveError(
            f"there is no run folder {folder}; `python -m orchestrator runs` lists those there are"
        )
    if not os.path.lexists(path):
        raise NothingStoredError(folder, STORE_NAME)
    if path.is_symlink() or not path.is_file():  # opening a pipe would wait for its other end
        raise ArchiveError(f"{path} cannot be read: it is no regular file")
    try:
        with _opened(path) as store:
            if store.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                raise NothingStoredError(folder, STORE_NAME)
            (found,) = store.execute("PRAGMA user_version").fetchone()
            if found != SCHEMA_VERSION:
                raise ArchiveError(
                    f"{path} was written by another version of this program (schema {found}, this "
                    f"one reads {SCHEMA_VERSION}): go on with that one, or begin another run (a "
                    "queue: `jobs run FILE --new`)"
                )
            yield store
    except OSError as failure:
        raise ArchiveError(f"{path} cannot be read: {failure.strerror}") from failure
    except _DAMAGE as failure:
        raise ArchiveError(
            f"{path} cannot be read, it is damaged or no record of a run: {failure}; events.jsonl "
            "of the run has what happened as text, and moving the run's folder away takes it out "
            "of the list"
        ) from failure


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file, or where the file that readers share cannot be made beside it (a folder that is
    read-only, or another user's), a copy of it.
    """
    with ExitStack() as stack:
        try:
            store = stack.enter_context(closing(_begun(path)))
        except sqlite3.OperationalError:
            if os.access(path.parent, os.W_OK):
                raise
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orchestrator-")))
            for source in path.parent.glob(f"{path.name}*"):  # with its log
                shutil.copyfile(source, place / source.name)
            store = stack.enter_context(closing(_begun(place / path.name)))
        yield store


def _begun(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    store = sqlite3.connect(uri, uri=True, timeout=_PATIENCE_S, isolation_level=None)
    try:
        store.execute("BEGIN")
        store.execute("SELECT count(*) FROM sqlite_master").fetchone()  # only now it is opened
    except BaseException:
        store.close()
        raise
    return store
