"""A node of a rehearsal: Ray's own `Node`, on loopback and without the processes that a run does
not use.

With each cluster Ray 2.60 starts a dashboard, and with each raylet two agents: one for metrics and
logs, one that prepares runtime environments. Each takes a second of a core before the raylet is
ready. A run uses none of them: its figures come with the workers' reports, its logs are files, and
all its processes use the Python of this one.

Imports ray, which reads its settings at that moment.
"""

from __future__ import annotations

from typing import Any

from ray._private import services
from ray._private.node import Node
from ray._raylet import (  # type: ignore[attr-defined]  # its stubs are not complete
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

#: Where Ray's servers listen on this address, they listen on no other.
LOOPBACK = "127.0.0.1"

_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")

#: A raylet must have agents, and ends when one of them ends. `cat` reads a pipe from the raylet,
#: and ends with it.
_IDLE = "cat"

_AGENT_PORTS = (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
)

#: What Ray's own agents write where they do not serve.
_NO_PORT = -1


class PrivateNode(Node):
    """See the module."""

    def start_api_server(self, **options: object) -> None:
        """Start no dashboard."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Ray's own
        """Start the raylet with idle processes as its agents, and say in their place that they
        serve nothing.
        """
        for port in _AGENT_PORTS:
            persist_port(self._session_dir, self.node_id, port, _NO_PORT)
        start = services.start_ray_process

        def start_idle(command: list[str], *rest: Any, **named: Any) -> object:  # noqa: ANN401 - as above
            idle = [
                f"{name}={_IDLE}" if (name := word.partition("=")[0]) in _AGENTS else word
                for word in command
            ]
            return start(idle, *rest, **named)

        services.start_ray_process = start_idle
        try:
            super().start_raylet(*arguments, **options)
        finally:
            services.start_ray_process = start
