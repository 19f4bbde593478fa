"""A server process that imports torch once, in 1 to 2 s, and forks a child for each scenario.

A server can import more third-party modules, such as those of transformers, which take 3 s more. A
child behaves like a fresh `python -c CODE` that has imported them: its own session, folder,
environment, arguments and limits, no standard input, its output in files, and a normal end of the
interpreter. The server itself runs no operation of torch, because a pool of OpenMP threads does not
survive a fork. A separate keeper process watches each child, and ends it when the child's client
goes away.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any


class Child:
    """A forked process. Its output so far can be read at any time."""

    def __init__(self, connection: socket.socket, pid: int, out: IO[bytes], err: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._out, self._err = out, err

    def wait(self, patience_s: float) -> int:
        """Wait for the end, as long as the child computes; return its exit status, or the negative
        number of a signal.
        """
        if self.returncode is None:
            try:
                answer = _answer(self._connection, 16, self.pid, patience_s)
            except ConnectionResetError:  # the keeper ended before the child had read its request
                answer = b""
            assert answer, f"the fork server ended before its child {self.pid}"
            self.returncode = int(answer)
        return self.returncode

    def kill(self) -> None:
        """End the child and the processes that it started."""
        if self.returncode is None:
            _kill(self.pid)

    def close(self) -> None:
        """End the child and discard its output."""
        self.kill()
        for stream in (self._connection, self._out, self._err):
            stream.close()

    @property
    def out(self) -> str:
        """The standard output of the child so far."""
        return _whole(self._out)

    @property
    def err(self) -> str:
        """The standard error of the child so far."""
        return _whole(self._err)


def _answer(connection: socket.socket, most: int, pid: int, patience_s: float) -> bytes:
    """Wait for a message from a process, as long as the process computes."""
    from tests.scene import Patience, computed  # the server process cannot import it

    patience = Patience(lambda: computed(pid), patience_s)
    connection.settimeout(1.0)
    while not patience.is_over():
        with contextlib.suppress(TimeoutError):
            return connection.recv(most)
    raise subprocess.TimeoutExpired(f"process {pid}", patience_s)


def _kill(group: int) -> None:
    """Kill a process group, except the resource tracker of multiprocessing, which ends by itself
    after it has removed the semaphores of the killed processes from /dev/shm.
    """
    found = True
    while found:
        found = False
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes()  # empty for a process that has ended
                is_spared = not words or b"multiprocessing.resource_tracker" in words
                if os.getpgid(int(path.name)) == group and not is_spared:
                    os.kill(int(path.name), signal.SIGKILL)
                    found = True


def _whole(stream: IO[bytes]) -> str:
    return os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size, 0).decode()


class ForkServer:
    """The client of a server, which starts with the first child."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(
        self,
        code: str,
        *arguments: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Fork a child that runs `code` as its main module; the caller must close it."""
        ours, theirs = socket.socketpair()
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        with theirs:
            socket.send_fds(
                self._connected(), [b"f"], [theirs.fileno(), out.fileno(), err.fileno()]
            )
        request = pickle.dumps(
            (code, arguments, str(cwd or Path.cwd()), dict(environment or os.environ))
        )
        ours.sendall(len(request).to_bytes(8) + request)
        assert self._process is not None
        # The server may still be importing torch on a busy machine.
        pid = int.from_bytes(_answer(ours, 8, self._process.pid, 240.0))
        return Child(ours, pid, out, err)

    def run(self, code: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run `code` to its end like `subprocess.run`, and end a child that hangs."""
        child = self.start(code, *arguments, **how)
        try:
            status = child.wait(240.0)
            return subprocess.CompletedProcess(
                ["-c", code, *arguments], status, child.out, child.err
            )
        except subprocess.TimeoutExpired as error:
            error.output, error.stderr = child.out, child.err
            raise
        finally:
            child.close()

    def close(self) -> None:
        """End the server."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait()

    def _connected(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), *self._modules],
                    # torch imports NumPy, whose OpenBLAS starts a thread for each further core.
                    # transformers reads HF_HUB_OFFLINE when it is imported.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        return self._control


def _serve(control: socket.socket) -> types.CodeType:
    """Fork a keeper for each client until the tests end. Returns only in a child, with the code
    that the child must run.
    """
    while True:
        _, received, _, _ = socket.recv_fds(control, 1, 3)
        if not received:
            os._exit(0)
        if os.fork() == 0:
            return _keep(socket.socket(fileno=received[0]), *received[1:])
        for copy in received:
            os.close(copy)


def _keep(client: socket.socket, out: int, err: int) -> types.CodeType:
    """Fork the child, send its exit status to the client, and end it if the client goes away."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        return _become(client, out, err)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)  # the child does the same; either may be first
    poll, process = select.poll(), os.pidfd_open(pid)
    poll.register(process, select.POLLIN)
    poll.register(client, 0)  # reports only a hang-up
    with contextlib.suppress(OSError):
        client.sendall(pid.to_bytes(8))
    if process not in dict(poll.poll()):
        _kill(pid)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(client: socket.socket, out: int, err: int) -> types.CodeType:
    """Make this fork look like a fresh process."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    with client.makefile("rb") as stream:
        size = int.from_bytes(stream.read(8))
        code, arguments, cwd, environment = pickle.loads(stream.read(size))  # noqa: S301 - from the tests
    client.detach()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.argv = ["-c", *arguments]
    sys.path[:] = [
        "",
        *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)),
        *_BASE_PATH,
    ]
    importlib.invalidate_caches()
    return compile(code, "<string>", "exec")


if __name__ == "__main__":
    import faulthandler
    import gc
    import warnings

    faulthandler.enable()
    _own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    _BASE_PATH = [entry for entry in sys.path if entry not in _own]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once if NumPy is not installed
        import torch

        for _name in sys.argv[2:]:
            importlib.import_module(_name)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    _threads = len(list(Path("/proc/self/task").iterdir()))
    assert _threads == 1, (
        f"torch {torch.__version__} or {sys.argv[2:]} has begun threads: a fork loses them"
    )
    gc.collect()
    gc.freeze()  # otherwise each collection in a child copies all pages of torch
    _code = _serve(socket.socket(fileno=int(sys.argv[1])))
    _main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(_code, vars(sys.modules["__main__"]))  # noqa: S102 - the purpose of this module
