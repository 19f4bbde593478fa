"""What earlier runs of this user learned on this PC: the size that fits, by card and workload.

One small JSON file that all processes of the user read and write. Of a card, driver, torch, type
and workload it has what was learned last. Nothing here raises: the caller is told once why the file
cannot be read or written, or that it is damaged. A worker then starts without a learned size. A
policy checks such a size with each step that starts there. Loads no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import platformdirs

from workers.files import locked, read_small, replace_whole
from workers.settings import Learned, Scalar

EXPIRY_S: Final = 30 * 86_400.0
"""Age from which a limit is neither offered nor kept: drivers, programs in the background and the
step itself change. One learned that far in the future, by a clock that was wrong, is not used
either."""
STATE_DIR_VARIABLE: Final = "ORCHESTRATOR_STATE_DIR"
"""Environment variable that names another folder for the store."""

_PRODUCT: Final = "oom-orchestrator"
_HASH_DIGITS: Final = 12
"""Hexadecimal digits: no two versions of a file share so many by chance."""
_PATIENCE_S: Final = 2.0
"""For a lock that others hold for some milliseconds at a time."""
_FILE_MOST_BYTES: Final = 16 * 2**20
_NEAR_PARTS: Final = 100
"""Two caps are the same up to one part in so many. The measured context of a process, and with it
its cap, differs by some MiB from start to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitKey:
    """The circumstances under which a limit was learned; under any others it means nothing."""

    card: str
    """Its name, as the driver reports it; on a CPU whatever the device calls itself."""
    driver: str | None
    """`None` on a CPU."""
    torch: str
    dtype: str
    """The type really used, which is not always the one asked for."""
    workload: str
    """As `workload_fingerprint` returns it."""
    cap_bytes: int

    @property
    def name(self) -> str:
        """Under which it is in the file: all but the cap, which is never the same to the byte."""
        told = (self.card, self.driver, self.torch, self.dtype, self.workload)
        return " ".join(filter(None, told))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLimit:
    """What was learned, under which cap, and when."""

    learned: Learned
    cap_bytes: int
    learned_at_unix_s: float

    def holds_under(self, cap_bytes: int) -> bool:
        """Say whether a cap is near enough: a size is never offered for one that is smaller, by
        more than 1 %, than the one it was learned at.
        """
        return abs(self.cap_bytes - cap_bytes) * _NEAR_PARTS <= self.cap_bytes


def workload_fingerprint(workload: str | Callable[..., object], **settings: Scalar) -> str:
    """Return what distinguishes this workload from others and from other versions of itself.

    Its name, then a hash of its module's source file where that is loaded and can be read:
    `mine.steps:Mlp@3f9a0c51d2e8`. What it imports is not looked at.

    Args:
        workload: A built-in one's name, or `package.module:Class`; or the class or function itself.
        settings: What else decides how many bytes a step of some size takes, such as `batch=128`.
    """
    name = workload if isinstance(workload, str) else _name_of(workload)
    module, _, of_user = name.partition(":")
    source = _source_hash(module if of_user else f"workers.workloads.{module}")
    words = [f"{key}={value}" for key, value in sorted(settings.items())]
    return " ".join([name if source is None else f"{name}@{source}", *words])


def settings_hash(settings: Mapping[str, Scalar]) -> str:
    """Return what distinguishes these settings from others, whatever their order."""
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:_HASH_DIGITS]


def _name_of(workload: Callable[..., object]) -> str:
    named = workload if hasattr(workload, "__qualname__") else type(workload)
    return f"{named.__module__}:{named.__qualname__}"


