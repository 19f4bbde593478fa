"""What it costs the head when a run is watched: by `top` on terminals, by pages, and by a scrape
each second.

The head is the real supervisor with its store, on a scripted fleet without Ray (`head.py`). Windows
without viewers, with them, and with stopped ones take turns, in another order each round; each
window's viewers are killed after it. A turn is the time from one question to the fleet to the next
one.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil

from benches.common import Child, Result, in_turn, percentile, progress
from benches.head import ScriptedFleet, scripted_nodes
from orchestrator.run.clock import Clock
from orchestrator.view.web.listener import tokens_dir

_TARGET_PCT: Final = 1.0
_TARGET_TURN_PCT: Final = 5.0
_WARM_UP_S: Final = 5.0
_PATIENCE_S: Final = 60.0
_SCREEN: Final = ("200", "60")
_READ_BYTES: Final = 65_536
RUN_ID: Final = "20260101-000000-0000"


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


class _Viewers:
    """The processes that watch, and the threads that read what they send."""

    def __init__(self, folder: Path, tops: int, pages: int) -> None:
        self._ended = threading.Event()
        self.read_bytes = 0
        command = [sys.executable, "-m", "orchestrator"]
        of_run = [
            "--config",
            str(Path(__file__).parents[2] / "cluster.yaml"),
            "--run-dir",
            str(folder.parent),
        ]
        self.processes: list[subprocess.Popen[bytes]] = []
        for _ in range(tops):
            mine, theirs = pty.openpty()
            screen = {
                **os.environ,
                "TERM": "xterm-256color",
                "COLUMNS": _SCREEN[0],
                "LINES": _SCREEN[1],
            }
            top = subprocess.Popen(
                [*command, "top", folder.name, *of_run],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=screen,
            )
            os.close(theirs)
            self.processes.append(top)
            self._start(self._read_terminal, mine)
        web = subprocess.Popen(
            [*command, "web", folder.name, "--port", "0", *of_run],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self.processes.append(web)
        first = b"" if web.stdout is None else web.stdout.readline()
        found = re.search(rb"127\.0\.0\.1:([0-9]+)", first)
        if found is None:
            raise RuntimeError("`web` has told no address")
        self._port = int(found[1])
        token = (tokens_dir() / "read.token").read_text(encoding="ascii").strip()
        self._headers = {"Authorization": f"Bearer {token}"}
        for _ in range(pages):
            self._start(self._read_page)
        self._start(self._scrape)

    def _start(self, body: Any, *arguments: object) -> None:  # noqa: ANN401 - any of the three
        threading.Thread(target=body, args=arguments, daemon=True).start()

    def _read_terminal(self, terminal: int) -> None:
        with contextlib.suppress(OSError):
            while content := os.read(terminal, _READ_BYTES):
                self.read_bytes += len(content)

    def _read_page(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._port)
            connection.request("GET", "/api/v1/stream", headers=self._headers)
            answer = connection.getresponse()
            while content := answer.read1(_READ_BYTES):
                self.read_bytes += len(content)

    def _scrape(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while not self._ended.wait(1.0):
                connection = http.client.HTTPConnection(
                    "127.0.0.1", self._port, timeout=_PATIENCE_S
                )
                connection.request(
                    "GET", "/metrics", headers={**self._headers, "Accept-Encoding": "gzip"}
                )
                self.read_bytes += len(connection.getresponse().read())
                connection.close()

    def cpu_s(self) -> float:
        """Return the processor time that all of them took so far."""
        times = [psutil.Process(process.pid).cpu_times() for process in self.processes]
        return sum(each.user + each.system for each in times)

    def send(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def close(self) -> None:
        """Kill them."""
        self._ended.set()
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def _watched(folder: Path, tops: int, pages: int, stopped: bool) -> Iterator[_Viewers | None]:
    if not tops + pages:
        yield None
        return
    with closing(_Viewers(folder, tops, pages)) as viewers:
        time.sleep(_WARM_UP_S)
        if stopped:
            viewers.send(signal.SIGSTOP)
        yield viewers


def run(workers: int, tops: int, pages: int, rounds: int, window_s: float) -> Result:
    windows: dict[str, list[dict[str, Any]]] = {"alone": [], "watched": [], "stopped": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = Path(parent) / RUN_ID
        folder.mkdir()
        with closing(Child("the head", head, folder, workers)) as supervised:
            time.sleep(_WARM_UP_S)

            def window(kind: str) -> None:
                counts = (0, 0) if kind == "alone" else (tops, pages)
                with _watched(folder, *counts, kind == "stopped") as viewers:
                    before_s = None if viewers is None else (viewers.cpu_s(), viewers.read_bytes)
                    supervised.send("begin")
                    began_s, (from_s, _) = time.monotonic(), supervised.receive(_PATIENCE_S)
                    time.sleep(window_s)
                    supervised.send("end")
                    until_s, turns_s = supervised.receive(_PATIENCE_S)
                    took_s = time.monotonic() - began_s
                    told = {
                        "core_pct": 100 * (until_s - from_s) / took_s,
                        "turn_p99_ms": 1e3 * percentile(turns_s, 0.99),
                    }
                    if viewers is not None and before_s is not None:
                        told["viewers_core_pct"] = 100 * (viewers.cpu_s() - before_s[0]) / took_s
                        told["viewers_kb_per_s"] = (viewers.read_bytes - before_s[1]) / took_s / 1e3
                windows[kind].append(told)
                progress(
                    f"{kind:>8}: "
                    + ", ".join(f"{name} {value:.2f}" for name, value in told.items())
                )

            for number in range(rounds):
                in_turn(number, {kind: partial(window, kind) for kind in windows})
    alone, watched, stopped = (_medians(told) for told in windows.values())
    more_pct = max(watched["core_pct"], stopped["core_pct"]) - alone["core_pct"]
    slower_pct = 100 * (
        max(watched["turn_p99_ms"], stopped["turn_p99_ms"]) / alone["turn_p99_ms"] - 1
    )
    figures = {
        "workers": workers,
        "tops": tops,
        "pages": pages,
        "rounds": rounds,
        "rows": [{"viewers": kind, **_medians(told)} for kind, told in windows.items()],
        "core_more_pct": more_pct,
        "turn_p99_more_pct": slower_pct,
        "target_core_more_pct": _TARGET_PCT,
        "target_turn_p99_more_pct": _TARGET_TURN_PCT,
        "target_met": more_pct <= _TARGET_PCT and slower_pct <= _TARGET_TURN_PCT,
        "load": os.getloadavg()[0],
    }
    return Result(bench="viewers", figures=figures)


def _medians(told: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in told) for name in told[0]}
