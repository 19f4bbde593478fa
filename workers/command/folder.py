"""Packs the folder of a command on one PC, and unpacks it on a PC that has no copy.

Does not send it (`orchestrator/cluster/node_tasks.py` does).
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from workers.command.code import code_of, files_to_send, is_same_code
from workers.learned_limits import default_path
from workers.units import MIB

#: Ray's own limit (packaging.py, GCS_STORAGE_MAX_SIZE); the archive is held in memory.
MOST_BYTES: Final = 500 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFolder:
    """The folder in which a command starts on its node."""

    path: str
    problem: str | None = None
    """Why the folder is not on the node."""
    code: str = ""
    data: bytes | None = None
    """Archive of its files; `None`: the node has the same code at the same path."""


def code_at(cwd: str) -> str | None:
    """Return the code id of a folder of this PC; `None` if there is no such folder."""
    return code_of(cwd) if Path(cwd).is_dir() else None


def pack(theirs: str | None, cwd: str, node: str) -> CommandFolder:
    """Return the folder, with its files unless the node has the same code (`theirs`)."""
    root, folder = Path(cwd), CommandFolder(path=cwd)
    if not root.is_dir():  # only the node can have it
        return folder
    code, names = code_of(cwd), files_to_send(root)
    if theirs is not None and is_same_code(theirs, code):
        return folder
    size_bytes = sum(os.lstat(root / name).st_size for name in names)
    if size_bytes > MOST_BYTES:
        problem = (
            f"{cwd} holds {size_bytes / MIB:.0f} MiB that .gitignore does not name, and at most "
            f"{MOST_BYTES / MIB:.0f} MiB are sent to another PC: name there what the program does "
            f"not need, copy the folder to the same path on {node}, or set `nodes` of the job"
        )
        return replace(folder, problem=problem)
    packed = io.BytesIO()
    try:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
            for name in names:
                tar.add(root / name, name, recursive=False)
    except OSError as error:
        problem = f"{cwd} cannot be sent to {node}: {error.strerror}: {error.filename}"
        return replace(folder, problem=problem)
    return replace(folder, code=code, data=packed.getvalue())


def unpack(folder: CommandFolder, run_id: str | None, slot: str) -> CommandFolder:
    """Unpack the files below the state folder of this PC, unless they are there already."""
    if folder.data is None:
        return folder
    code = folder.code.rpartition("/")[2]
    target = default_path().parent / "state" / (run_id or "no-run") / ".code" / f"{slot}-{code}"
    if target.is_dir():  # an earlier attempt may have left its checkpoint there
        return CommandFolder(path=str(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as fresh:
            with tarfile.open(fileobj=io.BytesIO(folder.data)) as tar:
                tar.extractall(Path(fresh, "code"), filter="data")
            Path(fresh, "code").rename(target)
    except OSError as error:
        why = error.strerror or error
        problem = f"{folder.path} cannot be put into {target.parent} here: {why}"
        return CommandFolder(path=folder.path, problem=problem)
    return CommandFolder(path=str(target))
