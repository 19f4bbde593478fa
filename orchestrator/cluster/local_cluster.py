"""A cluster of raylets on this machine, private to this run: real Ray and real labels; it leaves
nothing behind.

Each node of the configuration becomes a raylet with its label and the CPUs and GPUs it declares.
All files are below one temporary folder, so that no other Ray of the same user is affected. All
processes have the mark of this rehearsal in their environment, and those with it are killed at the
end. All of them listen on loopback alone. `ray start` would also record this cluster as the user's
current one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.cluster import orphan_reaper
from orchestrator.cluster.connect import check_surroundings, driver, use_private_token
from orchestrator.cluster.orphan_reaper import MARK
from orchestrator.cluster.raylets import Raylets, reap_adopted
from orchestrator.core.fleet import Fleet
from orchestrator.errors import NoClusterError
from workers.keeper import processes

#: Unix socket paths have at most 107 bytes, and Ray appends 70 to its folder.
_LONGEST_FOLDER = 35

#: Variables that a rehearsal sets for its processes and restores; `None`: it must not be set.
_ENVIRONMENT = {
    # The driver connects to loopback as told, not to this machine's address in its network.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # There is no agent that could prepare a runtime environment.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_RUNTIME_ENV_HOOK": None,
    "RAY_JOB_CONFIG_JSON_ENV_VAR": None,
}

#: Variables that are set elsewhere, and restored as well.
_ALSO_SET = (MARK, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "MALLOC_ARENA_MAX")

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0


@contextlib.contextmanager
def rehearsed(resources: Mapping[str, Mapping[str, Any]]) -> Iterator[Fleet]:
    """Start the raylets, the head first, connect, and tear all down in any case. `resources` as in
    `Raylets`.

    `NoClusterError` if Ray fails, `UsageError` if Ray cannot work in this folder or environment.
    """
    check_surroundings()
    # Become the parent of workers whose raylet has died, to reap them.
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    usual = tempfile.gettempdir()
    # `mkdtemp` makes it private.
    short = usual if len(usual) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="orch-", dir=short))
    saved = {name: os.environ.get(name) for name in (*_ENVIRONMENT, *_ALSO_SET)}
    # Cleans up even if this process is killed. The terminal's Ctrl-C does not reach it.
    reaper = subprocess.Popen(  # noqa: S603 - our own file and folder
        [sys.executable, "-I", orphan_reaper.__file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    raylets = Raylets(resources, folder)
    try:
        _set_environment({**_ENVIRONMENT, MARK: str(folder)})
        use_private_token(folder)
        # For workers on the CPU: with one heap for all threads, memory that a worker frees goes
        # back to the system, and threads can use what others freed (glibc, mallopt(3),
        # M_ARENA_MAX). It has no effect on a process that runs already.
        os.environ.setdefault("MALLOC_ARENA_MAX", "1")
        for name in resources:
            raylets.start(name)
        with driver(raylets.gcs_address, has_token=True, raylets=raylets) as fleet:
            _await_nodes(fleet, set(resources))
            yield fleet
    finally:
        raylets.end_all()
        # If a process still uses the folder on a machine under load, the reaper continues alone.
        with contextlib.suppress(subprocess.TimeoutExpired):
            reaper.communicate("bye", timeout=_END_TIMEOUT_S)
        reap_adopted()
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
