"""Which code a command would run: the git commit of its folder, and a hash of the files in it.

Recorded when a job is submitted, and compared when it starts. Files that git ignores do not count;
without git, Python files do.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

#: Of larger folders only so much is hashed.
_FILES_MOST: Final = 2_000
_FILE_MOST_BYTES: Final = 2 * 2**20
_GIT_S: Final = 10.0


def code_of(folder: Path) -> str | None:
    """Return such as `commit 1f3a, files 9b02`; `None` where the folder cannot be read."""
    if not folder.is_dir():
        return None
    try:
        paths = sorted(islice(_files(folder), _FILES_MOST))
        digest = hashlib.sha256()
        for path in paths:
            with path.open("rb") as file:
                content = file.read(_FILE_MOST_BYTES)
            digest.update(
                f"{path.relative_to(folder)}\0{len(content)}\0".encode("utf-8", "replace")
            )
            digest.update(content)
    except OSError:
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    said = [f"commit {commit.strip()}"] if commit is not None else []
    return ", ".join([*said, f"files {digest.hexdigest()[:12]}"])


def _files(folder: Path) -> Iterator[Path]:
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None:
        found = (path for path in folder.rglob("*.py") if ".venv" not in path.parts)
    else:
        found = (folder / name for name in listed.split("\0") if name)
    return (path for path in found if path.is_file() and not path.is_symlink())


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; `None` where there is no git, or no repository."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            ["git", "-C", str(folder), *words],  # noqa: S607 - the user's git
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
