"""What is wrong with this PC as the one on which a run is typed: disk, token, the head's port.

These checks look at the machine themselves, and change nothing. Does not cover what every machine
of a cluster is asked (`checks_machine`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from orchestrator.config.schema import Config
from orchestrator.doctor.finding import Finding, fail, ok, skip, warn
from workers.host.machine import free_bytes
from workers.units import GIB, MIB

_LITTLE_DISK_BYTES: Final = 1 * GIB
_NO_DISK_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """This PC, and what it needs to know to start a run."""

    config: Config | None
    is_cluster: bool
    """Whether a cluster is up: it asks for the token, and its head has the port."""


def _disk(here: Here) -> Iterator[Finding]:
    """Yield whether the disk has room for run folders, which this PC alone gets."""
    free = free_bytes("." if here.config is None else here.config.run.dir)
    if free is None:
        yield skip("the free space of the run folders' disk is unknown")
        return
    found = f"{free / GIB:.1f} GiB free where run folders go"
    hint, fix = "or choose another disk: --set run.dir=/some/where", "du -xh -d2 ~ | sort -h"
    if free < _NO_DISK_BYTES:
        yield fail(f"{found}: a run could not be recorded", hint=hint, fix=fix)
    elif free < _LITTLE_DISK_BYTES:
        yield warn(f"{found}; a long run takes up to 1 GiB", hint=hint, fix=fix)
    else:
        yield ok(found)


def _token(here: Here) -> Iterator[Finding]:
    """Look for the user's token as Ray does, the variable first, then the file, never into it."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if here.config is not None and here.config.cluster.auth == "none":
        yield warn(
            "switched off (cluster.auth: none): any program that reaches the head's port may run "
            "code on these PCs",
            hint="set cluster.auth: token, end every node and start it with what `up` prints",
        )
    elif os.environ.get("RAY_AUTH_TOKEN"):
        yield ok("in the environment (RAY_AUTH_TOKEN)")
    elif (mode := _mode(path)) is not None:
        found = f"{path} can be read by other users of this PC"
        yield warn(found, fix=f"chmod 600 {path}") if mode & 0o077 else ok(f"{path}, for you alone")
    elif here.is_cluster:
        yield fail(f"there is none in {path}", hint="copy that file from the head; mode 600")
    else:
        hint = "do what `python -m orchestrator up NODE` prints"
        yield skip("none yet; a cluster needs one", hint=hint)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError:
        return None


def _port(here: Here) -> Iterator[Finding]:
    """Try whether a head could listen on this machine."""
    if here.config is None or here.is_cluster:
        return
    port = here.config.cluster.port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            yield warn(
                f"{port} is taken; a head on this PC could not listen there",
                hint="end that program, or set cluster.port",
                fix=f"sudo ss -ltnp 'sport = :{port}'",
            )
        else:
            yield ok(f"{port} is free for a head on this PC")


#: What is checked on this PC, by the name in the report.
CHECKS: Final[Mapping[str, Callable[[Here], Iterable[Finding]]]] = MappingProxyType(
    {"disk": _disk, "token": _token, "port": _port}
)
