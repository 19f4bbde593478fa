"""A cluster of raylets on this machine, private to this run: real Ray and real labels; it leaves
nothing behind.

Each node of the configuration becomes a raylet with its label and the CPUs and GPUs it declares.
All of it lives below one temporary folder, so another Ray of the same user is neither seen nor
touched. What is ended at the end are descendants of this process, by process id. All of it listens
on loopback alone. `ray start` would also write down this cluster as the user's current one.

With each cluster Ray 2.60 starts a dashboard, and with each raylet two agents: one for metrics and
logs, one that prepares runtime environments. Each takes a second of a core before the raylet is
ready. A run uses none of them (its figures come with the workers' reports, its logs are files, and
all its processes use the Python of this one), so they are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.cluster import orphan_reaper
from orchestrator.cluster.connect import driver, use_private_token
from orchestrator.core.fleet import Fleet
from orchestrator.errors import NoClusterError

#: Ray's least (ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES is 75 MiB); reports are inlined and
#: need none of it.
_OBJECT_STORE_BYTES = 80 * 2**20

#: Where Ray's servers listen on this address, they listen on no other.
_LOOPBACK = "127.0.0.1"

#: A raylet must have agents, and ends when one of them ends. `cat` reads a pipe from the raylet,
#: and ends with it.
_IDLE = "cat"
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")

#: What Ray's own agents write where they do not serve.
_NO_PORT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RayletPlan:
    """One raylet to start."""

    name: str
    cpus: int
    gpus: int


def private_node_class() -> Any:  # noqa: ANN401 - Ray's own, which reads its settings when it is imported
    """Return Ray's own `Node`, without the processes that a run does not use."""
    from ray import _raylet  # noqa: PLC0415 - imports ray
    from ray._private import services  # noqa: PLC0415
    from ray._private.node import Node  # noqa: PLC0415

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
            """Start the raylet with idle processes as its agents, and say in their place that they
            serve nothing.
            """
            for port in ports:
                _raylet.persist_port(self._session_dir, self.node_id, port, _NO_PORT)  # type: ignore[attr-defined]
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

    return PrivateNode


class Raylets:
    """One raylet for each node of the configuration, all on this machine.

    The first carries the head.
    """

    def __init__(self, plans: Sequence[RayletPlan], folder: Path) -> None:
        """Prepare; nothing is started before `start`.

        `folder` is where Ray may put all that it puts anywhere.
        """
        self._plans = {plan.name: plan for plan in plans}
        self._folder = folder
        self._nodes: dict[str, Any] = {}
        self._orphans: list[int] = []
        self._starting: dict[str, Future[None]] = {}
        # One thread for the whole run: the kernel ends what a thread has started when that thread
        # ends (PR_SET_PDEATHSIG, prctl(2), which Ray's `spawn_reaper` sets).
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="start-node")

    @property
    def gcs_address(self) -> str:
        """`host:port` of the cluster's head, once that is started."""
        return str(next(iter(self._nodes.values())).gcs_address)

    def start(self, name: str) -> None:
        """Start the raylet of one node, and wait until its processes run.

        `NoClusterError` where Ray cannot.
        """
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray._private.parameter import RayParams  # noqa: PLC0415 - ray reads its settings when it is imported

        plan, is_head = self._plans[name], not self._nodes
        params = RayParams(
            labels={"node": plan.name},
            num_cpus=plan.cpus,
            num_gpus=plan.gpus,
            node_ip_address=_LOOPBACK,
            gcs_address=None if is_head else self.gcs_address,
            temp_dir=str(self._folder / "ray"),
            object_store_memory=_OBJECT_STORE_BYTES,
            node_manager_port=0,
            min_worker_port=0,
            max_worker_port=0,
            dashboard_agent_listen_port=0,
            include_log_monitor=False,  # type: ignore[arg-type]  # Ray tests its truth
            no_monitor=True,
        )
        try:
            # spawn_reaper makes the kernel end these processes with this one, even after kill -9.
            self._nodes[name] = private_node_class()(
                params, head=is_head, shutdown_at_exit=False, spawn_reaper=True
            )
        except Exception as error:  # Ray raises many types here
            raise NoClusterError(
                f"Ray could not start a node for {name} on this machine: {error}"
            ) from error

    def end(self, name: str) -> None:
        """End a node as a power cut would: everything on it, at once, without a message."""
        self._await_start(name)
        node = self._nodes.get(name)
        if node is None:
            return
        pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
        family = [child for pid in pids for child in _family(pid)]
        self._orphans += [process.pid for process in family if process.pid not in pids]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(Exception):  # it finds them dead, and reaps them
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        self._reap()

    def start_again(self, name: str) -> None:
        """Begin to start a node that was ended.

        It takes a second or two, in which a run must not stand still.
        """

        def begin() -> None:
            try:
                self.start(name)
            except NoClusterError as error:  # the node stays away, and the table shows it
                sys.stderr.write(f"{error}\n")  # into the run's ray.log

        self._await_start(name)
        self._reap()
        self._starting[name] = self._starter.submit(begin)

    def end_all(self) -> None:
        """End what was started, the head last."""
        for name in list(self._starting):
            self._await_start(name)
        for node in reversed(list(self._nodes.values())):
            with contextlib.suppress(Exception):  # what it leaves is ended by the caller
                node.kill_all_processes(check_alive=False, allow_graceful=False)
        self._starter.shutdown()

    def _reap(self) -> None:
        """Take note of the end of processes whose raylet died before them: they became children of
        this one.
        """
        left = []
        for pid in self._orphans:
            with contextlib.suppress(ChildProcessError):  # it was never ours, or is noted already
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    left.append(pid)
        self._orphans = left

    def _await_start(self, name: str) -> None:
        start = self._starting.pop(name, None)
        if start is not None:
            start.result()


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


