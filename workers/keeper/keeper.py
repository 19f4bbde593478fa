"""Starts one program, tells how it ended, and leaves nothing of it behind. Standard library alone.

A keeper is a process with one thread, forked by the server of its node. The program is its child,
in a session of its own; the kernel ends it with the keeper. The keeper adopts what loses its parent
below it. It ends all of them when the program has ended, when it is told to, when a process that it
watches is gone, and when it hears no order for the program's lease.

The server is one process of a node. It listens on an abstract socket, serves processes of its own
user alone, ends what a keeper that was killed has left, and ends when it has kept nothing for a
while or what it watches is gone. Keepers are its children, and no children of a Ray worker: Ray
kills those first when it ends a worker. Modules are imported before the first program that runs as
a fork, which then finds them loaded. The server only imports: a fork of a process in which torch
has computed hangs (measured with torch 2.13: one product on two threads is enough).

Does not judge why a program ended, and caps nothing: programs do so themselves.
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

#: What `ps` calls a keeper, and a server; at most 15 bytes.
NAME: Final = "job-keeper"
SERVER_NAME: Final = "keeper-server"

#: Ignored by servers and keepers; the program gets them as usual.
IGNORED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)

#: Between SIGTERM and SIGKILL, at most, where the worker is gone; and what a program leaves running
#: has so long to end after it.
_ALONE_GRACE_S: Final = 5.0
_LEFT_GRACE_S: Final = 2.0

#: The keeper before is given so long to end what it kept in the same place.
_LOCK_S: Final = 30.0

_LONGEST_WAIT_S: Final = 1.0

#: Added to the log of a program that ends because no order came.
_UNHEARD: Final = (
    "orchestrator: no word from the head for {:.0f} s, in which the job may have begun on "
    "another PC: ended\n"
)

#: Seconds without a keeper after which a server ends.
_IDLE_S: Final = 30.0

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


def keep(task: Task, news: socket.socket, channel: int | None) -> None:
    """Start the program and stay until nothing of it is left.

    `news` leads to the worker; `channel` is the program's end of its own socket to the worker.
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
    # Told first: what a program has left may take seconds to end.
    _tell_printed(news, log)
    tail, left = log.tail.decode("utf-8", "replace"), len(processes.below(os.getpid()))
    send(news, {"ended": status, "tail": tail, "left": left})
    grace_s = 0.0 if was_alone else min(_LEFT_GRACE_S, task.grace_s)
    processes.end_all(lambda: processes.below(os.getpid()), grace_s)
    lock.close()


class _Watch:
    """The keeper's loop over everything that it waits for."""

    def __init__(self, task: Task, news: socket.socket, log: Log, program: int) -> None:
        self._task, self._news, self._log, self._program = task, news, log, program
        self._is_alone = False
        """Whether the worker is gone, or the head was not heard for the lease."""
        self._is_ending = False
        self._kill_at_s = float("inf")
        self._heard_s = _with_sleep_s()
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
        """Return how the program ended, and whether its worker was gone."""
        while True:
            grace_s = self._take_news()
            lease_s = self._task.lease_s
            if lease_s is not None and not self._is_alone:
                self._is_alone = _with_sleep_s() - self._heard_s > lease_s
                if self._is_alone:
                    self._log.append(_UNHEARD.format(lease_s).encode())
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

    def _take_news(self) -> float | None:
        """Wait for something; return the seconds of grace of an order to end."""
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
                self._heard_s = _with_sleep_s()
                for order in orders:
                    grace_s = order.get("end", grace_s)
                if any("on" in order for order in orders):
                    self._log.pump()
                    _tell_printed(self._news, self._log)
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
            os.killpg(self._program, signal.SIGCONT)  # a stopped process would not see it
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + grace_s)


def _start(task: Task, log: Log, channel: int | None) -> int:
    """Start the program in a session of its own; return its id."""
    if task.module is not None:
        return _fork(task, task.module, log, channel)
    keeper = os.getpid()

    def prepare() -> None:
        _become_program(keeper)

    process = subprocess.Popen(  # noqa: S603 - what it is for
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
    # It is waited for by its id. Without a return code, dropping this object would take the status
    # of a program that has ended already.
    process.returncode = 0
    return process.pid


def _fork(task: Task, module: str, log: Log, channel: int | None) -> int:
    """Run a module of this product in a fork of this process; return its id."""
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
        _draw_anew()
        sys.argv = list(task.argv[1:])
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _draw_anew() -> None:
    """Have this fork draw other random numbers than its siblings, of the libraries that are there.

    `random` does so by itself.
    """
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _become_program(keeper: int) -> None:
    """Undo what a keeper and Ray have set, and end with the keeper."""
    for number in (*IGNORED, signal.SIGQUIT):  # a shell has it ignored in the background
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT
    with contextlib.suppress(OSError):  # before anything else the kernel is to choose programs
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:  # it ended before this was asked for
        os._exit(os.EX_UNAVAILABLE)


def _tell_printed(news: socket.socket, log: Log) -> None:
    text, dropped_bytes = log.take()
    send(news, {"printed": text, "dropped_bytes": dropped_bytes})


def _with_sleep_s() -> float:
    """Return seconds that count while the PC is suspended, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
