"""The learned limits of this user, in one small file that all processes of the user read and write.

Covers whole files only (a writer holds a lock, writes beside the file and renames), expiry, and the sentences for what
cannot be read or written. Does not cover which limit fits a worker (`limits.py`). The store is optional: nothing in it
raises, `problem` says what went wrong, and a worker then starts without a learned limit.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import platformdirs

from workers.learned_limits.limits import choose, from_plain, is_about, to_plain, workload_name
from workers.settings import LimitKey, StoredLimit

EXPIRY_S: Final = 30 * 86_400.0
"""Drivers, programs in the background and the step itself change; an older limit is not used."""
LIMITS_MOST: Final = 1_000
"""Kept at once; a user with ten cards and ten workloads has a hundred."""
STATE_DIR_VARIABLE: Final = "ORCHESTRATOR_STATE_DIR"
"""Environment variable that names another folder for the store."""

_SCHEMA: Final = 1
_PATIENCE_S: Final = 2.0
"""For a lock that others hold for some milliseconds at a time."""
_LOOK_EVERY_S: Final = 0.005
_FILE_MOST_BYTES: Final = 16 * 2**20
"""`LIMITS_MOST` limits with the longest names (`TEXT_MOST`) take less, each character as an escape of six."""

# Opening a pipe does not wait for its other end, a link is not followed, and no child gets to hold the lock.
_CAREFULLY: Final = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


class _NoStoreError(ValueError):
    """The file is there and can be read, but holds no limits that this version understands."""


def default_path() -> Path:
    """Return where the store is: below `ORCHESTRATOR_STATE_DIR` if that is set, else in the user's state folder."""
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    return (Path(chosen) if chosen else platformdirs.user_state_path("oom-orchestrator")) / "limits.json"


class LimitStore:
    """Limits that outlive a run, for each key what was learned last. The time comes from the caller (Unix, seconds)."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        expiry_s: float = EXPIRY_S,
        limits_most: int = LIMITS_MOST,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Prepare; nothing is made before there is something to remember.

        Args:
            path: Of the file. Default: `default_path()`.
            expiry_s: Age from which a limit is neither offered nor kept. One learned that far in the future, by a clock
                that was wrong, is not either.
            limits_most: Beyond them the oldest go.
            patience_s: Longest wait for other writers.
        """
        self.path = default_path() if path is None else path
        self.expiry_s = expiry_s
        self.problem: str | None = None
        """A sentence about the last call if that failed, else `None`."""
        self._limits_most = limits_most
        self._patience_s = patience_s

    def best(self, key: LimitKey, now_unix_s: float) -> StoredLimit | None:
        """Return the limit to start from; `None` if nothing that fits is known."""
        return choose(self.all(now_unix_s), key)

    def candidates(self, workload: str, dtype: str | None, now_unix_s: float) -> tuple[StoredLimit, ...]:
        """Return every limit that a worker of this workload may have a use for, for it to `choose` from.

        Args:
            workload: Its name or its fingerprint; only the name counts, since the worker's own copy of the source
                decides.
            dtype: The type really used; `None` for any: a CPU runs fp16 as bf16 or fp32.
            now_unix_s: The time.
        """
        name = workload_name(workload)
        return tuple(
            limit
            for limit in self.all(now_unix_s)
            if workload_name(limit.key.workload) == name and (dtype is None or dtype == limit.key.dtype)
        )

    def all(self, now_unix_s: float) -> tuple[StoredLimit, ...]:
        """Return every limit that has not expired, the newest first."""
        found: Iterable[StoredLimit] = ()
        with self._told("read"):
            found = self._fresh(_read(self.path), now_unix_s)
        return tuple(sorted(found, key=_learned_at, reverse=True))

    def remember(self, *limits: StoredLimit) -> None:
        """Store these limits in place of those with the same keys, and delete what has expired."""
        if not limits:
            return
        with self._told("written"):
            checked = [from_plain(to_plain(limit)) for limit in limits]  # what no reader accepts must not be written
            with self._locked():
                kept = self._fresh(_read(self.path), max(limit.learned_at_unix_s for limit in checked))
                for limit in checked:
                    kept = [*(old for old in kept if not old.key.serves(limit.key)), limit]
                self._write(kept)

    def forget(self, key: LimitKey) -> None:
        """Delete all that would be offered for `key`: it was tried and did not fit."""
        self._remove(lambda limit: limit.key.serves(key))

    def clear(self, now_unix_s: float, *, card: str | None = None, workload: str | None = None) -> int:
        """Delete the limits that `is_about` finds, all if nothing is given; return how many had not expired."""
        gone = self._remove(lambda limit: is_about(limit, card=card, workload=workload))
        return len(self._fresh(gone, now_unix_s))

    def set_aside(self) -> Path | None:
        """Rename a file that holds no limits, so that a new one can be made; return its new path.

        `None` if there is nothing to rename, or `problem` says why it cannot be.
        """
        moved: Path | None = None
        with self._told("moved"), self._locked():
            try:
                _read(self.path)
            except _NoStoreError:
                names = (self.path.with_name(f"{self.path.name}.unreadable-{number}") for number in itertools.count(1))
                free = next(name for name in names if not os.path.lexists(name))
                self.path.rename(free)
                moved = free
        return moved

    def _remove(self, unwanted: Callable[[StoredLimit], bool]) -> list[StoredLimit]:
        gone: list[StoredLimit] = []
        with self._told("written"):
            if not any(map(unwanted, _read(self.path))):
                return gone  # nothing to do, and nothing to make in a folder that may not be ours to write
            with self._locked():
                known = _read(self.path)
                self._write([limit for limit in known if not unwanted(limit)])
                gone = [limit for limit in known if unwanted(limit)]
        return gone

    def _fresh(self, limits: Iterable[StoredLimit], now_unix_s: float) -> list[StoredLimit]:
        return [limit for limit in limits if abs(now_unix_s - limit.learned_at_unix_s) < self.expiry_s]

    def _write(self, limits: list[StoredLimit]) -> None:
        """Replace the file atomically, readable only by this user; the lock must be held."""
        newest = sorted(limits, key=_learned_at)[-self._limits_most :]
        text = json.dumps({"schema": _SCHEMA, "limits": [to_plain(limit) for limit in newest]}, indent=1) + "\n"
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.unlink(missing_ok=True)  # of a writer that was killed
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode("ascii"))
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave an empty file under the old name
            fresh.replace(self.path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out; readers need no lock, they see the file before or after."""
        _check_home(self.path)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self.path.with_name(f"{self.path.name}.lock")  # never removed: two writers could hold two of them
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | _CAREFULLY, 0o600)
        try:
            _obtain(descriptor, self._patience_s)
            try:
                yield
            finally:
                # Not left to `close`: a child that was forked meanwhile may hold the descriptor open.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn what goes wrong into a sentence."""
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
                f"learned limits cannot be {what}: {self.path}: {failure.strerror or failure}; make it accessible, "
                f"or name another folder in {STATE_DIR_VARIABLE}"
            )
        except ValueError as failure:
            self.problem = f"learned limits cannot be {what}: {self.path}: {failure}"


