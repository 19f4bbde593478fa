"""The learned limits of this user, in one small file that all processes of the user read and write.

Covers whole files only (a writer holds a lock, writes beside the file and renames), expiry, and the
sentences for what cannot be read or written. Does not cover which limit fits a worker
(`limits.py`). The store is optional: nothing in it raises, `problem` says what went wrong, and a
worker then starts without a learned limit.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Final

import platformdirs

from workers.files import locked, read_small, replace_whole
from workers.learned_limits.limits import choose, from_plain, is_about, to_plain, workload_name
from workers.settings import LimitKey, StoredLimit

EXPIRY_S: Final = 30 * 86_400.0
"""Age from which a limit is neither offered nor kept: drivers, programs in the background and the
step itself change. One learned that far in the future, by a clock that was wrong, is not used either."""
LIMITS_MOST: Final = 1_000
"""Kept at once; a user with ten cards and ten workloads has a hundred."""
STATE_DIR_VARIABLE: Final = "ORCHESTRATOR_STATE_DIR"
"""Environment variable that names another folder for the store."""

_SCHEMA: Final = 1
_PATIENCE_S: Final = 2.0
"""For a lock that others hold for some milliseconds at a time."""
_FILE_MOST_BYTES: Final = 16 * 2**20
"""`LIMITS_MOST` limits with the longest names (`TEXT_MOST`) take less, each character as an escape
of six.
"""


class _NoStoreError(ValueError):
    """The file is there and can be read, but holds no limits that this version understands."""


def default_path() -> Path:
    """Return where the store is: below `ORCHESTRATOR_STATE_DIR` if that is set, else in the user's
    state folder.
    """
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    return (
        Path(chosen) if chosen else platformdirs.user_state_path("oom-orchestrator")
    ) / "limits.json"


class LimitStore:
    """Limits that outlive a run, for each key what was learned last.

    The time comes from the caller (Unix, seconds).
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        limits_most: int = LIMITS_MOST,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Prepare; nothing is made before there is something to remember.

        Beyond `limits_most` the oldest go; `patience_s` is the longest wait for other writers.
        """
        self.path = default_path() if path is None else path
        self.problem: str | None = None
        """A sentence about the last call if that failed, else `None`."""
        self._limits_most = limits_most
        self._patience_s = patience_s

    def best(self, key: LimitKey, now_unix_s: float) -> StoredLimit | None:
        """Return the limit to start from; `None` if nothing that fits is known."""
        return choose(self.all(now_unix_s), key)

    def candidates(self, workload: str, now_unix_s: float) -> tuple[StoredLimit, ...]:
        """Return every limit that a worker of this workload may have a use for, for it to `choose`
        from.

        Of a fingerprint only the name counts, since the worker's own copy of the source decides.
        """
        name = workload_name(workload)
        return tuple(
            limit for limit in self.all(now_unix_s) if workload_name(limit.key.workload) == name
        )

    def all(self, now_unix_s: float) -> tuple[StoredLimit, ...]:
        """Return every limit that has not expired, the newest first."""
        found: list[StoredLimit] = []
        with self._told("read"):
            found = _fresh(_read(self.path), now_unix_s)
        return tuple(sorted(found, key=attrgetter("learned_at_unix_s"), reverse=True))

    def remember(self, *limits: StoredLimit) -> None:
        """Store these limits in place of those with the same keys, and delete what has expired."""
        if not limits:
            return
        with self._told("written"):
            checked = [
                from_plain(to_plain(limit)) for limit in limits
            ]  # what no reader accepts must not be written
            with self._locked():
                kept = _fresh(_read(self.path), max(limit.learned_at_unix_s for limit in checked))
                for limit in checked:
                    kept = [*(old for old in kept if not old.key.serves(limit.key)), limit]
                self._write(kept)

    def forget(self, key: LimitKey) -> None:
        """Delete all that would be offered for `key`: it was tried and did not fit."""
        self._remove(lambda limit: limit.key.serves(key))

    def clear(
        self, now_unix_s: float, *, card: str | None = None, workload: str | None = None
    ) -> int:
        """Delete the limits that `is_about` finds, all if nothing is given.

        Return how many had not expired.
        """
        gone = self._remove(lambda limit: is_about(limit, card=card, workload=workload))
        return len(_fresh(gone, now_unix_s))

    def set_aside(self) -> Path | None:
        """Rename a file that holds no limits, so that a new one can be made; return its new path.

        `None` if there is nothing to rename, or `problem` says why it cannot be.
        """
        moved: Path | None = None
        with self._told("moved"), self._locked():
            try:
                _read(self.path)
            except _NoStoreError:
                names = (
                    self.path.with_name(f"{self.path.name}.unreadable-{number}")
                    for number in itertools.count(1)
                )
                free = next(name for name in names if not os.path.lexists(name))
                self.path.rename(free)
                moved = free
        return moved

    def _remove(self, unwanted: Callable[[StoredLimit], bool]) -> list[StoredLimit]:
        gone: list[StoredLimit] = []
        with self._told("written"):
            # Where nothing is to be done nothing is made either: the folder may not be ours to
            # write.
            if any(map(unwanted, _read(self.path))):
                with self._locked():
                    known = _read(self.path)
                    self._write([limit for limit in known if not unwanted(limit)])
                    gone = [limit for limit in known if unwanted(limit)]
        return gone

    def _write(self, limits: list[StoredLimit]) -> None:
        """Replace the file atomically, readable only by this user; the lock must be held."""
        newest = sorted(limits, key=attrgetter("learned_at_unix_s"))[-self._limits_most :]
        text = (
            json.dumps(
                {"schema": _SCHEMA, "limits": [to_plain(limit) for limit in newest]}, indent=1
            )
            + "\n"
        )
        replace_whole(self.path, text)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out; readers need no lock, they see the file before or after."""
        _check_home(self.path)
        with locked(self.path.with_name(f"{self.path.name}.lock"), self._patience_s):
            yield

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        self.problem = None
        try:
            yield
        except _NoStoreError as failure:
            self.problem = (
                f"{self.path} holds no learned limits that can be read: {failure}; "
                f"`python -m orchestrator limits --clear` moves it out of the way"
            )
        except OSError as failure:
            self.problem = (
                f"learned limits cannot be {what}: {self.path}: {failure.strerror or failure}; "
                "make it accessible, "
                f"or name another folder in {STATE_DIR_VARIABLE}"
            )
        except ValueError as failure:
            self.problem = f"learned limits cannot be {what}: {self.path}: {failure}"


