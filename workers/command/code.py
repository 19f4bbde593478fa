"""Identifies the code in a job's folder by a hash, to find whether it has changed and whether
another PC has the same.

With git the hash covers the tracked files; otherwise the source files by their endings. Other
files, which a program writes beside them, do not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Final

#: Environment variable of the command: the code id of its folder when it was submitted.
CODE: Final = "ORCHESTRATOR_CODE"

#: Without git: the endings of source files, and most files; a folder of data is not code.
_ENDINGS: Final = (
    *(".py", ".pyx", ".sh", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".rs", ".lua"),
    *(".toml", ".cfg", ".ini", ".yaml", ".yml"),
)
_MOST_FILES: Final = 5_000
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages"})
#: A folder that contains this file is the output of a run.
RUN: Final = "run.sqlite"

_GIT_S: Final = 30.0


def code_of(folder: str | Path) -> str:
    """Return the commit, if there is one, and a hash of the files: `3f2a91c/8d5e0c2b71aa`.

    Two folders have the same code if the part after the last `/` is the same.
    """
    root = Path(folder)
    tracked = _git(root, "ls-files", "-z", "--cached")
    if tracked:
        names = sorted(filter(None, tracked.split("\0")))
    else:
        names = [name for name in _all_files(root) if name.endswith(_ENDINGS)][:_MOST_FILES]
    digest = hashlib.sha256()
    for name in names:
        with contextlib.suppress(OSError):  # a tracked file that is deleted, or a submodule
            content = hashlib.sha256((root / name).read_bytes()).digest()
            digest.update(os.fsencode(name) + b"\0" + content)
    commit = (_git(root, "rev-parse", "--short=12", "HEAD") or "").strip() if tracked else ""
    return f"{commit or 'no-git'}/{digest.hexdigest()[:12]}"


def is_same_code(one: str, other: str) -> bool:
    """Return whether two code ids mean the same files; the commit does not matter."""
    return one.rpartition("/")[2] == other.rpartition("/")[2]


def files_to_send(folder: Path) -> list[str]:
    """Return the files that another PC needs: all but those that git ignores."""
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = sorted(set(filter(None, listed.split("\0")))) if listed else _all_files(folder)
    return [name for name in names if (folder / name).is_file()]


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - the user's own git
            ["git", "-C", str(folder), *words],  # noqa: S607
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "surrogateescape")


def _all_files(root: Path) -> list[str]:
    found = []
    for folder, folders, files in os.walk(root):
        if RUN in files:
            folders.clear()
            continue
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED and not name.startswith(".")
        )
        found += [os.path.relpath(Path(folder, name), root) for name in files]
    return sorted(found)
