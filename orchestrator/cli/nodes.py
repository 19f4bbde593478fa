"""The verbs `up` and `stop` on this PC: find the head's address, start and keep a node, end runs
and nodes.

Finds processes by the process id in a run folder and by the environment variable that `up` sets,
and ends them by process id. Does not ask Ray, and does not touch any other Ray on the machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import psutil

from orchestrator.cli.loading import RunsOptions
from orchestrator.cluster import ray_programs
from orchestrator.cluster.connect import reach
from orchestrator.config.schema import Config
from orchestrator.core.node_commands import NODE_MARK, NodeCommand, node_command
from orchestrator.errors import NoClusterError, UsageError, one_line
from orchestrator.record.archive import NOTE_NAME, head_of
from orchestrator.run.terminal import Interrupts
from workers.card_settings import put_back_left
from workers.keeper import processes

#: Time for processes to end by themselves before they are killed.
_GRACE_S = 10.0

#: With `--stay`: the interval of checks, and the pause before the node is started again.
_CHECK_EVERY_S, _PAUSE_S = 1.0, 5.0
#: A head that did not answer for this long considers the node dead. A head that refuses a
#: connection has ended.
_AWAY_S = 60.0
#: `up --stay` ends the same processes as `stop --node` does, and must finish within its `_GRACE_S`.
_KEEPER_GRACE_S = 4.0

#: Name of the head's process that stores the state of the cluster.
_STORE = "gcs_server"

#: Time for a run to write its summary and end its processes, after its last steps.
_SUMMARY_S = 30.0

#: Process id -> start time (`processes.start_time`), because the kernel reuses ids.
StartTimes: TypeAlias = Mapping[int, str]

_HOW_TO_GET_IT = (
    "this PC has no token, the secret of the cluster: copy ~/.ray/auth_token from the head's PC "
    "to the same place here, readable by you alone; on the head make ~/.ray writable for yourself"
)


def command_for(config: Config, node: str, head_address: str | None) -> NodeCommand:
    """Return the command that makes `node` part of the cluster, with the head's address.

    The address is the user's, else `cluster.address`, else the head's `host`, else the address of
    this PC, because users mostly type `up` on the head, for every PC.
    """
    address = head_address or (config.cluster.address if config.cluster.address != "auto" else None)
    address = address or config.nodes[config.head_node].host or _own_address()
    if address.count(":") > 1 and not address.startswith("["):  # IPv6 without a port
        address = f"[{address}]"
    has_port = ":" in address and address.rpartition(":")[2].isdigit()
    return node_command(config, node, address if has_port else f"{address}:{config.cluster.port}")


def execute(command: NodeCommand) -> int:
    """Run the token steps and `ray start`; return its exit status.

    `UsageError`: Ray is not installed, or there is no token.
    """
    argv, environment = ray_start(command)
    get_token(command)
    return subprocess.run(argv, env=environment, check=False).returncode  # noqa: S603


def get_token(command: NodeCommand) -> None:
    """Run the token steps, which print why they fail; `UsageError` if one fails."""
    # The steps contain nothing that the user typed but the head's address, which is quoted.
    for step in command.token_steps:
        if not step.startswith("#"):
            shell = ["/bin/sh", "-c", step]
            done = subprocess.run(shell, env=_path_with_ray(), check=False)  # noqa: S603
            if done.returncode != 0:
                raise UsageError(f"{_HOW_TO_GET_IT}. What has failed (see above):\n{step}")


def ray_start(command: NodeCommand) -> tuple[list[str], dict[str, str]]:
    """Return a command that runs `ray start` without waiting for an agent, and its environment.

    `UsageError`: Ray is not installed.
    """
    ray = shutil.which(command.argv[0], path=_path_with_ray()["PATH"])
    if ray is None:
        raise UsageError(
            "the command `ray` is not installed beside this Python; install ray, then try again"
        )
    program = [sys.executable, "-m", ray_programs.__name__, "ray", ray]
    return [*program, *command.argv[1:]], {**_path_with_ray(), **command.environment}


def keep(command: NodeCommand) -> int:
    """Run `ray start --block`, and again whenever the node has ended, until Ctrl-C, SIGTERM or
    `stop --node`; then end the node, and return the exit code.

    A raylet of Ray 2.60 never ends by itself if its head has ended and started a new cluster (ray
    issue 64349). Therefore the node is started again after its head was away. This process has the
    mark of the node as well, so that `stop --node` ends both. `UsageError`: the node runs already,
    there is no token, or Ray is not installed.
    """
    node = command.environment[NODE_MARK]
    if os.environ.get(NODE_MARK) != node:  # start again, so that /proc shows the mark
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, again, {**os.environ, NODE_MARK: node})  # noqa: S606
    if family := processes_of(node):
        raise UsageError(
            f"{node} runs here already (process {min(family)}); to end it: python -m orchestrator "
            f"stop --node {node}"
        )
    get_token(command)
    interrupts, last = Interrupts(), ""
    interrupts.install()
    try:
        while not interrupts.asked:
            if away := _away(command):
                why = f"waits: {away}"
            else:
                _say(node, "starting")
                why = _run_once(command, interrupts)
                end(processes_of(node), _KEEPER_GRACE_S)  # a worker may still hold its card
            if why != last:
                _say(node, why)
            last, until_s = why, time.monotonic() + _PAUSE_S
            while not interrupts.asked and time.monotonic() < until_s:
                time.sleep(_CHECK_EVERY_S / 5)
    finally:
        end(processes_of(node), _KEEPER_GRACE_S)
        interrupts.restore()
    return 130


def _run_once(command: NodeCommand, interrupts: Interrupts) -> str:
    """Start the node, wait until it must be started again, and return the reason."""
    argv, environment = ray_start(command)
    started = subprocess.Popen(  # noqa: S603 - the command that `up` prints
        [*argv, "--block"],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends it
    )
    had_raylet, answered_s, has_refused = False, time.monotonic(), False
    while not interrupts.asked:
        time.sleep(_CHECK_EVERY_S)
        # If its raylet was asked to end, `ray start --block` regards that as success and blocks on.
        has_raylet = "raylet" in map(processes.name_of, processes.below(started.pid))
        if started.poll() is not None or (had_raylet and not has_raylet):
            return "Ray has ended on this PC"
        had_raylet = has_raylet
        if away := _away(command):
            has_refused |= isinstance(away.__cause__, ConnectionRefusedError)
        elif has_refused or time.monotonic() - answered_s > _AWAY_S:
            return "its head was away"
        else:
            answered_s = time.monotonic()
    return "asked to end"


def _away(command: NodeCommand) -> NoClusterError | None:
    """Return why the head cannot be reached; `None` if it can, or if this node is the head's."""
    try:
        if not command.is_head:
            reach(command.head_address)
    except NoClusterError as error:
        return error
    return None