def _check_home(path: Path) -> None:
    if path.parts[:1] == ("~",):  # what platformdirs returns where the user's home is unknown
        raise OSError(errno.ENOENT, "this user has no home folder")


def _read(path: Path) -> list[StoredLimit]:
    """Return all limits of a file, none if there is no file."""
    _check_home(path)
    try:
        stored = json.loads(read_small(path, _FILE_MOST_BYTES))
    except FileNotFoundError:
        return []
    except OSError as failure:
        if failure.errno == errno.EFBIG:
            raise _NoStoreError(failure.strerror) from failure
        raise
    except (ValueError, RecursionError) as failure:
        raise _NoStoreError(f"it is damaged ({failure})") from failure
    schema, plains = (
        (stored.get("schema"), stored.get("limits")) if isinstance(stored, dict) else (None, None)
    )
    if type(schema) is not int or schema < 1 or not isinstance(plains, list):
        raise _NoStoreError("it is a file of another kind")
    if schema != _SCHEMA:
        raise _NoStoreError(
            f"it has schema {schema}, written by a newer version, and this one reads schema "
            f"{_SCHEMA}: "
            f"update this installation"
        )
    try:
        return [from_plain(plain) for plain in plains]
    except (ValueError, AttributeError) as failure:
        raise _NoStoreError(f"it is damaged ({failure})") from failure


def _fresh(limits: list[StoredLimit], now_unix_s: float) -> list[StoredLimit]:
    return [limit for limit in limits if abs(now_unix_s - limit.learned_at_unix_s) < EXPIRY_S]
