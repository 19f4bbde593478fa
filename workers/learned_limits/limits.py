"""What was learned of a workload on a card, which worker may start from it, and what distinguishes
workloads.

Covers the values, their plain form and their matching. Does not cover storing them (`store.py`),
nor how a policy uses one: it starts there and checks it with each step. Loads no torch: the head
passes these values on, and the worker chooses, because only the worker knows its card.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

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


def is_about(limit: StoredLimit, *, card: str | None = None, workload: str | None = None) -> bool:
    """Whether a limit's card and workload contain these texts, in upper or lower case.

    `None` asks for nothing.
    """
    return (card is None or card.casefold() in limit.key.card.casefold()) and (
        workload is None or workload.casefold() in limit.key.workload.casefold()
    )


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


def _read(part: type[T], plain: Mapping[str, object], **known: Any) -> T:  # noqa: ANN401 - of any field
    """Return a dataclass of the values in `plain` that are named and typed as its fields, and of
    the known ones.
    """
    for name, (kind, *or_none) in _FIELDS[part].items():
        if name not in known:
            value: Any = plain.get(name)
            known[name] = None if or_none and value is None else _checked(name, kind, value)
    return part(**known)


def _checked(name: str, kind: type, value: Any) -> object:  # noqa: ANN401 - of a file
    types, least, most, words = _KINDS[kind]
    if type(value) not in types or not least <= (len(value) if kind is str else value) <= most:
        raise ValueError(f"{name} is no {words}")
    return kind(value)
