"""What an engine is started with, as a file of JSON: `python -m workers.engine SPEC.json`.

Knows no key by name: what may stand in the file are the fields of `Start`, of `WorkerSpec`, and of
what they hold. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.messages import Begin
from workers.settings import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A worker's specification, and what the process of an incarnation is told once."""

    spec: WorkerSpec
    incarnation: int = 0
    begin: Begin = field(default_factory=lambda: Begin(fresh=True))


def write_spec(
    folder: Path, spec: WorkerSpec, incarnation: int, begin: Begin, copy: Path | None = None
) -> Path:
    """Write the file, readable only by this user; return its path. `copy` is the head's copy of the
    slot's state on this PC.

    Raises:
        OSError: It cannot be written.
    """
    path = folder / "spec.json"
    begin = dataclasses.replace(begin, checkpoint=copy)
    start = Start(spec=spec, incarnation=incarnation, begin=begin)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(json.dumps(dataclasses.asdict(start), indent=1, default=str).encode("ascii"))
    return path


def read_spec(path: Path) -> Start:
    """Read what `write_spec` has made, or a person. Fields that have a default may be left out.

    Raises:
        OSError: It cannot be read.
        ValueError, TypeError, KeyError: It is no JSON, or its fields are others.
    """
    start: Start = _made(Start, json.loads(path.read_text("utf-8")))
    return start


def _made(kind: Any, value: Any) -> Any:  # noqa: ANN401 - any field
    """Make a value of this type of what JSON has made of it."""
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        structured = [each for each in typing.get_args(kind) if _is_structured(each)]
        return value if value is None or not structured else _made(structured[0], value)
    if kind is Path:
        return Path(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _made(hints[name], each) for name, each in value.items()})
    if typing.get_origin(kind) is tuple:
        return tuple(_made(typing.get_args(kind)[0], each) for each in value)
    return value


def _is_structured(kind: Any) -> bool:  # noqa: ANN401 - any type
    return kind is Path or dataclasses.is_dataclass(kind) or typing.get_origin(kind) is tuple