def _check_home(path: Path) -> None:
    if path.parts[:1] == ("~",):  # what platformdirs returns where the user's home is unknown
        raise OSError(errno.ENOENT, "this user has no home folder")


def _obtain(descriptor: int, patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                told = f"another process has kept it locked for {patience_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, told) from None
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _read(path: Path) -> list[StoredLimit]:
    """Return all limits of a file, none if there is no file.

    Raises:
        OSError: It cannot be read, or is no regular file.
        _NoStoreError: It is something else, damaged, or of a newer version.
    """
    _check_home(path)
    try:
        content = _content(path)
    except FileNotFoundError:
        return []
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError) as failure:
        raise _NoStoreError(f"it is damaged ({failure})") from failure
    schema = stored.get("schema") if isinstance(stored, dict) else None
    plains = stored.get("limits") if isinstance(stored, dict) else None
    if type(schema) is not int or schema < 1 or not isinstance(plains, list):
        raise _NoStoreError("it is a file of another kind")
    if schema != _SCHEMA:
        raise _NoStoreError(
            f"it has schema {schema}, written by a newer version, and this one reads schema {_SCHEMA}: "
            f"update this installation"
        )
    try:
        return [from_plain(plain) for plain in plains]
    except (ValueError, AttributeError) as failure:
        raise _NoStoreError(f"it is damaged ({failure})") from failure


def _content(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | _CAREFULLY)
    except OSError as failure:
        if failure.errno in {errno.ELOOP, errno.ENXIO}:  # a link, a socket
            raise OSError(errno.EINVAL, "it is no regular file") from failure
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(_FILE_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _FILE_MOST_BYTES:
        raise _NoStoreError(f"it is larger than {_FILE_MOST_BYTES // 2**20} MiB")
    return content


def _learned_at(limit: StoredLimit) -> float:
    return limit.learned_at_unix_s
