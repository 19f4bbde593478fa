"""Ray's token authentication, set explicitly for every process this project starts.

Ray 2.60 switches it on by itself in some processes and not in others (a head with a token file, but not the nodes
that join it), so that a cluster may refuse its own nodes. Hence it is set every time. Must be called before ray is
imported: Ray reads these variables once. Never reads or shows a token.
"""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path


def use_private_token(folder: Path) -> None:
    """Make a token for this process's own clusters and use it; only this user can read it."""
    path = folder / "auth_token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, _own_token().encode("ascii"))
    finally:
        os.close(descriptor)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win over the path
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    os.environ["RAY_AUTH_MODE"] = "token"


def use_user_token(mode: str) -> bool:
    """Use the user's token if the configuration asks for one and there is one.

    Args:
        mode: `cluster.auth`, `token` or `none`.

    Returns:
        Whether this process will authenticate itself.
    """
    has_token = mode == "token" and (bool(os.environ.get("RAY_AUTH_TOKEN")) or _token_path().is_file())
    os.environ["RAY_AUTH_MODE"] = "token" if has_token else "disabled"
    return has_token


@cache
def _own_token() -> str:
    """One for all clusters that this process starts, one after the other: Ray keeps the first it has read."""
    return secrets.token_hex(32)


def _token_path() -> Path:
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"
