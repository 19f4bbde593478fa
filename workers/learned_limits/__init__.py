"""What earlier runs of this user learned: the size that fits, by card and workload.

One small JSON file that all processes of the user read and write. Of a card, type and workload it
has what was learned last. Nothing here raises: of a damaged file only what is whole is read, and
`LimitStore.problem` says why a file cannot be read or written. A worker then starts without a
learned size. A policy checks such a size with each step that starts there. Loads no torch.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import platformdirs

from workers.files import locked, read_small, replace_whole
from workers.settings import Learned, LimitKey, Scalar, StoredLimit

if TYPE_CHECKING:
    from pydantic import TypeAdapter

EXPIRY_S: Final = 30 * 86_400.0
"""Age from which a limit is neither offered nor kept: drivers, programs in the background and the
step itself change. One learned that far in the future, by a clock that was wrong, is not used
either."""
STATE_DIR_VARIABLE: Final = "ORCHESTRATOR_STATE_DIR"
"""Environment variable that names another folder for the store."""

_PRODUCT: Final = "oom-orchestrator"
_BUILT_IN: Final = "matmul"
_BUILT_IN_MODULE: Final = "workers.workloads.matmul"
_MARK: Final = "@"
"""Between a workload's name and what distinguishes its versions; no name holds one."""
_HASH_DIGITS: Final = 12
"""Hexadecimal digits: no two versions of a file share so many by chance."""
_PATIENCE_S: Final = 2.0
"""For a lock that others hold for some milliseconds at a time."""
_FILE_MOST_BYTES: Final = 16 * 2**20


def workload_fingerprint(workload: str | Callable[..., object], **settings: Scalar) -> str:
    """Return what distinguishes this workload from others and from other versions of itself.

    Its name, then the product's version for `matmul`, or a hash of the source file of the user's
    module where that can be read: `mine.steps:Mlp@3f9a0c51d2e8`. What it imports is not looked at.
    Loads nothing.

    Args:
        workload: `matmul`, or `package.module:Class`; or the class or function itself.
        settings: What else decides how many bytes a step of some size takes, such as `batch=128`.
    """
    name = workload if isinstance(workload, str) else _name_of(workload)
    if name in {_BUILT_IN, f"{_BUILT_IN_MODULE}:Matmul"}:
        parts = [_BUILT_IN, _product_version()]
    else:
        parts = [name, _source_hash(name.partition(":")[0])]
    words = [f"{key}={_word(value)}" for key, value in sorted(settings.items())]
    return " ".join([_MARK.join(part for part in parts if part is not None), *words])


def settings_hash(settings: Mapping[str, Scalar]) -> str:
    """Return what distinguishes these settings from others, whatever their order."""
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:_HASH_DIGITS]


def workload_name(fingerprint: str) -> str:
    """Return the name that a fingerprint begins with."""
    return fingerprint.partition(" ")[0].partition(_MARK)[0]


def _name_of(workload: Callable[..., object]) -> str:
    named = workload if hasattr(workload, "__qualname__") else type(workload)
    return f"{named.__module__}:{named.__qualname__}"


def _word(value: Scalar) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 2 and 2.0 are one
    return str(value)


def _product_version() -> str | None:
    try:
        return version(_PRODUCT)
    except PackageNotFoundError:  # run from a folder that was never installed
        return _source_hash(_BUILT_IN_MODULE)


def _source_hash(module: str) -> str | None:
    try:
        path = _source_of(module)
        content = None if path is None else path.read_bytes()
    except (OSError, ImportError, ValueError, AttributeError):  # also of finders of others
        return None
    return None if content is None else hashlib.sha256(content).hexdigest()[:_HASH_DIGITS]


def _source_of(module: str) -> Path | None:
    """Return the file of a module, loaded or not.

    Not by `find_spec` of the whole name, which loads its packages.
    """
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
        return Path(file) if isinstance(file, str) else None
    top, *others = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not others:
        return Path(spec.origin) if spec is not None and spec.origin is not None else None
    places = [Path(folder, *others) for folder in spec.submodule_search_locations or ()]
    files = (file for place in places for file in (place / "__init__.py", place.with_suffix(".py")))
    return next((file for file in files if file.is_file()), None)


