"""Connects to a running cluster, or says within seconds why that is impossible.

Covers finding the address, the token and the connection. Does not start anything (`local_cluster.py` does) and does not
judge whether the cluster fits the plan (`placement.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from orchestrator.cluster import auth
from orchestrator.core.fleet import Fleet, NodePower
from orchestrator.errors import NoClusterError

#: Long enough for a LAN, short enough not to be mistaken for a hang.
_REACH_S = 3.0

#: Where `ray start --head` leaves its address on this machine (ray/_private/utils.py, RAY_TMPDIR).
_ADDRESS_FILE = "ray_current_cluster"


@contextlib.contextmanager
def connected(address: str, auth_mode: str) -> Iterator[Fleet]:
    """Connect this process to the cluster at `address` and disconnect at the end.

    Args:
        address: `auto` for the cluster this machine belongs to, or `host:port` of its head.
        auth_mode: `token` or `none`.

    Raises:
        NoClusterError: There is none, it cannot be reached, or it does not let us in.
    """
    found = head_address(address)
    _reach(found)
    has_token = auth.use_user_token(auth_mode)
    with driver(found, has_token=has_token) as fleet:
        yield fleet


@contextlib.contextmanager
def driver(address: str, *, has_token: bool, power: NodePower | None = None) -> Iterator[Fleet]:
    """Be a Ray driver of the cluster at `address`; the environment must say how to authenticate.

    `power` ends and starts its nodes; `None` for a cluster whose nodes do not belong to this run.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray delays the failure of a call by a second, in case it learns that the actor is dead for good. Ours never are,
    # and the delay makes the restart late (seen with Ray 2.60: 1.5 s instead of 0.03 s until the head knows).
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "0")
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
    fleet = RayFleet(address, power)
    try:
        yield fleet
    finally:
        fleet.close()
        ray.shutdown()


def head_address(address: str) -> str:
    """Return `host:port` for `auto` too.

    Raises:
        NoClusterError: This machine belongs to no cluster.
    """
    if address != "auto":
        return address
    if named := os.environ.get("RAY_ADDRESS"):
        return named.removeprefix("ray://")
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"  # noqa: S108 - Ray's own choice of place
    try:
        found = (folder / _ADDRESS_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        found = ""
    if not found:
        raise NoClusterError("no Ray cluster runs on this machine")
    return found


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError) as error:
        raise NoClusterError(f"the Ray head at {address} cannot be reached ({error})") from error


def _refused(address: str, error: Exception, *, has_token: bool) -> str:
    text = " ".join(str(error).split())[:300]
    if "uthenticat" in type(error).__name__ + text or "token" in text:
        mine = "the one in ~/.ray/auth_token is not the head's" if has_token else "there is none in ~/.ray/auth_token"
        return f"the Ray head at {address} asks for a token, and {mine}; copy that file from the head"
    return f"the Ray head at {address} refused the connection: {type(error).__name__}: {text}"