def _source_hash(module: str) -> str | None:
    """Return a hash of the file of a module; `None` where it is not loaded or has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if isinstance(file, str):
        with suppress(OSError, ValueError):
            return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:_HASH_DIGITS]
    return None


def default_path() -> Path:
    """Return where the store is: below `ORCHESTRATOR_STATE_DIR` if that is set, else in the user's
    state folder.
    """
    folder = os.environ.get(STATE_DIR_VARIABLE)
    return (Path(folder) if folder else platformdirs.user_state_path(_PRODUCT)) / "limits.json"


class LimitStore:
    """What one workload has learned, from one process to the next."""

    def __init__(
        self,
        key: Callable[[], LimitKey],
        tell: Callable[[str], None],
        *,
        every_s: float,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is made before there is something to keep.

        Args:
            key: Returns the circumstances now.
            tell: Gets a sentence when the file cannot be read or written, or is damaged; the same
                one once.
            every_s: A limit is written so often at most: a write costs some milliseconds.
            unix_s: Unix seconds.
        """
        self.path = default_path()
        self._key, self._tell, self._every_s, self._unix_s = key, tell, every_s, unix_s
        self._told = set[str]()
        self.kept: Learned | None = None
        """What the file has, as far as this process knows."""
        self._tried_at_s = float("-inf")

    def best(self) -> StoredLimit | None:
        """Return the limit to start from; `None` if none that fits is known, or it is too old."""
        limit, key = None, self._key()
        with self._told_of("read"):
            limit = self._read().get(key.name)
        if limit is None or not limit.holds_under(key.cap_bytes):
            return None
        self.kept = limit.learned
        return limit

    def keep(self, learned: Learned | None, *, at_once: bool = False) -> None:
        """Store what is known now in place of what was known under the same name, where it differs
        and that was a while ago, or if it is to be done at once.
        """
        now_unix_s = self._unix_s()
        is_due = at_once or not 0 <= now_unix_s - self._tried_at_s < self._every_s
        if learned is None or learned == self.kept or not is_due:
            return
        self._tried_at_s = now_unix_s
        lock = self.path.with_name(f"{self.path.name}.lock")
        with self._told_of("written"):
            if self.path.parts[:1] == ("~",):  # what platformdirs returns where there is no home
                raise OSError(errno.ENOENT, "this user has no home folder")
            with locked(lock, _PATIENCE_S):  # readers need none: they see the file before or after
                key = self._key()
                limit = StoredLimit(
                    learned=learned, cap_bytes=key.cap_bytes, learned_at_unix_s=now_unix_s
                )
                known = self._read() | {key.name: limit}
                content = {name: asdict(each) for name, each in known.items()}
                replace_whole(self.path, json.dumps(content, indent=1))
            self.kept = learned

    def _read(self) -> dict[str, StoredLimit]:
        """Return the limits that have not expired, by their names; none of a damaged file."""
        try:
            entries = json.loads(read_small(self.path, _FILE_MOST_BYTES)).items()
            limits = {name: _limit_of(entry) for name, entry in entries}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._tell_once(
                f"learned limits: {self.path} is damaged, and the next run writes it anew; to begin "
                "afresh, delete it"
            )
            return {}
        now_unix_s = self._unix_s()
        return {
            name: limit
            for name, limit in limits.items()
            if abs(now_unix_s - limit.learned_at_unix_s) < EXPIRY_S
        }

    @contextmanager
    def _told_of(self, what: str) -> Iterator[None]:
        try:
            yield
        except MemoryError:
            pass  # a worker on a CPU has filled its cap: another time there may be some
        except OSError as failure:
            self._tell_once(
                f"learned limits cannot be {what}: {self.path}: {failure.strerror or failure}; "
                f"make it accessible, or name another folder in {STATE_DIR_VARIABLE}"
            )

    def _tell_once(self, problem: str) -> None:
        if problem not in self._told:
            self._told.add(problem)
            self._tell(problem)


def _limit_of(entry: Mapping[str, Any]) -> StoredLimit:
    limit = StoredLimit(**{**entry, "learned": Learned(**entry["learned"])})
    learned = limit.learned
    line = filter(None, (learned.fixed_bytes, learned.unit_bytes))
    numbers = [limit.cap_bytes, limit.learned_at_unix_s, learned.size, *line]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("a policy can compute with numbers alone")
    return limit
