"""The JSON file that an engine is started with: `python -m workers.engine SPEC.json`.

The keys are the field names of `Start`, `WorkerSpec` and the dataclasses in them. Imports no torch.
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
    """The specification of a worker, and the initial state of one incarnation of its process."""

    spec: WorkerSpec
    incarnation: int = 0
    begin: Begin = field(default_factory=lambda: Begin(fresh=True))


def write_spec(
    folder: Path, spec: WorkerSpec, incarnation: int, begin: Begin, copy: Path | None = None
) -> Path:
    """Write the file, readable only by this user; return its path. `copy` is the file on this PC
    that holds the head's copy of the slot's state.

    Raises:
        OSError: The file cannot be written.
    """
    path = folder / "spec.json"
    begin = dataclasses.replace(begin, checkpoint=copy)
    start = Start(spec=spec, incarnation=incarnation, begin=begin)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(json.dumps(dataclasses.asdict(start), indent=1, default=str).encode("ascii"))
    return path


def read_spec(path: Path) -> Start:
    """Read a file of `write_spec` or of a person. Fields with a default may be omitted.

    Raises:
        OSError: The file cannot be read.
        ValueError, TypeError, KeyError: It is not JSON, or has unknown or missing fields.
    """
    start: Start = _from_json(Start, json.loads(path.read_text("utf-8")))
    return start


def _from_json(kind: Any, value: Any) -> Any:  # noqa: ANN401 - any field
    """Convert a value of JSON to this type."""
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        structured = [each for each in typing.get_args(kind) if _is_structured(each)]
        return value if value is None or not structured else _from_json(structured[0], value)
    if kind is Path:
        return Path(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _from_json(hints[name], each) for name, each in value.items()})
    if typing.get_origin(kind) is tuple:
        return tuple(_from_json(typing.get_args(kind)[0], each) for each in value)
    return value


def _is_structured(kind: Any) -> bool:  # noqa: ANN401 - any type
    return kind is Path or dataclasses.is_dataclass(kind) or typing.get_origin(kind) is tuple
