"""Connects to a running cluster, or says within seconds why that is impossible.

Covers finding the address, the token and the connection. Does not start anything
(`local_cluster.py` does) and does not judge whether the cluster fits the plan (`placement.py`).

Ray 2.60 switches token authentication on by itself in some processes and not in others (a head with
a token file, but not the nodes that join it), so that a cluster may refuse its own nodes. Hence it
is set for every process that this project starts, before ray is imported: Ray reads these variables
once. A token is never shown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from orchestrator import why_hidden
from orchestrator.cluster.raylets import Raylets
from orchestrator.core.fleet import Fleet
from orchestrator.errors import NoClusterError, UsageError

#: Long enough for a LAN, short enough not to be mistaken for a hang.
_REACH_S = 3.0

#: Where `ray start --head` leaves its address on this machine (ray/_private/utils.py, RAY_TMPDIR).
_ADDRESS_FILE = "ray_current_cluster"


@contextlib.contextmanager
def connected(address: str, auth_mode: str) -> Iterator[Fleet]:
    """Connect to the cluster at `address` (`host:port`, or `auto`: this machine's), and disconnect
    at the end.

    Raises:
        NoClusterError: There is none, it cannot be reached, or it does not let us in.
        UsageError: This folder, or the environment, does not let it work.
    """
    check_surroundings()
    found = head_address(address)
    reach(found)
    has_token = use_user_token(auth_mode)
    with driver(found, has_token=has_token) as fleet:
        yield fleet


def check_surroundings() -> None:
    """Raise `UsageError` where Ray would not work here; to be asked before ray is imported."""
    if why := why_hidden(os.getcwd()):  # noqa: PTH109 - workers look for modules there
        raise UsageError(why)
    if os.environ.get("RAY_CLIENT_MODE") == "1":
        raise UsageError(
            "RAY_CLIENT_MODE=1 is set: Ray would send all its calls to another process, and start "
            "no node here; type: unset RAY_CLIENT_MODE"
        )


def reach(address: str) -> None:
    """Return if something listens at `host:port`; `NoClusterError` if not."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError) as error:
        raise NoClusterError(f"the Ray head at {address} cannot be reached ({error})") from error


@contextlib.contextmanager
def driver(address: str, *, has_token: bool, raylets: Raylets | None = None) -> Iterator[Fleet]:
    """Be a Ray driver of the cluster at `address`; the environment must say how to authenticate.

    `raylets` are its nodes, where they belong to this run.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray delays the failure of a call by a second, in case it learns that the actor is dead for
    # good. Ours never are, and the delay makes the restart late (seen with Ray 2.60: 1.5 s instead
    # of 0.03 s until the head knows).
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "0")
    if raylets is None:
        # gRPC makes it TCP_USER_TIMEOUT: a connection whose bytes are not acknowledged for 4 s is
        # closed, so a poll that is sent into a cable that was cut fails. One that was sent before
        # waits for the cable's return, or for Ray to declare the node dead. (A cut of 15 s was over
        # 1.4 s after the return, one of 35 s 42 s after it: docs/results/faults.md.) Pings would
        # find that out and are forbidden: Ray's processes accept one in 5 minutes while a call is
        # under way, and at the third they close the connection ("too_many_pings", seen with Ray
        # 2.60 where a task took longer than 6 s). In this process alone: where Ray's own processes
        # pinged as well, a node was declared dead 15 s after the cut, and one that is stays so.
        os.environ.setdefault("RAY_grpc_client_keepalive_timeout_ms", "4000")
    import ray  # noqa: PLC0415 - reads the authentication settings when it is imported

    from orchestrator.cluster.ray_fleet import RayFleet  # noqa: PLC0415 - imports ray

    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            namespace=f"orchestrator-{os.getpid()}",
        )
    except Exception as error:  # Ray raises a dozen unrelated types here
        raise NoClusterError(_refused(address, error, has_token=has_token)) from error
    try:
        yield RayFleet(address, raylets)
    finally:
        ray.shutdown()


def head_address(address: str) -> str:
    """Return `host:port` for `auto` too.

    `NoClusterError` where this machine belongs to no cluster.
    """
    if address != "auto":
        return address
    if named := os.environ.get("RAY_ADDRESS"):
        return named.removeprefix("ray://")
    # Ray's own choice of place.
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"  # noqa: S108
    try:
        found = (folder / _ADDRESS_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        found = ""
    if not found:
        raise NoClusterError("no Ray cluster runs on this machine")
    return found


def _refused(address: str, error: Exception, *, has_token: bool) -> str:
    text = " ".join(str(error).split())[:300]
    if "uthenticat" in type(error).__name__ + text or "token" in text:
        mine = (
            "the one in ~/.ray/auth_token is not the head's"
            if has_token
            else "there is none in ~/.ray/auth_token"
        )
        return (
            f"the Ray head at {address} asks for a token, and {mine}; copy that file from the head"
        )
    return f"the Ray head at {address} refused the connection: {type(error).__name__}: {text}"


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
    """Use the user's token if there is one and `mode` (`cluster.auth`) is `token`.

    Return whether it is used.
    """
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = mode == "token" and (bool(os.environ.get("RAY_AUTH_TOKEN")) or path.is_file())
    os.environ["RAY_AUTH_MODE"] = "token" if has_token else "disabled"
    return has_token


@cache
def _own_token() -> str:
    """One for all clusters that this process starts, one after the other: Ray keeps the first it
    has read.
    """
    return secrets.token_hex(32)
