"""Limits that earlier runs of this user learned on this PC: the size that fits, by card and
workload.

One small JSON file that all processes of the user read and write. For each card, driver, torch,
type and workload it has the last learned limit. Nothing here raises: if the file is damaged, or
cannot be read or written, the caller gets that reason once, and a worker starts without a learned
size. A policy verifies such a size by each step that starts there. Loads no torch.
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
"""Age at which a limit is neither offered nor kept: drivers, background programs and the step
itself change. A limit dated as far in the future, by a wrong clock, is not used either.
"""
STATE_DIR_VARIABLE: Final = "ORCHESTRATOR_STATE_DIR"
"""Environment variable with another folder for the store."""

_PRODUCT: Final = "oom-orchestrator"
_HASH_DIGITS: Final = 12
"""Hexadecimal digits of a hash: enough that two versions of a file never share them by chance."""
_PATIENCE_S: Final = 2.0
"""Longest wait for the lock, which others hold for some milliseconds at a time."""
_FILE_MOST_BYTES: Final = 16 * 2**20
_NEAR_PARTS: Final = 100
"""Two caps are the same if they differ by at most one part in this number. The measured context of
a process, and with it the cap, differs by some MiB between starts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitKey:
    """The circumstances under which a limit was learned; it is meaningless under any others."""

    card: str
    """The card's name, as the driver reports it; on a CPU the name of the device."""
    driver: str | None
    """`None` on a CPU."""
    torch: str
    dtype: str
    """The type really used, which is not always the requested one."""
    workload: str
    """The result of `workload_fingerprint`."""
    cap_bytes: int

    @property
    def name(self) -> str:
        """The key in the file: all fields but the cap, which is never the same to the byte."""
        parts = (self.card, self.driver, self.torch, self.dtype, self.workload)
        return " ".join(filter(None, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLimit:
    """A learned limit, its cap, and when it was learned."""

    learned: Learned
    cap_bytes: int
    learned_at_unix_s: float

    def holds_under(self, cap_bytes: int) -> bool:
        """Return whether a cap is within 1 % of the one that the limit was learned under."""
        return abs(self.cap_bytes - cap_bytes) * _NEAR_PARTS <= self.cap_bytes


def workload_fingerprint(workload: str | Callable[..., object], **settings: Scalar) -> str:
    """Return a text that distinguishes this workload from others, and from other versions of
    itself.

    Its name, then a hash of its module's source file if that is loaded and can be read:
    `mine.steps:Mlp@3f9a0c51d2e8`. Modules that it imports are not included.

    Args:
        workload: The name of a built-in one, or `package.module:Class`; or the class or function.
        settings: Other settings that affect the bytes of a step of a given size, such as
            `batch=128`.
    """
    name = workload if isinstance(workload, str) else _name_of(workload)
    module, _, of_user = name.partition(":")
    source = _source_hash(module if of_user else f"workers.workloads.{module}")
    words = [f"{key}={value}" for key, value in sorted(settings.items())]
    return " ".join([name if source is None else f"{name}@{source}", *words])


def settings_hash(settings: Mapping[str, Scalar]) -> str:
    """Return a hash of these settings that does not depend on their order."""
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:_HASH_DIGITS]


def _name_of(workload: Callable[..., object]) -> str:
    named = workload if hasattr(workload, "__qualname__") else type(workload)
    return f"{named.__module__}:{named.__qualname__}"


def _source_hash(module: str) -> str | None:
    """Return a hash of a module's file; `None` if the module is not loaded or has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if isinstance(file, str):
        with suppress(OSError, ValueError):
            return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:_HASH_DIGITS]
    return None


def default_path() -> Path:
    """Return the path of the store: in `ORCHESTRATOR_STATE_DIR` if that is set, else in the user's
    state folder.
    """
    folder = os.environ.get(STATE_DIR_VARIABLE)
    return (Path(folder) if folder else platformdirs.user_state_path(_PRODUCT)) / "limits.json"


class LimitStore:
    """Keeps the learned limit of one workload from one process to the next."""

    def __init__(
        self,
        key: Callable[[], LimitKey],
        tell: Callable[[str], None],
        *,
        every_s: float,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; no file is made before there is a limit to keep.

        Args:
            key: Returns the present circumstances.
            tell: Called once for each reason why the file is damaged, or cannot be read or written.
            every_s: Least seconds between two writes: a write takes some milliseconds.
            unix_s: Returns the Unix time in seconds.
        """
        self.path = default_path()
        self._key, self._tell, self._every_s, self._unix_s = key, tell, every_s, unix_s
        self._reported = set[str]()
        self.kept: Learned | None = None
        """The limit in the file, as far as this process knows."""
        self._tried_at_s = float("-inf")

    def best(self) -> StoredLimit | None:
        """Return the limit to start from; `None`: none is known for this cap, or it is too old."""
        limit, key = None, self._key()
        with self._reporting_failure("read"):
            limit = self._read().get(key.name)
        if limit is None or not limit.holds_under(key.cap_bytes):
            return None
        self.kept = limit.learned
        return limit

    def keep(self, learned: Learned | None, *, at_once: bool = False) -> None:
        """Store a limit in place of the one under the same key, if it differs and the last write
        was at least `every_s` ago or `at_once` is true.
        """
        now_unix_s = self._unix_s()
        is_due = at_once or not 0 <= now_unix_s - self._tried_at_s < self._every_s
        if learned is None or learned == self.kept or not is_due:
            return
        self._tried_at_s = now_unix_s
        lock = self.path.with_name(f"{self.path.name}.lock")
        with self._reporting_failure("written"):
            if self.path.parts[:1] == ("~",):  # what platformdirs returns without a home folder
                raise OSError(errno.ENOENT, "this user has no home folder")
            with locked(lock, _PATIENCE_S):  # readers need no lock: replaced files are whole
                key = self._key()
                limit = StoredLimit(
                    learned=learned, cap_bytes=key.cap_bytes, learned_at_unix_s=now_unix_s
                )
                known = self._read() | {key.name: limit}
                content = {name: asdict(each) for name, each in known.items()}
                replace_whole(self.path, json.dumps(content, indent=1))
            self.kept = learned

    def _read(self) -> dict[str, StoredLimit]:
        """Return the limits that have not expired, by their keys; none if the file is damaged."""
        try:
            entries = json.loads(read_small(self.path, _FILE_MOST_BYTES)).items()
            limits = {name: _limit_of(entry) for name, entry in entries}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._report_once(
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
    def _reporting_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except MemoryError:
            pass  # a worker on a CPU has filled its cap; a later call may succeed
        except OSError as failure:
            self._report_once(
                f"learned limits cannot be {what}: {self.path}: {failure.strerror or failure}; "
                f"make it accessible, or name another folder in {STATE_DIR_VARIABLE}"
            )

    def _report_once(self, problem: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            self._tell(problem)


def _limit_of(entry: Mapping[str, Any]) -> StoredLimit:
    limit = StoredLimit(**{**entry, "learned": Learned(**entry["learned"])})
    learned = limit.learned
    line = filter(None, (learned.fixed_bytes, learned.unit_bytes))
    numbers = [limit.cap_bytes, limit.learned_at_unix_s, learned.size, *line]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("a policy can compute with numbers alone")
    return limit
