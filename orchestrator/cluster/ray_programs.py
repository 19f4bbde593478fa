"""Parts of Ray that need a process of their own, as programs.

    python -m orchestrator.cluster.ray_programs ray PATH_OF_RAY start --address=HOST:PORT ...
    python -m orchestrator.cluster.ray_programs is-member HOST:PORT NODE_ID

`ray` is Ray's own command with a raylet that does not wait for its agents. A raylet of Ray 2.60
waits until its agents have said by which ports they serve, and ends itself 15 s after it began to
(`WaitForPersistedPort` in src/ray/util/port_persistence.h; ray issue 65983; no setting changes it).
`ray start` goes on waiting for that raylet until 30 s are over, and fails. On a loaded machine the
agents need that long (18 s at a load of 19 on 2 cores), so that a node came back late or not at
all. Here their ports are known before they start, and nothing waits for them: at that load a node
joined in 8 to 16 s instead of 17 to 25 s.

`is-member` asks a head whether it counts a node in: exit code 0 it does, 3 it does not, else
unknown. Ray's client ends its process at times. The environment must say how to authenticate.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

#: How long a raylet waits for the agent that prepares environments when it needs one first; Ray's
#: own value is 30 s.
_AGENT_PATIENCE = ("RAY_agent_register_timeout_ms", "180000")


def start_ray(program: str, *arguments: str) -> None:
    """Run the program `ray`, with a raylet that waits for no agents; it ends this process."""
    os.environ.setdefault(*_AGENT_PATIENCE)
    from ray._private.node import Node  # noqa: PLC0415 - ray reads its settings when it is imported

    Node.start_raylet = _with_known_ports(Node.start_raylet)  # type: ignore[method-assign]
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def _with_known_ports(start_raylet: Any) -> Any:  # noqa: ANN401 - Ray's own
    """Return the method with which Ray's `Node` starts its raylet, preceded by the choice of the
    agents' ports.
    """

    @functools.wraps(start_raylet)
    def start(node: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - as above
        # Its stubs are not complete.
        from ray._raylet import (  # type: ignore[attr-defined]  # noqa: PLC0415
            DASHBOARD_AGENT_LISTEN_PORT_NAME,
            persist_port,
        )

        params = node._ray_params
        names = (
            "metrics_agent_port",
            "metrics_export_port",
            "runtime_env_agent_port",
            "dashboard_agent_listen_port",
        )
        for name, port in zip(names, free_ports(len(names)), strict=True):
            setattr(params, name, getattr(params, name, None) or port)
        # The others are options of the raylet; this one it reads only from the file that the agent
        # writes again.
        persist_port(
            node._session_dir,
            node.node_id,
            DASHBOARD_AGENT_LISTEN_PORT_NAME,
            params.dashboard_agent_listen_port,
        )
        start_raylet(node, *arguments, **options)

    return start


def free_ports(number: int) -> Sequence[int]:
    """Return ports that nothing listens on now.

    If one is taken meanwhile, its agent ends, the raylet with it.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for listener in sockets:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in sockets]


MEMBER, NOT_A_MEMBER = 0, 3

#: Ray's client waits without an end for a head that is silent. A loaded machine takes a quarter of
#: this to import it.
_PATIENCE_S = 60


def is_member(address: str, node_id: str) -> int:
    """Ask the head at `host:port` whether it counts a node in, and return the exit code."""
    signal.alarm(_PATIENCE_S)  # its default action ends the process
    from ray import NodeID  # noqa: PLC0415 - the patience includes the import

    # The module has no types.
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415

    client = GcsClient(address=address)
    (answer,) = client.check_alive([NodeID.from_hex(node_id)], timeout=10)
    return MEMBER if answer else NOT_A_MEMBER


if __name__ == "__main__":
    if sys.argv[1] == "ray":
        start_ray(*sys.argv[2:])
    sys.exit(is_member(*sys.argv[2:]))
