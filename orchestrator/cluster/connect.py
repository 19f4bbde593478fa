"""Connects to a running cluster, or says within seconds why that is impossible.

Covers finding the address, the token and the connection. Does not start anything
(`local_cluster.py` does) and does not judge whether the cluster fits the plan (`placement.py`).

Ray 2.60 switches token authentication on by itself in some processes and not in others: in a head
with a token file, but not in the nodes that join it. Such a cluster refuses its own nodes. Hence
every process that this project starts sets it before it imports ray, which reads these variables
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
        NoClusterError: There is none, it cannot be reached, or it refuses the connection.
        UsageError: Ray cannot work in this folder or in this environment.
    """
    check_surroundings()
    found = head_address(address)
    reach(found)
    has_token = use_user_token(auth_mode)
    with driver(found, has_token=has_token) as fleet:
        yield fleet


def check_surroundings() -> None:
    """Raise `UsageError` if Ray cannot work here. Call it before ray is imported."""
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
    """Connect to the cluster at `address` as a Ray driver; the environment must say how to
    authenticate.

    `raylets` are its nodes, if they belong to this run.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray delays the failure of a call by a second, in case it learns that the actor is dead for
    # good. Ours never are, and the delay makes the restart late (measured with Ray 2.60: the head
    # knows after 1.5 s instead of 0.03 s).
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "0")
    if raylets is None:
        # gRPC makes it TCP_USER_TIMEOUT: a connection whose bytes are not acknowledged for 4 s is
        # closed, so a poll into a cut cable fails. One that was sent before waits until the cable
        # is back, or until Ray declares the node dead. (A cut of 15 s was over 1.4 s after the
        # cable was back, one of 35 s 42 s after it: docs/results/faults.md.) Pings would find the
        # cut, but Ray's processes accept one in 5 minutes while a call is under way. At the third
        # they close the connection ("too_many_pings", observed with Ray 2.60 when a task took
        # longer than 6 s). It is set in this process alone: when Ray's own processes pinged as
        # well, a node was declared dead 15 s after the cut, and a dead node stays dead.
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
    """Return `address`, or for `auto` the `host:port` of this machine's cluster.

    `NoClusterError` if this machine belongs to no cluster.
    """
    if address != "auto":
        return address
    if named := os.environ.get("RAY_ADDRESS"):
        return named.removeprefix("ray://")
    # The folder that Ray itself chooses.
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
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence over the path
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
    """Return one token for all clusters that this process starts, one after the other: Ray keeps
    the first that it has read.
    """
    return secrets.token_hex(32)
