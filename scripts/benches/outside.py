"""Starts real runs of the real command and checks them from outside: counters, processes, and what
they leave behind.

Each broken property becomes a sentence. Changes nothing in a run, and judges no figure. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benches.common import ROOT
from orchestrator.errors import NothingStoredError
from orchestrator.record.archive import read_run
from orchestrator.record.store import reading
from workers.keeper.processes import PR_SET_CHILD_SUBREAPER, marked, prctl

#: Workers can import it because runs start in `ROOT`.
WITNESS = "scripts.benches.witness:Witness"
#: As in `witness.py`, which this module does not import because it loads torch.
_WITNESS_FOLDER = "ORCH_WITNESS_DIR"
_SHARED = "/dev/shm/"  # noqa: S108 - read, not written
#: Limit of the sentences that `leftovers` returns.
_SENTENCES_MOST = 20


class Scene:
    """Temporary folders for some runs, and a record of every process that the runs start."""

    def __init__(self) -> None:
        # Programs that a shell starts with `&` ignore Ctrl-C, and runs would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A process that a run leaves behind becomes a child of this process, which finds it.
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Short, because Ray's sockets are below it, and a path of a socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
        self.runs = self.folder / "runs"
        self.steps = self.folder / "steps"
        self.steps.mkdir()
        self._heads: list[subprocess.Popen[bytes]] = []
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._seen: dict[int, psutil.Process] = {}
        self._ports: set[int] = set()
        self._shared: set[Path] = set()

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `python -m orchestrator WORDS` with the shipped cluster.yaml.

        Its output goes to files.
        """
        number = len(self._heads)
        command = [sys.executable, "-m", "orchestrator", *words]
        command += ["--config", str(ROOT / "cluster.yaml"), "--run-dir", str(self.runs)]
        with (
            self._output(number, "json").open("wb") as out,
            self._output(number, "err").open("wb") as err,
        ):
            head = subprocess.Popen(
                command, cwd=ROOT, env=self.environment(), stdin=subprocess.DEVNULL, stdout=out,
                stderr=err,
            )  # fmt: skip
        self._heads.append(head)
        return head

    def environment(self) -> dict[str, str]:
        own = {
            "TMPDIR": self.folder, _WITNESS_FOLDER: self.steps,
            "ORCHESTRATOR_STATE_DIR": self.folder / "state",
        }  # fmt: skip
        return {**os.environ, **{name: str(path) for name, path in own.items()}}

    def ended(self, head: subprocess.Popen[bytes], within_s: float = 0.0) -> tuple[int | None, str]:
        """Wait for a run to end, or kill it; return its exit code (`None`: killed) and output."""
        deadline_s = time.monotonic() + within_s
        while head.poll() is None and time.monotonic() < deadline_s:
            self.look()
            time.sleep(0.2)
        code = head.poll()
        if code is None:
            head.kill()
            head.wait()
        number = self._heads.index(head)
        out, err = (
            self._output(number, name).read_text(encoding="utf-8") for name in ("json", "err")
        )
        return code, out or err

    def newest_run(self) -> Path | None:
        return max(self.runs.glob("*"), default=None)

    def look(self) -> list[psutil.Process]:
        """Return the live processes of the runs, record them, and reap those that have ended."""
        heads = {head.pid for head in self._heads}
        for child in psutil.Process().children():
            if child.pid not in heads | self._before and is_dead(child):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
        everything = psutil.Process().children(recursive=True)
        found = [child for child in everything if child.pid not in self._before]
        self._seen.update((child.pid, child) for child in found)
        return [child for child in found if not is_dead(child)]

    def note_traces(self) -> None:
        """Record the ports and the mapped files of /dev/shm that the runs use now.

        `leftovers` reports those that remain after the runs.
        """
        mine = {process.pid for process in self.look()}
        self._ports |= {port for port, pid in _listening() if pid in mine}
        self._shared |= {path for pid in mine for path in shared_files(pid)}

    def leftovers(self, within_s: float) -> list[str]:
        """Wait for ended runs to leave nothing; name what is left, and kill those processes."""
        left = within(within_s, self._left)
        for process in self._alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._ports.clear()
        self._shared.clear()
        return left[:_SENTENCES_MOST]

    def close(self, *, keep: bool) -> str | None:
        """End all runs; remove the folders, or keep them and return their path."""
        for head in self._heads:
            self.ended(head)
        self.leftovers(0.0)
        if keep:
            return str(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        return None

    def _output(self, number: int, name: str) -> Path:
        return self.folder / f"out-{number}.{name}"

    def _alive(self) -> list[psutil.Process]:
        self.look()
        for pid in marked("TMPDIR", str(self.folder)):  # also processes that are no descendants
            with contextlib.suppress(psutil.Error):
                self._seen.setdefault(pid, psutil.Process(pid))
        return [each for each in self._seen.values() if each.is_running() and not is_dead(each)]

    def _left(self) -> list[str]:
        alive = self._alive()
        return [
            *(f"process {process.pid} still lives: {called(process)[:200]}" for process in alive),
            *(
                f"port {port} is still listened at by {pid}"
                for port, pid in (_listening() if self._ports else ())
                if port in self._ports
            ),
            *(f"{path} was left" for path in self.folder.glob("orch-*")),
            *(f"{path} was left" for path in sorted(self._shared) if path.exists()),
        ]


class Ledger:
    """Compares the store of a run with the files of the workload `Witness`.

    The store may count at most as many steps as the witness, which is read after it. Steps of the
    last second before a kill may be missing in the store. Counters only grow.
    """

    def __init__(self, scene: Scene, *, is_witnessed: bool) -> None:
        self._scene, self._is_witnessed = scene, is_witnessed
        self.last: dict[str, int] = {}
        """The good steps of each slot in the newest comparison, keyed by slot."""

    def look(self) -> list[str]:
        """Compare once; return a sentence for each broken property."""
        folder = self._scene.newest_run()
        if folder is None:
            return []
        try:
            with reading(folder) as store:
                sound = [str(line[0]) for line in store.execute("PRAGMA integrity_check")]
            slots = read_run(folder).slots
        except NothingStoredError:
            return []
        except Exception as error:  # noqa: BLE001 - a damaged store is a finding
            return [f"the store cannot be read: {error}"]
        after = self._witnessed()
        counted = sum(slot.row.counts.steps_ok for slot in slots)
        now = {slot.slot: slot.row.counts.steps_ok for slot in slots}
        wrong = [
            f"{slot}: good steps went back from {self.last[slot]} to {steps}"
            for slot, steps in now.items()
            if steps < self.last.get(slot, 0)
        ]
        wrong += [] if sound == ["ok"] else [f"integrity_check: {sound[:3]}"]
        if self._is_witnessed and counted > after:
            wrong.append(f"{counted} steps are counted, and {after} were done")
        self.last = now
        return wrong

    def _witnessed(self) -> int:
        return sum(path.stat().st_size for path in self._scene.steps.glob("*.steps"))


def within(seconds: float, ask: Callable[[], list[str]]) -> list[str]:
    """Call `ask` until it returns no sentence or the time is over; return its last sentences."""
    deadline_s = time.monotonic() + seconds
    while (sentences := ask()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return sentences


def _listening() -> list[tuple[int, int | None]]:
    """Return each listening port of this machine with the process that listens."""
    found = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    return [(each.laddr.port, each.pid) for each in found if each.laddr]


def shared_files(pid: int) -> set[Path]:
    """Return the files in /dev/shm that a process has mapped and that still exist."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        words = (line.split() for line in maps.splitlines() if _SHARED in line)
        return {Path(each[5]) for each in words if each[-1] != "(deleted)"}
    return set()


def is_dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def called(process: psutil.Process) -> str:
    try:
        return f"{process.name()}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return "gone meanwhile"