def _say(node: str, text: str) -> None:
    with suppress(OSError):  # the reader of the output may have gone
        line = one_line(f"{time.strftime('%H:%M:%S')} {node}: {text}")
        print(line, flush=True)  # noqa: T201 - the terminal, or a log


def stop(where: RunsOptions, node: str | None) -> Iterator[str]:
    """Restore the card settings that killed runs have changed, end the running runs, then end the
    Ray node `node` if one is named. Yield a line for each action.

    `UsageError`: there is nothing to restore or to end.
    """
    put_back = put_back_left()
    yield from put_back
    loaded = where.load_or_shipped()
    if node is not None and node not in loaded.nodes and not processes_of(node):
        raise UsageError(
            f"no process of a node {node!r} runs here, and {where.config} has no such node; valid: "
            f"{', '.join(loaded.nodes)}"
        )
    settings = loaded.run
    ends_s = 3 * settings.poll_s + settings.stop_grace_s + _SUMMARY_S
    try:
        yield from stop_runs(settings.dir, wait_s=0.0 if node is None else ends_s)
    except UsageError as none_there:
        if node is None and not put_back:
            raise
        yield str(none_there)
    if node is not None:
        yield from stop_node(node)


def stop_runs(run_dir: str, *, wait_s: float = 0.0) -> Iterator[str]:
    """Ask every running run in `run_dir` to end, as Ctrl-C would, and wait up to `wait_s` for them.

    Yield a line for each. `UsageError`: no run is running there, or the folder cannot be read.
    """
    try:
        folders = sorted(note.parent for note in Path(run_dir).glob(f"*/{NOTE_NAME}"))
    except OSError as error:
        raise UsageError(f"--run-dir {run_dir} cannot be read: {error.strerror}") from None
    heads = {folder.name: head for folder in folders if (head := head_of(folder)) is not None}
    if not heads:
        raise UsageError(
            f"no run is under way in {Path(run_dir).absolute()}; --run-dir names another folder"
        )
    asked: dict[int, str] = {}
    for name, head in heads.items():
        began = processes.start_time(head.pid) or ""
        try:
            head.send_signal(signal.SIGINT)
            asked[head.pid] = began
            yield f"asked run {name} (process {head.pid}) to end"
        except psutil.Error as error:
            yield f"run {name} cannot be asked to end: {error}"
    if wait_s > 0 and asked:
        yield f"waiting up to {wait_s:.0f} s until it has ended"
        _await_end(asked, wait_s)
        left = still_running(asked)
        yield from (f"run {name} has not ended" for name, head in heads.items() if head.pid in left)


