"""What earlier runs of this user learned of a workload on a card, and which worker may start from
it.

Covers the values, their plain form, their matching, what distinguishes workloads, and the one small
file that all processes of the user read and write: whole files only (a writer holds a lock, writes
beside the file and renames), expiry, and the sentences for what cannot be read or written. The
store is optional: nothing in it raises, `problem` says what went wrong, and a worker then starts
without a learned limit. Loads no torch: the head passes these values on, and the worker chooses,
because only the worker knows its card. A policy checks a limit with each step that starts there.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

import platformdirs

from workers.files import locked, read_small, replace_whole
from workers.settings import Learned, LimitKey, Scalar, StoredLimit

_PRODUCT: Final = "oom-orchestrator"
_BUILT_IN: Final = "matmul"
_BUILT_IN_MODULE: Final = "workers.workloads.matmul"
_BUILT_IN_CLASS: Final = f"{_BUILT_IN_MODULE}:Matmul"

#: Between a workload's name and what distinguishes its versions; no name holds one.
_MARK: Final = "@"

#: Enough hexadecimal digits that no two versions of a file share them by chance.
_HASH_DIGITS: Final = 12

#: Characters of a name; the longest workload's has 255, and what distinguishes its versions comes
#: on top.
TEXT_MOST: Final = 500

#: Of each type of value what may stand for it, its least and most (of a text its length), and its
#: name.
_KINDS: Final[Mapping[type, tuple[set[type], int, int, str]]] = {
    str: ({str}, 1, TEXT_MOST, f"text of 1 to {TEXT_MOST} characters"),
    int: ({int}, 1, 2**63 - 1, "whole number above 0"),
    float: ({int, float}, 0, 2**63 - 1, "number from 0 up"),
}

#: Of each part of a limit its fields, and the types of each.
_FIELDS: Final[Mapping[type, Mapping[str, tuple[type, ...]]]] = {
    part: {name: get_args(hint) or (hint,) for name, hint in get_type_hints(part).items()}
    for part in (LimitKey, Learned, StoredLimit)
}

T = TypeVar("T")


def to_plain(limit: StoredLimit) -> dict[str, Scalar]:
    """Return a limit as one flat object, for any store."""
    plain = asdict(limit)
    return {**plain.pop("key"), **plain.pop("learned"), **plain}


def from_plain(plain: Mapping[str, object]) -> StoredLimit:
    """Return the limit that `to_plain` made an object of; keys that this version does not know are
    ignored.

    Raises:
        ValueError: Something is missing, or no value that a limit can have.
    """
    return _read(StoredLimit, plain, key=_read(LimitKey, plain), learned=_read(Learned, plain))


def choose(candidates: Iterable[StoredLimit], key: LimitKey) -> StoredLimit | None:
    """Return the limit learned at the cap nearest to that of `key`.

    Of two as near the smaller cap, then the newer.
    """

    def distance(limit: StoredLimit) -> tuple[int, int, float]:
        cap_bytes = limit.key.cap_bytes
        return abs(cap_bytes - key.cap_bytes), cap_bytes, -limit.learned_at_unix_s

    return min((limit for limit in candidates if limit.key.serves(key)), key=distance, default=None)


def workload_fingerprint(workload: str | Callable[..., object], **settings: Scalar) -> str:
    """Return what distinguishes this workload from others and from other versions of itself.

    Its name, then the product's version for `matmul`, or a hash of the source file of the user's
    module where that can be read: `mine.steps:Mlp@3f9a0c51d2e8`. What it imports from elsewhere is
    not looked at. Loads nothing.

    Args:
        workload: `matmul`, or `package.module:Class` where the class is defined in that very
        module; or the class or
            function itself.
        settings: What else decides how many bytes a step of some size takes, such as `batch=128`.
    """
    name = workload if isinstance(workload, str) else _name_of(workload)
    if name in {_BUILT_IN, _BUILT_IN_CLASS}:
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
    return (
        str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    )  # 2 and 2.0 are one


def _product_version() -> str | None:
    try:
        return version(_PRODUCT)
    except PackageNotFoundError:  # run from a folder that was never installed
        return _source_hash(_BUILT_IN_MODULE)


def _source_hash(module: str) -> str | None:
    try:
        path = _source_of(module)
        return (
            None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:_HASH_DIGITS]
        )
    except (
        OSError,
        ImportError,
        ValueError,
        AttributeError,
    ):  # the last three: what finders of others may raise
        return None


def _source_of(module: str) -> Path | None:
    """Return the file of a module, loaded or not.

    Not by `find_spec` of the whole name, which loads its packages.
    """
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
        return Path(file) if isinstance(file, str) else None
    top, *others = module.split(".")
    spec = importlib.util.find_spec(top)
    for part in others:
        folders = None if spec is None else spec.submodule_search_locations
        # A name without dots: of others the finder would look up the parent among the loaded
        # modules.
        spec = None if folders is None else PathFinder.find_spec(part, list(folders))
    return (
        Path(spec.origin)
        if spec is not None and spec.has_location and spec.origin is not None
        else None
    )


# Of any field.
def _read(part: type[T], plain: Mapping[str, object], **stored: Any) -> T:  # noqa: ANN401
    """Return a dataclass of the values in `plain` that are named and typed as its fields, and of
    the known ones.
    """
    for name, (kind, *or_none) in _FIELDS[part].items():
        if name not in stored:
            value: Any = plain.get(name)
            stored[name] = None if or_none and value is None else _checked(name, kind, value)
    return part(**stored)


def _checked(name: str, kind: type, value: Any) -> object:  # noqa: ANN401 - of a file
    types, least, most, words = _KINDS[kind]
    if type(value) not in types or not least <= (len(value) if kind is str else value) <= most:
        raise ValueError(f"{name} is no {words}")
    return kind(value)


EXPIRY_S: Final = 30 * 86_400.0
"""Age from which a limit is neither offered nor kept: drivers, programs in the background and the
step itself change. One learned that far in the future, by a clock that was wrong, is not used
either."""
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
    folder = os.environ.get(STATE_DIR_VARIABLE)
    return (
        Path(folder) if folder else platformdirs.user_state_path("oom-orchestrator")
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
        limits: list[StoredLimit] = []
        with self._told("read"):
            limits = _fresh(_read_file(self.path), now_unix_s)
        return tuple(sorted(limits, key=attrgetter("learned_at_unix_s"), reverse=True))

    def remember(self, *limits: StoredLimit) -> None:
        """Store these limits in place of those with the same keys, and delete what has expired."""
        if not limits:
            return
        with self._told("written"):
            checked = [
                from_plain(to_plain(limit)) for limit in limits
            ]  # what no reader accepts must not be written
            with self._locked():
                remaining = _fresh(
                    _read_file(self.path), max(limit.learned_at_unix_s for limit in checked)
                )
                for limit in checked:
                    remaining = [
                        *(old for old in remaining if not old.key.serves(limit.key)),
                        limit,
                    ]
                self._write(remaining)

    def clear(self, now_unix_s: float) -> int:
        """Delete all limits; return how many had not expired."""
        gone: list[StoredLimit] = []
        with self._told("written"):
            # Where nothing is to be done nothing is made either: the folder may not be ours to
            # write.
            if _read_file(self.path):
                with self._locked():
                    stored = _read_file(self.path)
                    self._write([])
                    gone = stored
        return len(_fresh(gone, now_unix_s))

    def set_aside(self) -> Path | None:
        """Rename a file that holds no limits, so that a new one can be made; return its new path.

        `None` if there is nothing to rename, or `problem` says why it cannot be.
        """
        moved: Path | None = None
        with self._told("moved"), self._locked():
            try:
                _read_file(self.path)
            except _NoStoreError:
                names = (
                    self.path.with_name(f"{self.path.name}.unreadable-{number}")
                    for number in itertools.count(1)
                )
                free = next(name for name in names if not os.path.lexists(name))
                self.path.rename(free)
                moved = free
        return moved

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


def _read_file(path: Path) -> list[StoredLimit]:
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
