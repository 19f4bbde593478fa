"""What earlier runs of this user learned: the size that fits, by card and workload.

One small JSON file that all processes of the user read and write. Of a card, type and workload it
has what was learned last. Nothing here raises: `LimitStore.problem` says why a file cannot be read
or written, or that it is damaged. A worker then starts without a learned size. A policy checks such
a size with each step that starts there. Loads no torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import platformdirs

from workers.files import locked, read_small, replace_whole
from workers.settings import LimitKey, Scalar, StoredLimit

if TYPE_CHECKING:
    from pydantic import TypeAdapter

EXPIRY_S: Final = 30 * 86_400.0
"""Age from which a limit is neither offered nor kept: drivers, programs in the background and the
step itself change. One learned that far in the future, by a clock that was wrong, is not used
either."""
STATE_DIR_VARIABLE: Final = "ORCHESTRATOR_STATE_DIR"
"""Environment variable that names another folder for the store."""

_PRODUCT: Final = "oom-orchestrator"
_MATMUL_MODULE: Final = "workers.workloads.matmul"
_HASH_DIGITS: Final = 12
"""Hexadecimal digits: no two versions of a file share so many by chance."""
_PATIENCE_S: Final = 2.0
"""For a lock that others hold for some milliseconds at a time."""
_FILE_MOST_BYTES: Final = 16 * 2**20


def workload_fingerprint(workload: str | Callable[..., object], **settings: Scalar) -> str:
    """Return what distinguishes this workload from others and from other versions of itself.

    Its name, then a hash of its module's source file where that is loaded and can be read:
    `mine.steps:Mlp@3f9a0c51d2e8`. What it imports is not looked at.

    Args:
        workload: `matmul`, or `package.module:Class`; or the class or function itself.
        settings: What else decides how many bytes a step of some size takes, such as `batch=128`.
    """
    name = workload if isinstance(workload, str) else _name_of(workload)
    if name == f"{_MATMUL_MODULE}:Matmul":
        name = "matmul"
    source = _source_hash(_MATMUL_MODULE if name == "matmul" else name.partition(":")[0])
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


def choose(candidates: Iterable[StoredLimit], key: LimitKey) -> StoredLimit | None:
    """Return the limit that was learned in these circumstances; `None` if there is none."""
    return next((limit for limit in candidates if limit.key.serves(key)), None)


@cache
def _file() -> TypeAdapter[dict[str, StoredLimit]]:
    """Return how the file is read and written: what is no limit is refused."""
    from pydantic import TypeAdapter  # noqa: PLC0415 - only who reads the file waits for it

    return TypeAdapter(dict[str, StoredLimit])


def default_path() -> Path:
    """Return where the store is: below `ORCHESTRATOR_STATE_DIR` if that is set, else in the user's
    state folder.
    """
    folder = os.environ.get(STATE_DIR_VARIABLE)
    return (Path(folder) if folder else platformdirs.user_state_path(_PRODUCT)) / "limits.json"


class LimitStore:
    """Limits that outlive a run. The time comes from the caller (Unix, seconds)."""

    def __init__(self, path: Path | None = None) -> None:
        """Prepare; nothing is made before there is something to remember."""
        self.path = default_path() if path is None else path
        self.problem: str | None = None
        """A sentence about the last call if that failed or found damage, else `None`."""

    def all(self, now_unix_s: float) -> tuple[StoredLimit, ...]:
        """Return every limit that has not expired, the newest first."""
        limits: dict[str, StoredLimit] = {}
        with self._told("read"):
            limits = self._read(now_unix_s)
        return tuple(sorted(limits.values(), key=lambda limit: -limit.learned_at_unix_s))

    def best(self, key: LimitKey, now_unix_s: float) -> StoredLimit | None:
        """Return the limit to start from; `None` if nothing that fits is known."""
        return choose(self.all(now_unix_s), key)

    def remember(self, *limits: StoredLimit) -> None:
        """Store these limits in place of what was known of the same card, type and workload."""
        if not limits:
            return
        lock = self.path.with_name(f"{self.path.name}.lock")
        with self._told("written"):
            if self.path.parts[:1] == ("~",):  # what platformdirs returns where there is no home
                raise OSError(errno.ENOENT, "this user has no home folder")
            with locked(lock, _PATIENCE_S):  # readers need none: they see the file before or after
                known = self._read(max(limit.learned_at_unix_s for limit in limits))
                for limit in limits:
                    known[f"{limit.key.card} {limit.key.dtype} {limit.key.workload}"] = limit
                replace_whole(self.path, _file().dump_json(known, indent=1).decode())

    def _read(self, now_unix_s: float) -> dict[str, StoredLimit]:
        """Return the limits that have not expired; none of a damaged file."""
        try:
            limits = _file().validate_json(read_small(self.path, _FILE_MOST_BYTES))
        except FileNotFoundError:
            return {}
        except ValueError:
            self.problem = (
                f"learned limits: {self.path} is damaged, and the next run writes it anew; to begin "
                "afresh, delete it"
            )
            return {}
        return {
            name: limit
            for name, limit in limits.items()
            if abs(now_unix_s - limit.learned_at_unix_s) < EXPIRY_S
        }

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        self.problem = None
        try:
            yield
        except (OSError, ValueError) as failure:
            self.problem = (
                f"learned limits cannot be {what}: {self.path}: "
                f"{getattr(failure, 'strerror', None) or failure}; "
                f"make it accessible, or name another folder in {STATE_DIR_VARIABLE}"
            )
