"""A real run of the real command, looked at from outside: its counts, its processes, and what it
leaves behind.

Changes nothing in a run and judges no figure: what does not hold becomes a sentence. Linux only.
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

#: Workers find it because runs are started in `ROOT`.
WITNESS = "scripts.benches.witness:Witness"
#: As in `witness.py`, which is not imported here: it loads torch.
_WITNESS_FOLDER = "ORCH_WITNESS_DIR"
_SHARED = "/dev/shm/"  # noqa: S108 - looked at, not written
#: Sentences about one kind of thing; the rest would say the same.
_SENTENCES_MOST = 20


class Scene:
    """Folders of its own for some runs, and an account of every process that they bring."""

    def __init__(self) -> None:
        # A shell has what it starts by `&` ignore Ctrl-C, and runs would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # What a run leaves behind becomes a child of this process, and is found.
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Short, because Ray's sockets lie below it and a socket's path ends at 107 bytes.
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
        """Wait for a run's end; return its exit code (`None`: it was killed now) and its words."""
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
        """Note which processes of the runs live now; reap those that have ended."""
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
        """Remember where processes of the runs listen now, and which files of /dev/shm they have
        mapped: none of it may be there afterwards.
        """
        mine = {process.pid for process in self.look()}
        self._ports |= {port for port, pid in _listening() if pid in mine}
        self._shared |= {path for pid in mine for path in shared_files(pid)}

    def leftovers(self, within_s: float) -> list[str]:
        """Return a sentence for each thing that ended runs have left for so long, and end it."""
        left = within(within_s, self._left)
        for process in self._alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._ports.clear()
        self._shared.clear()
        return left[:_SENTENCES_MOST]

    def close(self, *, keep: bool) -> str | None:
        """End what still runs; remove the folders, or keep them and say where they are."""
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
        for pid in marked("TMPDIR", str(self.folder)):  # also what is no descendant
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
    """Compares the store of a run with what its workers have noted in the witness's folder, look by
    look.

    A status counts steps that were done, so no more are counted than the witness has seen when the
    store was read. Those of the last second before a kill may be missing. Counters only grow.
    """

    def __init__(self, scene: Scene, *, is_witnessed: bool) -> None:
        self._scene, self._is_witnessed = scene, is_witnessed
        self.last: dict[str, int] = {}
        """Slot -> its good steps, as the newest look has found them."""

    def look(self) -> list[str]:
        """Compare once; return what does not hold."""
        folder = self._scene.newest_run()
        if folder is None:
            return []
        try:
            with reading(folder) as store:
                sound = [str(line[0]) for line in store.execute("PRAGMA integrity_check")]
            slots = read_run(folder).slots
        except NothingStoredError:
            return []
        except Exception as error:  # noqa: BLE001 - damaged, which is a finding
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
    """Ask until there is nothing to tell, at most so long; return what was told last."""
    deadline_s = time.monotonic() + seconds
    while (told := ask()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return told


def _listening() -> list[tuple[int, int | None]]:
    """Return each port of this machine that is listened at, and by which process."""
    found = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    return [(each.laddr.port, each.pid) for each in found if each.laddr]


def shared_files(pid: int) -> set[Path]:
    """Return the files in /dev/shm that a process has mapped, and that are still there."""
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
