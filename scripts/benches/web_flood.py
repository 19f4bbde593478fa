"""Whether the page answers while a program without a login holds connections and sends what is no
HTTP.

The head is the real supervisor on a scripted fleet (`head.py`), `web` the real command; all over
loopback. A third of the sockets has sent half of its headers, one third nothing, and one third a
whole request and then nothing. What the server closes is opened again, at most `_AGAIN_PER_S` a
second. Meanwhile the page is asked over new connections, and a page that has logged in follows the
stream.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil

from benches.common import Child, Result, percentile, progress
from benches.head import ScriptedFleet, scripted_nodes
from orchestrator.record.archive import read_run
from orchestrator.run.supervisor import Clock
from orchestrator.view.web.listener import tokens_dir
from workers.units import MIB

_ANSWER_MOST_S: Final = 1.0
_GROWTH_MOST_MIB: Final = 20.0
_AGAIN_PER_S: Final = 400
_PATIENCE_S: Final = 5.0
_RUN_ID: Final = "20260101-000000-0000"
_WARM_UP_S: Final = 4.0
_MALFORMED_MOST_S: Final = 60.0
_HALF: Final = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
_WHOLE: Final = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_MALFORMED: Final = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET / HTTP/9.x\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA b: c\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    (
        b"POST /api/v1/login HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: "
        b"chunked\r\n\r\nzz\r\n\r\n"
    ),
    (
        b"POST /api/v1/login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Encoding: gzip\r\nContent-Length: "
        b"4\r\n\r\nnope"
    ),
    b"\0" * 64 + b"\r\n\r\n",
)


#: A user's shell allows 1,024 descriptors, and more on request.
_LIMITED: Final = ("bash", "-c", 'ulimit -S -n 1024; exec "$@"', "web")


class _TimedFleet(ScriptedFleet):
    """Also takes the time of the turns, without that of the script."""

    _left_s: float | None = None

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - as its base
        super().__init__(*arguments)
        self.turns_s: list[float] = []

    def wait(self, timeout_s: float) -> Any:  # noqa: ANN401 - as its base
        if self._left_s is not None:
            self.turns_s.append(time.monotonic() - self._left_s)
        outcomes = super().wait(timeout_s)
        self._left_s = time.monotonic()
        return outcomes


def head(pipe: Connection, folder: Path, workers: int) -> None:
    """Run a head.

    Each line in the pipe is answered by its processor time and its turns since the last line.
    """
    from benches.heads import supervise

    config, plans = scripted_nodes(workers)
    clock = Clock()
    fleet: Any = _TimedFleet(plans, clock)

    def is_over() -> bool:
        if pipe.poll():
            try:
                pipe.recv()
            except EOFError:
                return True
            turns_s, fleet.turns_s = fleet.turns_s, []
            pipe.send((time.process_time() - fleet.script_s, turns_s))
        return False

    supervise(config, plans, fleet, folder, config.run.duration_s, interrupted=is_over, clock=clock)


class _Server:
    """The command `web`, with what it writes to its terminal in a file."""

    def __init__(self, folder: Path) -> None:
        config = Path(__file__).parents[2] / "cluster.yaml"
        command = [
            sys.executable,
            "-m",
            "orchestrator",
            "web",
            folder.name,
            "--port",
            "0",
            "--config",
            str(config),
        ]
        command += ["--run-dir", str(folder.parent)]
        self._printed = folder.parent / "web.err"
        with self._printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [*_LIMITED, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=printed,
            )
        first = b"" if self.process.stdout is None else self.process.stdout.readline()
        found = re.search(rb"127\.0\.0\.1:([0-9]+)", first)
        if found is None:
            raise RuntimeError("`web` has told no address")
        self.port = int(found[1])
        token = (tokens_dir() / "read.token").read_text(encoding="ascii").strip()
        self.headers = {"Authorization": f"Bearer {token}"}

    @property
    def printed(self) -> bytes:
        return self._printed.read_bytes()

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class _Questions:
    """Asks the page over new connections all the time, and counts the frames of a page that
    follows.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self.took_s: list[float] = []
        self.failures: Counter[str] = Counter()
        self.frames = 0
        self._threads = [
            threading.Thread(target=body, daemon=True) for body in (self._ask, self._follow)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._ended.is_set():
            for path in ("/", "/app.js", "/api/v1/run"):
                began_s = time.monotonic()
                try:
                    with closing(
                        http.client.HTTPConnection(
                            "127.0.0.1", self._server.port, timeout=_PATIENCE_S
                        )
                    ) as to:
                        to.request("GET", path, headers=self._server.headers)
                        answer = to.getresponse()
                        answer.read()
                        if answer.status != 200:
                            self.failures[f"status {answer.status}"] += 1
                except (OSError, http.client.HTTPException) as error:
                    self.failures[type(error).__name__] += 1
                self.took_s.append(time.monotonic() - began_s)
            self._ended.wait(0.05)

    def _follow(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port)
            connection.request("GET", "/api/v1/stream", headers=self._server.headers)
            answer = connection.getresponse()
            while not self._ended.is_set() and answer.read1(65_536):
                self.frames += 1

    def close(self) -> None:
        self._ended.set()
        self._threads[0].join()


class _Slow:
    """Holds sockets that say little, and opens again what the server closes."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self._selector = selectors.DefaultSelector()
        self._opened = self.most_held = 0

    def hold(self, seconds: float) -> None:
        began_s = time.monotonic()
        while (now_s := time.monotonic()) < began_s + seconds:
            allowed = self._count + _AGAIN_PER_S * (now_s - began_s)
            while len(self._selector.get_map()) < self._count and self._opened < allowed:
                if not self._open():
                    break
            self.most_held = max(self.most_held, len(self._selector.get_map()))
            for key, _ in self._selector.select(0.02):
                self._read(key.data)

    def _open(self) -> bool:
        self._opened += 1
        opened = socket.socket()
        opened.settimeout(_PATIENCE_S)
        try:
            opened.connect(("127.0.0.1", self._port))
            opened.sendall((b"", _HALF, _WHOLE)[self._opened % 3])
        except OSError:
            opened.close()
            return False
        opened.setblocking(False)
        self._selector.register(opened, selectors.EVENT_READ, opened)
        return True

    def _read(self, opened: socket.socket) -> None:
        try:
            is_open = bool(opened.recv(65_536))
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        if not is_open:
            self._selector.unregister(opened)
            opened.close()

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()


def _send_malformed(port: int, count: int) -> int:
    """Send so many requests that are none, for a limited time, and return how many were answered or
    closed.
    """
    done, until_s = 0, time.monotonic() + _MALFORMED_MOST_S
    for number in range(count):
        if time.monotonic() > until_s:
            break
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as to,
        ):
            to.sendall(_MALFORMED[number % len(_MALFORMED)])
            to.shutdown(socket.SHUT_WR)
            while to.recv(65_536):
                pass
            done += 1
    return done


@contextlib.contextmanager
def _many_descriptors(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], count + 256), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def run(sockets: int, malformed: int, hold_s: float, workers: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent, _many_descriptors(sockets):
        folder = Path(parent) / _RUN_ID
        folder.mkdir()
        with closing(Child("the head", head, folder, workers)):
            time.sleep(_WARM_UP_S)
            with closing(_Server(folder)) as server:
                questions = _Questions(server)
                time.sleep(_WARM_UP_S)
                usual_s = list(questions.took_s)
                processes = {
                    "web": psutil.Process(server.process.pid),
                    "head": psutil.Process(read_run(folder).facts.head_pid),
                }
                before = {name: process.memory_info().rss for name, process in processes.items()}
                began_s, cpu_s = time.monotonic(), server.cpu_s()
                with closing(_Slow(server.port, sockets)) as slow:
                    slow.hold(hold_s)
                    progress(f"{slow.most_held} slow sockets held at once")
                    took_s = time.monotonic() - began_s
                    cpu_s = server.cpu_s() - cpu_s
                    answered = _send_malformed(server.port, malformed)
                after = {name: process.memory_info().rss for name, process in processes.items()}
                questions.close()
                printed = server.printed
    during_s = questions.took_s[len(usual_s) :]
    grown_mib = {name: (after[name] - before[name]) / MIB for name in before}
    tracebacks = printed.count(b"Traceback")
    figures = {
        "sockets": sockets,
        "held_at_once_most": slow.most_held,
        "malformed": malformed,
        "malformed_answered": answered,
        "questions": len(during_s),
        "questions_failed": sum(questions.failures.values()),
        "failures": ", ".join(f"{count} {name}" for name, count in questions.failures.items()),
        "answer_before_most_s": max(usual_s),
        "answer_p50_s": percentile(during_s, 0.5),
        "answer_p99_s": percentile(during_s, 0.99),
        "answer_most_s": max(during_s),
        "frames": questions.frames,
        "web_core_pct_while_held": 100 * cpu_s / took_s,
        "web_grown_mib": grown_mib["web"],
        "head_grown_mib": grown_mib["head"],
        "printed_bytes": len(printed),
        "tracebacks": tracebacks,
        "load": os.getloadavg()[0],
    }
    wrong = {
        f"a question took {max(during_s):.2f} s, more than {_ANSWER_MOST_S:g}": max(during_s)
        > _ANSWER_MOST_S,
        f"{sum(questions.failures.values())} questions had no answer": bool(questions.failures),
        f"{malformed - answered} malformed requests were neither answered nor closed": answered
        < malformed,
        f"{tracebacks} tracebacks on the terminal": tracebacks > 0,
        f"web and head grew by {grown_mib}": max(grown_mib.values()) > _GROWTH_MOST_MIB,
    }
    return Result(
        bench="web-flood",
        figures=figures,
        broken=[words for words, is_so in wrong.items() if is_so],
    )