def choose(candidates: Iterable[StoredLimit], key: LimitKey) -> StoredLimit | None:
    """Return the limit that was learned in these circumstances; `None` if there is none."""
    return next((limit for limit in candidates if limit.key.serves(key)), None)


def to_plain(limit: StoredLimit) -> dict[str, Scalar]:
    """Return a limit as one flat object."""
    plain = asdict(limit)
    return {**plain.pop("key"), **plain.pop("learned"), **plain}


def from_plain(plain: Mapping[str, Any]) -> StoredLimit:
    """Return the limit that `to_plain` made an object of.

    Raises:
        ValueError: Something is missing, or no value that a limit can have.
    """
    key, learned = (
        {field.name: plain[field.name] for field in fields(part) if field.name in plain}
        for part in (LimitKey, Learned)
    )
    limit = _adapter().validate_python({**plain, "key": key, "learned": learned})
    if limit.learned.size < 1 or limit.key.cap_bytes < 1:
        raise ValueError("a size and a cap are above 0")
    return limit


@cache
def _adapter() -> TypeAdapter[StoredLimit]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - only who reads the file waits for it

    return TypeAdapter(StoredLimit)


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
        """A sentence about the last call if that failed, else `None`."""

    def all(self, now_unix_s: float) -> tuple[StoredLimit, ...]:
        """Return every limit that has not expired, the newest first."""
        limits: dict[str, StoredLimit] = {}
        with self._told("read"):
            limits = _read(self.path, now_unix_s)
        newest_first = sorted(limits.values(), key=lambda limit: -limit.learned_at_unix_s)
        return tuple(newest_first)

    def best(self, key: LimitKey, now_unix_s: float) -> StoredLimit | None:
        """Return the limit to start from; `None` if nothing that fits is known."""
        return choose(self.all(now_unix_s), key)

    def candidates(self, workload: str, now_unix_s: float) -> tuple[StoredLimit, ...]:
        """Return every limit of a workload, in any version: a worker, which knows its card and its
        own copy of the source, chooses.
        """
        name = workload_name(workload)
        known = self.all(now_unix_s)
        return tuple(limit for limit in known if workload_name(limit.key.workload) == name)

    def remember(self, *limits: StoredLimit) -> None:
        """Store these limits in place of what was known of the same card, type and workload."""
        if not limits:
            return
        with self._told("written"), self._locked():
            known = _read(self.path, max(limit.learned_at_unix_s for limit in limits))
            for limit in limits:
                known[f"{limit.key.card} {limit.key.dtype} {limit.key.workload}"] = limit
            self._write(known)

    def clear(self, now_unix_s: float) -> int:
        """Delete all limits; return how many had not expired."""
        gone = self.all(now_unix_s)
        if self.problem is None and self.path.exists():
            with self._told("written"), self._locked():
                self._write({})
        return len(gone) if self.problem is None else 0

    def _write(self, limits: Mapping[str, StoredLimit]) -> None:
        plain = {name: to_plain(limit) for name, limit in limits.items()}
        replace_whole(self.path, json.dumps(plain, indent=1) + "\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out; readers need no lock, they see the file before or after."""
        if self.path.parts[:1] == ("~",):  # what platformdirs returns where there is no home
            raise OSError(errno.ENOENT, "this user has no home folder")
        with locked(self.path.with_name(f"{self.path.name}.lock"), _PATIENCE_S):
            yield

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        self.problem = None
        try:
            yield
        except OSError as failure:
            self.problem = (
                f"learned limits cannot be {what}: {self.path}: {failure.strerror or failure}; "
                f"make it accessible, or name another folder in {STATE_DIR_VARIABLE}"
            )


def _read(path: Path, now_unix_s: float) -> dict[str, StoredLimit]:
    """Return the limits of a file that have not expired; of a damaged file those that are whole."""
    stored: object = None
    with suppress(FileNotFoundError, ValueError, RecursionError):
        stored = json.loads(read_small(path, _FILE_MOST_BYTES))
    limits = {}
    for name, plain in stored.items() if isinstance(stored, dict) else ():
        with suppress(ValueError, TypeError):
            limit = from_plain(plain)
            if abs(now_unix_s - limit.learned_at_unix_s) < EXPIRY_S:
                limits[name] = limit
    return limits
