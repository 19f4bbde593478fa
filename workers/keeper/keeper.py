"""Starts one program, reports how it ended, and ends all of its processes. Standard library only.

A keeper is a single-threaded process, forked by the server of its node. The program is its child,
in a session of its own; the kernel ends the program with the keeper. The keeper is the subreaper of
all processes below it. It ends all of them when the program has ended, when the worker orders it,
when a watched process is gone, or when no order came for the lease of the program.

The server is one process per node. It listens on an abstract socket, serves only processes of its
own user, and ends the processes left by a killed keeper. It exits after it has kept nothing for a
while, or when its watched process is gone. Keepers are children of the server and not of a Ray
worker, because Ray kills a worker's children first. The server imports modules before the first
program that runs as a fork, which then finds them loaded. The server only imports: a fork of a
process in which torch has computed hangs (measured with torch 2.13: one product on two threads is
enough).

Does not judge why a program ended, and sets no memory cap: programs do so themselves.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from workers.files import locked
from workers.keeper import processes
from workers.keeper.channel import ClosedError, receive_all, send
from workers.keeper.log import Log
from workers.keeper.task import CHANNEL, MARK, Task, is_own

#: Process names of a keeper and a server, as `ps` shows them; at most 15 bytes.
NAME: Final = "job-keeper"
SERVER_NAME: Final = "keeper-server"

#: Signals that servers and keepers ignore; the program receives them as usual.
IGNORED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)

#: Longest time between SIGTERM and SIGKILL: for a program whose worker is gone, and for processes
#: that a program leaves running.
_ALONE_GRACE_S: Final = 5.0
_LEFT_GRACE_S: Final = 2.0

#: Longest wait for the previous keeper of the same place to end its processes.
_LOCK_S: Final = 30.0

_LONGEST_WAIT_S: Final = 1.0

#: Appended to the log of a program that ends because no order came for its lease.
_NO_ORDER: Final = (
    "orchestrator: ended, because there was no word from the head for {:.0f} s, in which the job "
    "may have begun on another PC\n"
)

#: Seconds without a keeper after which a server ends.
_IDLE_S: Final = 30.0

_POLL_S: Final = 0.5

#: Longest wait for the task of a client that has connected.
_REQUEST_S: Final = 5.0


def serve(name: str, modules: Sequence[str], watched: tuple[int, str]) -> None:
    """Serve until the server is idle or its watched process is gone.

    Return at once if another server has this name. `watched`: process id and start time.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
    except OSError:  # the name is the lock: the kernel releases it when a server is gone
        return
    listener.listen(128)
    _leave_worker()
    keepers: set[int] = set()
    is_loaded, busy_s = False, time.monotonic()
    while True:
        is_asked = bool(select.select([listener], [], [], _POLL_S)[0])
        keepers -= processes.reap().keys()
        processes.end_all(partial(_adopted, keepers), 0.0)
        busy_s = time.monotonic() if keepers else busy_s
        is_over = processes.start_time(watched[0]) != watched[1]
        if not keepers and (is_over or time.monotonic() - busy_s > _IDLE_S):
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
    """Detach this process from the worker that started it, and from its session."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")  # do not keep a folder of the worker in use
    processes.prctl(processes.PR_SET_NAME, SERVER_NAME.encode(), 0, 0, 0)
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # A Ray worker may ignore SIGCHLD, and children inherit that: wait statuses would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("0")  # the OOM killer must choose programs, not keepers


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
    """Return a task with the sockets for its keeper and, if it has a channel, its program.

    `None` for a client of another user, or one that was killed before it had sent everything.
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
    """Return the processes that lost their keeper, with their descendants."""
    orphans = [
        pid
        for pid in processes.children(os.getpid())
        if pid not in keepers and processes.start_time(pid) is not None
    ]
    return [*orphans, *(below for pid in orphans for below in processes.below(pid))]


