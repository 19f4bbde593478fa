"""NVIDIA's Multi-Process Service on this machine: whether it can work, its control daemon, and what
a client gets.

Covers starting, asking and ending a control daemon by its own pipe directory and process id. Does
not decide whether a run wants it. The commands and variables are those of
docs.nvidia.com/deploy/mps.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from workers.host.processes import is_alive, start_time
from workers.nvml.queries import CardIdentity
from workers.units import MIB

CONTROL: Final = "nvidia-cuda-mps-control"
#: The default pipe directory of client and daemon.
DEFAULT_PIPES: Final = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's own default

#: The daemon writes its process id here, below its pipe directory, once it listens.
_PID_FILE: Final = "nvidia-cuda-mps-control.pid"
_PREFIX: Final = "orch-mps-"
#: Unix socket paths end at 107 bytes; the daemon puts at most 24 of its own behind its pipe
#: directory.
_LONGEST_FOLDER: Final = 80

#: Limits for single clients came with Volta.
_FIRST_WITH_LIMITS: Final = (7, 0)
#: nvmlComputeMode_t.
_PROHIBITED: Final = 2

_ANSWER_S: Final = 10.0
#: The head waits for it before it ends a process.
_CLIENT_S: Final = 2.0
_START_S: Final = 15.0
#: A daemon that gets `quit` waits for its clients; the workers of a run have been ended by then.
_QUIT_S: Final = 10.0
_END_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.05


#: Daemons that this process has started, to be reaped by it.
_children: dict[int, subprocess.Popen[bytes]] = {}


class MpsError(Exception):
    """MPS cannot be used; a sentence with the cause and what helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A control daemon that we have started."""

    folder: str
    """Private; holds its pipes and its logs."""
    pid: int | None = None
    """`None` while it is being started."""
    started: str | None = None

    @property
    def pipe_directory(self) -> str:
        """Where its clients find it."""
        return str(Path(self.folder) / "pipe")


def client_environment(
    pipe_directory: str, thread_share: float | None, memory_limit_bytes: int | None
) -> dict[str, str]:
    """Return what a client must have in its environment before CUDA starts.

    Args:
        pipe_directory: Of the daemon.
        thread_share: Share of the card's multiprocessors it may use; a ceiling, no reservation.
        memory_limit_bytes: What it may allocate on its card through CUDA, CUDA's own allocations
        counted in. Rounded
            up to whole MiB, the smallest unit there is. Its card is number 0: a worker sees no
            other.
    """
    environment = {"CUDA_MPS_PIPE_DIRECTORY": pipe_directory}
    if thread_share is not None:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * thread_share:g}"
    if memory_limit_bytes is not None:
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = (
            f"0={math.ceil(memory_limit_bytes / MIB)}M"
        )
    return environment


def obstacle(*, system: str, kernel: str, cards: Sequence[CardIdentity]) -> str | None:
    """Return why MPS cannot work with these cards under such a system and kernel release.

    `None` if it is not known.
    """
    if system != "linux" or "microsoft" in kernel.lower():
        return f"MPS runs on Linux only, and this is {'WSL2' if system == 'linux' else system}"
    if not cards:
        return "there is no card for MPS to share"
    if shutil.which(CONTROL) is None:
        return (
            f"{CONTROL} is not on the PATH; it comes with the driver (on Ubuntu: "
            "nvidia-compute-utils-NNN)"
        )
    for card in cards:
        if card.compute_capability is not None and card.compute_capability < _FIRST_WITH_LIMITS:
            return f"{card.name} is older than Volta: MPS cannot limit single workers on it"
        if card.compute_mode == _PROHIBITED:
            return (
                f"{card.name} is in compute mode PROHIBITED; type: sudo nvidia-smi -i "
                f"{card.index} -c DEFAULT"
            )
    return None


def running() -> str | None:
    """Return the pipe directory of a daemon that another program has started and that answers, if
    there is one.
    """
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPES
    return pipes if _answers(pipes) else None


def new_daemon(name: str) -> Daemon:
    """Return where an own daemon would be.

    The same name, of letters, digits and hyphens, leads to the same place.
    """
    usual = tempfile.gettempdir()
    longest = _LONGEST_FOLDER - len(_PREFIX) - len(name) - len("/pipe/")
    above = usual if len(usual) <= longest else "/tmp"  # noqa: S108 - the folder in it is private
    return Daemon(folder=str(Path(above) / f"{_PREFIX}{name}"))


def start(daemon: Daemon) -> Daemon:
    """Start a daemon in its folder, wait until it answers, and return it with its process id.

    It stays a child of this process, and outlives it.

    Raises:
        MpsError: It did not come up; nothing of it is left.
    """
    pipes = Path(daemon.pipe_directory)
    folder, logs = pipes.parent, pipes.with_name("log")
    try:
        for private in (folder, pipes, logs):
            private.mkdir(mode=0o700)
        # NVIDIA's program, found by name as its documents say.
        process = subprocess.Popen(  # noqa: S603
            [CONTROL, "-f"],
            env={**_environment(str(pipes)), "CUDA_MPS_LOG_DIRECTORY": str(logs)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except FileExistsError:
        raise MpsError(f"{folder} is in use by another run; try again when it has ended") from None
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise MpsError(f"{CONTROL} could not be started: {error}") from None
    _children[process.pid] = process
    started = Daemon(folder=daemon.folder, pid=process.pid, started=start_time(process.pid))
    if (
        _wait_for(lambda: process.poll() is not None or _answers(str(pipes)), _START_S)
        and process.poll() is None
    ):
        return started
    why = (
        f"ended with status {process.returncode}"
        if process.poll() is not None
        else "does not answer"
    )
    said: list[str] = []
    with contextlib.suppress(OSError):
        said = (
            (logs / "control.log")
            .read_text(encoding="utf-8", errors="replace")
            .strip()
            .splitlines()
        )
    end(started)
    raise MpsError(f"{CONTROL} {why}" + (f": {said[-1].strip()[:200]}" if said else ""))


def end(daemon: Daemon) -> None:
    """End a daemon of ours by its own pipe directory, else by its process id, and remove its
    folder.
    """
    if daemon.pid is None:  # the agent that started it was killed before it could note the process
        with contextlib.suppress(OSError, ValueError):
            pid = int((Path(daemon.pipe_directory) / _PID_FILE).read_text(encoding="ascii"))
            daemon = replace(daemon, pid=pid, started=start_time(pid))
    servers: list[psutil.Process] = []
    if daemon.pid is not None and is_alive(daemon.pid, daemon.started):
        with contextlib.suppress(psutil.Error):
            servers = psutil.Process(daemon.pid).children(recursive=True)
        _tell(daemon.pipe_directory, "quit", _QUIT_S)
        for force in (signal.SIGTERM, signal.SIGKILL):
            if _is_gone(daemon, _END_S):
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon.pid, force)
    _is_gone(daemon, _END_S)
    for server in servers:
        with contextlib.suppress(
            psutil.Error
        ):  # compares the time of its start: never another process
            server.kill()
    shutil.rmtree(daemon.folder, ignore_errors=True)


def end_client(pipe_directory: str, pid: int) -> bool:
    """Have the daemon end a client before its process is killed; say whether a server took the
    command.

    A client that dies while it computes can end the other clients of its server with it
    (docs.nvidia.com/deploy/mps, "Client Early Termination").
    """
    servers = _ask(pipe_directory, "get_server_list", _CLIENT_S) or ""
    commands = (
        f"terminate_client {server} {pid}" for server in servers.split() if server.isdigit()
    )
    # Tells every server.
    return any([_tell(pipe_directory, command, _CLIENT_S) for command in commands])  # noqa: C419


def await_daemon(pipe_directory: str, patience_s: float) -> None:
    """Wait until the daemon of a pipe directory is there: a client that does not find one runs
    without any limit.

    Raises:
        MpsError: It does not come.
    """
    if not _wait_for((Path(pipe_directory) / _PID_FILE).exists, patience_s):
        raise MpsError(f"the MPS control daemon in {pipe_directory} is gone")


def _wait_for(ask: Callable[[], bool], within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    while not (answer := ask()) and time.monotonic() <= until_s:
        time.sleep(_LOOK_EVERY_S)
    return answer


def _answers(pipe_directory: str) -> bool:
    return (Path(pipe_directory) / _PID_FILE).exists() and _tell(
        pipe_directory, "get_server_list", _ANSWER_S
    )


def _tell(pipe_directory: str, command: str, timeout_s: float) -> bool:
    """Give the daemon a command; say whether it took it."""
    return _ask(pipe_directory, command, timeout_s) is not None


def _ask(pipe_directory: str, command: str, timeout_s: float) -> str | None:
    """Give the daemon a command and return what it answers; `None`: it did not take it."""
    try:
        done = subprocess.run(  # noqa: S603 - NVIDIA's program, found by name as its documents say
            [CONTROL],
            input=f"{command}\n",
            env=_environment(pipe_directory),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    is_taken = done.returncode == 0 and "Cannot find MPS" not in done.stdout + done.stderr
    return done.stdout if is_taken else None


def _environment(pipe_directory: str) -> dict[str, str]:
    """Return this process's environment without what would limit or renumber the cards for every
    client.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if name != "CUDA_VISIBLE_DEVICES" and not name.startswith("CUDA_MPS_")
    }
    return {**own, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_MPS_PIPE_DIRECTORY": pipe_directory}


def _is_gone(daemon: Daemon, within_s: float) -> bool:
    pid = daemon.pid
    if pid is not None:
        if not _wait_for(lambda: not is_alive(pid, daemon.started), within_s):
            return False
        child = _children.pop(pid, None)
        if child is not None:
            child.wait()
    return True
