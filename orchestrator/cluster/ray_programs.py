"""Ray's own command with a patched part, as a program.

    python -m orchestrator.cluster.ray_programs ray PATH_OF_RAY start --address=HOST:PORT ...

The patched raylet does not wait for its agents. A raylet of Ray 2.60 waits until its agents have
published their ports, and ends itself 15 s after it began to wait (`WaitForPersistedPort` in
src/ray/util/port_persistence.h; ray issue 65983; no setting changes it). `ray start` waits for that
raylet until 30 s are over, and fails. On a loaded machine the agents need that long (18 s at a load
of 19 on 2 cores), so that a node came back late or not at all. Here their ports are chosen before
they start, and nothing waits for them: at that load a node joined in 8 to 16 s, not 17 to 25 s.
"""

from __future__ import annotations

import functools
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

#: How long a raylet waits for the agent that prepares environments when it first needs one; Ray's
#: own value is 30 s.
_AGENT_PATIENCE = ("RAY_agent_register_timeout_ms", "180000")


def start_ray(program: str, *arguments: str) -> None:
    """Run the program `ray` with the patched raylet; this ends the process."""
    os.environ.setdefault(*_AGENT_PATIENCE)
    from ray._private.node import Node  # noqa: PLC0415 - ray reads its settings when it is imported

    Node.start_raylet = _with_known_ports(Node.start_raylet)  # type: ignore[method-assign]
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def _with_known_ports(start_raylet: Any) -> Any:  # noqa: ANN401 - Ray's own
    """Return Ray's `Node.start_raylet`, preceded by the choice of the agents' ports."""

    @functools.wraps(start_raylet)
    def start(node: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - as above
        # Ray's stubs are not complete.
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
        # The others are options of the raylet. It reads this one only from the file that the agent
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

    If another process takes one before its agent, that agent ends, and the raylet with it.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for listener in sockets:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in sockets]


if __name__ == "__main__":
    start_ray(*sys.argv[2:])