#: Unix socket paths end at 107 bytes, and Ray puts 70 of its own behind its folder.
_LONGEST_FOLDER = 35

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

#: What a rehearsal sets for its processes, and puts back; `None`: it must not be set.
_ENVIRONMENT = {
    # The driver connects to loopback as it is told, and not to this machine's address in its
    # network.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Without the agent that prepares them there are no runtime environments.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_RUNTIME_ENV_HOOK": None,
    "RAY_JOB_CONFIG_JSON_ENV_VAR": None,
}

#: Set elsewhere, and put back as well.
_ALSO_SET = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "MALLOC_ARENA_MAX")

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0


@contextlib.contextmanager
def rehearsed(plans: Sequence[RayletPlan]) -> Iterator[Fleet]:
    """Start the raylets, the head first, connect, and tear all down in any case.

    `NoClusterError` if Ray fails.
    """
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    # Become the parent of workers whose raylet has died, so that they are found, ended and reaped.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    usual = tempfile.gettempdir()
    short = usual if len(usual) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 - mkdtemp makes it private
    folder = Path(tempfile.mkdtemp(prefix="orch-", dir=short))
    saved = {name: os.environ.get(name) for name in (*_ENVIRONMENT, *_ALSO_SET)}
    # Cleans up if this process is killed; out of reach of the terminal's Ctrl-C.
    reaper = subprocess.Popen(  # noqa: S603 - our own file, with a folder we made
        [sys.executable, "-I", orphan_reaper.__file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    raylets = Raylets(plans, folder)
    try:
        _set_environment(_ENVIRONMENT)
        use_private_token(folder)
        # For workers on the CPU: with one heap for all threads, what a worker releases is really
        # given back, and what one thread frees another can use (glibc, mallopt(3), M_ARENA_MAX).
        # Too late once a process runs.
        os.environ.setdefault("MALLOC_ARENA_MAX", "1")
        for plan in plans:
            raylets.start(plan.name)
        with driver(raylets.gcs_address, has_token=True, raylets=raylets) as fleet:
            _await_nodes(fleet, {plan.name for plan in plans})
            yield fleet
    finally:
        raylets.end_all()
        _end_descendants(except_pids={*before, reaper.pid})
        shutil.rmtree(folder, ignore_errors=True)
        # Where something still works in it on a machine under load, the reaper goes on until
        # nothing is left.
        reaper.communicate("" if folder.exists() else "bye\n")
        _set_environment(saved)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _await_nodes(fleet: Fleet, names: set[str]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while names - {fact.name for fact in fleet.nodes()}:
        if time.monotonic() > deadline:
            raise NoClusterError(
                f"the rehearsal's nodes did not come up in {_START_TIMEOUT_S:.0f} s"
            )
        time.sleep(0.02)


def _end_descendants(except_pids: set[int]) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        alive = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.pid not in except_pids
        ]
        if not alive:
            return
        for child in alive:
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
        psutil.wait_procs(alive, timeout=0.2)
        for child in alive:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.waitpid(child.pid, os.WNOHANG)
