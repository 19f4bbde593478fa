"""The raylets of a rehearsal: started, ended as a power cut would end them, and started again.

Ray 2.60 starts a dashboard with each cluster, and two agents with each raylet: one for metrics and
logs, one that prepares runtime environments. Each takes a second of a core before the raylet is
ready. They are left out, since a run uses none of them: its figures come with the workers'
statuses, its logs are files, and all its processes use the Python of this one. Neither connects to
the cluster nor cleans up what a raylet leaves behind (`local_cluster.py` does).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orchestrator.errors import NoClusterError
from workers.keeper import keeper, processes

#: At least 75 MiB for Ray (ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES). Statuses are sent
#: inline and need none of it.
_OBJECT_STORE_BYTES = 80 * 2**20

#: Ray's servers that listen on this address listen on no other.
_LOOPBACK = "127.0.0.1"

#: A raylet must have agents, and ends when one of them ends. `cat` reads a pipe from the raylet,
#: and ends with it.
_IDLE = "cat"
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")

#: Ray's own agents write this port if they do not serve.
_NO_PORT = -1


#: Names in `ps` of processes that may lose their parent; workers of Ray have the prefix.
_ADOPTED = frozenset({keeper.NAME, keeper.SERVER_NAME, _IDLE})
_WORKER = "ray::"


# A class of Ray, which reads its settings when it is imported.
def private_node_class() -> Any:  # noqa: ANN401
    """Return Ray's own `Node`, without the processes that a run does not use."""
    from ray import _raylet  # noqa: PLC0415 - imports ray
    from ray._private import services  # noqa: PLC0415
    from ray._private.node import Node  # noqa: PLC0415

    persist_port: Any = _raylet.persist_port  # type: ignore[attr-defined]
    ports = [
        getattr(_raylet, name)
        for name in (
            "DASHBOARD_AGENT_LISTEN_PORT_NAME",
            "METRICS_AGENT_PORT_NAME",
            "METRICS_EXPORT_PORT_NAME",
            "RUNTIME_ENV_AGENT_PORT_NAME",
        )
    ]

    class PrivateNode(Node):
        def start_api_server(self, **options: object) -> None:
            """Start no dashboard."""

        def start_raylet(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Ray's own
            """Start the raylet with idle processes as agents, and write for them that they serve
            nothing.
            """
            for port in ports:
                persist_port(self._session_dir, self.node_id, port, _NO_PORT)
            start = services.start_ray_process

            def start_idle(command: list[str], *rest: Any, **named: Any) -> object:  # noqa: ANN401
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

    return PrivateNode


class Raylets:
    """One raylet for each node of the configuration, all on this machine.

    The first carries the head.
    """

    def __init__(self, resources: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
        """Start nothing; `start` does.

        `resources` has `num_cpus` and `num_gpus` of each node. Ray puts all its files into
        `folder`.
        """
        self._resources = resources
        self._folder = folder
        self._nodes: dict[str, Any] = {}
        # One thread for the whole run: the kernel ends processes with the thread that started them
        # (PR_SET_PDEATHSIG, prctl(2), which Ray's `spawn_reaper` sets).
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="start-node")

    @property
    def gcs_address(self) -> str:
        """`host:port` of the cluster's head, once it is started."""
        return str(next(iter(self._nodes.values())).gcs_address)

    def start(self, name: str) -> None:
        """Start the raylet of one node, and wait until its processes run.

        `NoClusterError` if Ray cannot start it.
        """
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray reads its settings when it is imported.
        from ray._private.parameter import RayParams  # noqa: PLC0415

        is_head = not self._nodes
        params = RayParams(
            labels={"node": name},
            **self._resources[name],
            node_ip_address=_LOOPBACK,
            gcs_address=None if is_head else self.gcs_address,
            temp_dir=str(self._folder / "ray"),
            object_store_memory=_OBJECT_STORE_BYTES,
            node_manager_port=0,
            min_worker_port=0,
            max_worker_port=0,
            dashboard_agent_listen_port=0,
            include_log_monitor=False,  # type: ignore[arg-type]  # Ray tests its truth value
            no_monitor=True,
        )
        try:
            # spawn_reaper makes the kernel end these processes with this one, even after kill -9.
            self._nodes[name] = private_node_class()(
                params, head=is_head, shutdown_at_exit=False, spawn_reaper=True
            )
        except Exception as error:  # Ray raises many types here
            raise NoClusterError(
                f"Ray could not start a node for {name} on this machine: "
                f"{str(error) or repr(error)}"
            ) from error

    def end(self, name: str) -> None:
        """End a node as a power cut would: all its processes, at once, without a message."""
        self._await_starts()
        node = self._nodes.get(name)
        if node is None:
            return
        pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
        family = [each for pid in pids for each in (pid, *processes.below(pid))]
        processes.send(family, signal.SIGKILL)
        with contextlib.suppress(Exception):  # Ray finds them dead, and reaps them
            node.kill_all_processes(check_alive=False, allow_graceful=False)

    def start_again(self, name: str) -> None:
        """Begin to start a node that was ended.

        The start takes 1 to 2 s, and the run must not wait for it.
        """

        def begin() -> None:
            try:
                self.start(name)
            except NoClusterError as error:  # the node stays lost, as the table shows
                sys.stderr.write(f"{error}\n")  # into the run's ray.log

        self._starter.submit(begin)

    def end_all(self) -> None:
        """End what was started, the head last."""
        self._await_starts()
        for node in reversed(list(self._nodes.values())):
            with contextlib.suppress(Exception):  # the caller ends what is left
                node.kill_all_processes(check_alive=False, allow_graceful=False)
        self._starter.shutdown()

    def reap(self) -> None:
        """Reap Ray's processes that were started here and have ended, and adopted ones.

        A worker does not end with its raylet while the raylet is a zombie.
        """
        for node in list(self._nodes.values()):
            for infos in list(node.all_processes.values()):
                for info in list(infos):
                    info.process.poll()
        reap_adopted()

    def _await_starts(self) -> None:
        # The one thread does this after all earlier starts.
        self._starter.submit(bool).result()


def reap_adopted() -> None:
    """Reap keepers, their servers and workers of Ray that have ended: they lost their parent and
    became children of this process. Other children are reaped by the code that started them.
    """
    # The kernel makes them children of the main thread (find_alive_thread in kernel/exit.c).
    for pid in processes.children(os.getpid()):
        name = processes.name_of(pid)
        if name in _ADOPTED or name.startswith(_WORKER):
            with contextlib.suppress(ChildProcessError):  # it was reaped meanwhile
                os.waitpid(pid, os.WNOHANG)