def stop_node(node: str) -> Iterator[str]:
    """End the Ray processes on this PC that `up NODE` started, with their children.

    Yield a line for each.
    """
    family = processes_of(node)
    if not family:
        yield f"no process of node {node} runs here"
        return
    yield (
        f"ending {len(family)} processes of node {node}; those that still run after "
        f"{_GRACE_S:.0f} s are killed"
    )
    end(family, _GRACE_S)
    yield f"ended {len(family)} processes of node {node}"


def processes_of(node: str) -> StartTimes:
    """Return the processes that `up NODE` started on this PC, with their children, except this one.

    A container may have a node of the same name. Its processes are visible from outside, but belong
    to another PID namespace, and are left out.
    """
    found: set[int] = set()
    here = Path("/proc/self/ns/pid").readlink()
    for pid in processes.marked(NODE_MARK, node):
        with suppress(OSError):  # the process has ended
            if Path(f"/proc/{pid}/ns/pid").readlink() == here:
                found |= {pid, *processes.below(pid)}
    began = {pid: processes.start_time(pid) for pid in found - {os.getpid()}}
    return {pid: at for pid, at in began.items() if at is not None}


def end(family: StartTimes, grace_s: float) -> None:
    """Send SIGTERM to processes, and SIGKILL to those that do not end within `grace_s`.

    The head's store gets its SIGTERM after the others have ended. If all got it at once, the store
    and its raylet would wait for each other until they are killed (Ray 2.60; 10 s instead of 1 s).
    """
    stores = {pid: began for pid, began in family.items() if processes.name_of(pid) == _STORE}
    others = {pid: began for pid, began in family.items() if pid not in stores}
    terminate, kill = signal.SIGTERM, signal.SIGKILL
    for group, number in ((others, terminate), (stores, terminate), (family, kill)):
        processes.send(still_running(group), number)
        _await_end(group, grace_s)


def still_running(family: StartTimes) -> list[int]:
    """Return the ids of the processes that still run. Zombies do not count: in a container, their
    parent often does not reap them.
    """
    return [pid for pid, began in family.items() if processes.start_time(pid) == began]


def _await_end(family: StartTimes, patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s and still_running(family):
        time.sleep(0.05)


def _path_with_ray() -> dict[str, str]:
    """Return this environment, with the folder of this Python's scripts first in PATH."""
    scripts = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}


def _own_address() -> str:
    """Return the address at which other PCs of the LAN reach this one.

    Sends no packet: to connect a UDP socket only chooses a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # TEST-NET-2 (RFC 5737): an unassigned address
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