def _load(modules: Sequence[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # the program will report the error
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy these pages


def keep(task: Task, news: socket.socket, channel: int | None) -> None:
    """Start the program, watch it, and return when none of its processes is left.

    `news` is the socket to the worker; `channel` is the program's end of its own socket to it.
    """
    lock = contextlib.ExitStack()
    try:
        own = {MARK: task.place} | ({} if channel is None else {CHANNEL: str(channel)})
        task = replace(task, env={**task.env, **own})
        lock.enter_context(locked(Path(task.place, "keeper.lock"), _LOCK_S))
        processes.end_all(lambda: processes.marked(MARK, task.place), 0.0)
        log = Log(os.path.join(task.place, "output.log"), task.log_bytes)  # noqa: PTH118
        program = _start(task, log, channel)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            text = ": ".join(filter(None, [error.strerror, error.filename]))
        send(news, {"refused": text[:500]})
        return
    finally:
        if channel is not None:
            os.close(channel)
    os.close(log.writing)
    send(news, {"started": program, "keeper": os.getpid()})
    status, was_alone = _Watch(task, news, log, program).until_end()
    while log.pump():
        pass
    # Reported first: the processes that a program has left may take seconds to end.
    _send_output(news, log)
    tail, left = log.tail.decode("utf-8", "replace"), len(processes.below(os.getpid()))
    send(news, {"ended": status, "tail": tail, "left": left})
    grace_s = 0.0 if was_alone else min(_LEFT_GRACE_S, task.grace_s)
    processes.end_all(lambda: processes.below(os.getpid()), grace_s)
    lock.close()


class _Watch:
    """Watches the program, its output, the worker's orders and other processes."""

    def __init__(self, task: Task, news: socket.socket, log: Log, program: int) -> None:
        self._task, self._news, self._log, self._program = task, news, log, program
        self._is_alone = False
        """Whether the worker or a watched process is gone, or no order came for the lease."""
        self._is_ending = False
        self._kill_at_s = float("inf")
        self._last_order_s = _boottime_s()
        self._poller = select.poll()
        self._watched = set()
        for pid, began in task.watch:
            with contextlib.suppress(ProcessLookupError):
                self._watched.add(watched := os.pidfd_open(pid))
                self._poller.register(watched, select.POLLIN)
            if processes.start_time(pid) != began:
                self._is_alone = True
        for ready in (news.fileno(), log.reading, os.pidfd_open(program)):
            self._poller.register(ready, select.POLLIN)

    def until_end(self) -> tuple[int, bool]:
        """Return the wait status of the program, and whether `_is_alone` was set."""
        while True:
            grace_s = self._next_event()
            lease_s = self._task.lease_s
            if lease_s is not None and not self._is_alone:
                self._is_alone = _boottime_s() - self._last_order_s > lease_s
                if self._is_alone:
                    self._log.append(_NO_ORDER.format(lease_s).encode())
            if self._is_alone and not self._is_ending:
                grace_s = min(_ALONE_GRACE_S, self._task.grace_s)
            if grace_s is not None:
                self._is_ending = True
                self._ask_to_end(grace_s)
            if time.monotonic() >= self._kill_at_s:
                all_below = processes.below(os.getpid())
                left = [pid for pid in all_below if not processes.tidies(pid)]
                processes.send(left, signal.SIGKILL)
            if (status := processes.reap().get(self._program)) is not None:
                return status, self._is_alone

    def _next_event(self) -> float | None:
        """Wait at most 1 s and handle events; return the grace (seconds) of an order to end."""
        grace_s = None
        wait_s = min(_LONGEST_WAIT_S, max(0.0, self._kill_at_s - time.monotonic()))
        for ready, event in self._poller.poll(wait_s * 1000):
            if ready == self._news.fileno():
                try:
                    orders = receive_all(self._news)
                except ClosedError:
                    self._is_alone = True
                    self._poller.unregister(ready)
                    continue
                self._last_order_s = _boottime_s()
                for order in orders:
                    grace_s = order.get("end", grace_s)
                if any("on" in order for order in orders):
                    self._log.pump()
                    _send_output(self._news, self._log)
            elif ready == self._log.reading:
                if not self._log.pump() and event & select.POLLHUP:
                    self._poller.unregister(ready)
            elif ready in self._watched:
                self._is_alone = True
                self._poller.unregister(ready)
        return grace_s

    def _ask_to_end(self, grace_s: float) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._program, signal.SIGTERM)
            os.killpg(self._program, signal.SIGCONT)  # a stopped process would not receive it
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + grace_s)


def _start(task: Task, log: Log, channel: int | None) -> int:
    """Start the program in its own session; return its process id."""
    if task.module is not None:
        return _fork(task, task.module, log, channel)
    keeper = os.getpid()

    def prepare() -> None:
        _become_program(keeper)

    process = subprocess.Popen(  # noqa: S603 - starts a user's program
        list(task.argv),
        env=dict(task.env),
        cwd=task.cwd,
        stdin=subprocess.DEVNULL,
        stdout=log.writing,
        stderr=log.writing,
        pass_fds=() if channel is None else (channel,),
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
    )
    # The keeper waits for the process id itself. Without a return code, deleting this object would
    # reap a program that has ended already.
    process.returncode = 0
    return process.pid


def _fork(task: Task, module: str, log: Log, channel: int | None) -> int:
    """Run a module of this product in a fork of this process; return its process id."""
    keeper = os.getpid()
    program = os.fork()
    if program != 0:
        return program
    code = os.EX_SOFTWARE
    try:
        os.setsid()
        _become_program(keeper)
        kept = {0: os.open(os.devnull, os.O_RDONLY), 1: log.writing, 2: log.writing}
        for target, source in kept.items():
            os.dup2(source, target)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) not in {0, 1, 2, channel}:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.environ.clear()
        os.environ.update(task.env)
        os.chdir(task.cwd)
        _reseed()
        sys.argv = list(task.argv[1:])
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exited:
        code = exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    except BaseException:  # noqa: BLE001 - prints as the interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reseed() -> None:
    """Seed the random generators of loaded libraries, so that forks draw different numbers.

    `random` does this by itself.
    """
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _become_program(keeper: int) -> None:
    """Reset the signals that the keeper and Ray have changed, and end with the keeper."""
    for number in (*IGNORED, signal.SIGQUIT):  # shells ignore SIGQUIT in the background
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT
    with contextlib.suppress(OSError):  # the OOM killer must choose programs first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:  # the keeper ended before prctl took effect
        os._exit(os.EX_UNAVAILABLE)


def _send_output(news: socket.socket, log: Log) -> None:
    text, dropped_bytes = log.take()
    send(news, {"printed": text, "dropped_bytes": dropped_bytes})


def _boottime_s() -> float:
    """Return the seconds since boot, including time in which the PC was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
