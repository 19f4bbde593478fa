"""The one process of a node that forks keepers, and ends what a keeper that was killed has left.

It listens on an abstract socket, serves processes of its own user alone, and ends when it has kept
nothing for a while or what it watches is gone. Keepers are its children, and no children of a Ray
worker: Ray kills those first when it ends a worker. The server adopts what a killed keeper leaves.

Modules are imported before the first program that runs as a fork, which then finds them loaded. The
server only imports: a fork of a process in which torch has computed hangs (measured with torch
2.13: one product on two threads is enough). Standard library alone, apart from these modules.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from workers.keeper import processes
from workers.keeper.keeper import IGNORED, NAME, keep
from workers.keeper.task import Task, is_own

#: What `ps` calls a server; at most 15 bytes.
SERVER_NAME: Final = "keeper-server"

#: Seconds without a keeper after which a server ends.
IDLE_S: Final = 30.0

_LOOK_S: Final = 0.5

#: A client that connects sends its task at once.
_REQUEST_S: Final = 5.0


def serve(name: str, modules: Sequence[str], watched: tuple[int, str]) -> None:
    """Serve until nothing is to be kept any more.

    Return at once where another server has this name. `watched` is a process by id and start time.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
    except OSError:  # the name is the lock: the kernel gives it back when a server is gone
        return
    listener.listen(128)
    _leave_worker()
    keepers: set[int] = set()
    is_loaded, busy_s = False, time.monotonic()
    while True:
        is_asked = bool(select.select([listener], [], [], _LOOK_S)[0])
        keepers -= processes.reap().keys()
        processes.end_all(partial(_adopted, keepers), 0.0)
        busy_s = time.monotonic() if keepers else busy_s
        is_over = processes.start_time(watched[0]) != watched[1]
        if not keepers and (is_over or time.monotonic() - busy_s > IDLE_S):
            return
        request = _accept(listener) if is_asked else None
        if request is None:
            continue
        task, ends = request
        if task.module is not None and not is_loaded:
            is_loaded = True
            _load(modules)
        child = os.fork()
        if child == 0:
            listener.close()
            _be_keeper(task, *ends)
        keepers.add(child)
        for end in ends:
            os.close(end)


def _leave_worker() -> None:
    """Be no child of the worker that started this process, and no part of its session."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")  # a folder of the worker must not stay in use
    processes.prctl(processes.PR_SET_NAME, SERVER_NAME.encode(), 0, 0, 0)
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # A worker of Ray may ignore it, which its children inherit: how one ends would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("0")  # programs are to be chosen, not who keeps them


def _be_keeper(task: Task, news: int, channel: int | None = None) -> None:
    os.setsid()
    processes.prctl(processes.PR_SET_NAME, NAME.encode(), 0, 0, 0)
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        keep(task, socket.socket(fileno=news), channel)
    finally:
        processes.end_all(lambda: processes.below(os.getpid()), 0.0)
        os._exit(0)


def _accept(listener: socket.socket) -> tuple[Task, list[int]] | None:
    """Return a task with the sockets of its keeper and, if it has one, its program.

    `None` for a foreign client, and for one that was killed before it had sent all.
    """
    ends: list[int] = []
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError, ValueError, TypeError):
        connection.settimeout(_REQUEST_S)
        if is_own(connection):
            _, ends, _, _ = socket.recv_fds(connection, 1, 2)
            with connection.makefile("rb") as file:
                return Task.of(file.read()), ends
    for end in ends:
        os.close(end)
    return None


def _adopted(keepers: set[int]) -> list[int]:
    """Return what lost its keeper, with what is below it."""
    orphans = [
        pid
        for pid in processes.children(os.getpid())
        if pid not in keepers and processes.start_time(pid) is not None
    ]
    return [*orphans, *(below for pid in orphans for below in processes.below(pid))]


def _load(modules: Sequence[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # the program says what is wrong with it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy these pages
