"""The folder of a command, on its way to a PC that has no copy of it: packed there, unpacked here.

Does not send it (`orchestrator/cluster/command_folder.py`).
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.command.code import code_of, files_to_send, is_same_code
from workers.learned_limits import default_path
from workers.units import MIB

#: As much as Ray itself would send (packaging.py, GCS_STORAGE_MAX_SIZE); it is held in memory.
MOST_BYTES: Final = 500 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFolder:
    """Where a command starts on its node."""

    path: str
    problem: str | None = None
    """Why it is not there."""


@dataclass(frozen=True, slots=True)
class _Packed:
    code: str
    data: bytes | None = None
    """`None`: the node has the same code at the same path, or there is a problem."""
    problem: str | None = None


def look(cwd: str) -> str | None:
    """Return the code at this path on this PC; `None` if there is no such folder."""
    return code_of(cwd) if Path(cwd).is_dir() else None


def pack(theirs: str | None, cwd: str, node: str) -> _Packed:
    """Return the folder's files, unless the node has the same code."""
    if not Path(cwd).is_dir():  # then only the node can have it
        return _Packed(theirs or "")
    code, names = code_of(cwd), files_to_send(Path(cwd))
    if theirs is not None and is_same_code(theirs, code):
        return _Packed(code)
    size_bytes = sum(os.lstat(Path(cwd) / name).st_size for name in names)
    if size_bytes > MOST_BYTES:
        problem = (
            f"{cwd} holds {size_bytes / MIB:.0f} MiB that .gitignore does not name, and at most "
            f"{MOST_BYTES / MIB:.0f} MiB are sent to another PC: name there what the program does "
            f"not need, copy the folder to the same path on {node}, or set `nodes` of the job"
        )
        return _Packed(code, problem=problem)
    packed = io.BytesIO()
    try:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
            for name in names:
                tar.add(Path(cwd) / name, name, recursive=False)
    except OSError as error:
        problem = f"{cwd} cannot be sent to {node}: {error.strerror}: {error.filename}"
        return _Packed(code, problem=problem)
    return _Packed(code, packed.getvalue())


def unpack(packed: _Packed, cwd: str, run_id: str | None, slot: str) -> CommandFolder:
    """Put the files below the state folder of this PC, if they are not there yet."""
    if packed.data is None:
        return CommandFolder(path=cwd, problem=packed.problem)
    code = packed.code.rpartition("/")[2]
    target = default_path().parent / "state" / (run_id or "no-run") / ".code" / f"{slot}-{code}"
    if target.is_dir():  # of an attempt before; it may have written there what it goes on from
        return CommandFolder(path=str(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as fresh:
            with tarfile.open(fileobj=io.BytesIO(packed.data)) as tar:
                tar.extractall(Path(fresh, "code"), filter="data")
            Path(fresh, "code").rename(target)
    except OSError as error:
        problem = f"{cwd} cannot be put into {target.parent} here: {error.strerror or error}"
        return CommandFolder(path=cwd, problem=problem)
    return CommandFolder(path=str(target))
