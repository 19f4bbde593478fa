"""Fixtures for real runs of the real command that check that the runs leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.core.node_commands import NODE_MARK
from orchestrator.errors import NothingStoredError
from orchestrator.record.archive import read_run
from orchestrator.record.store import STORE_NAME
from tests.reaper import Reaper
from tests.scene import COMMAND, PATIENCE_S, ROOT, computed, ended, events_in, python, ran, wait_for

_PR_SET_CHILD_SUBREAPER = 36

#: Three workers on two nodes take a third of the time of the full cluster.
SMALL = ("--set", "nodes.pc1.workers=2", "--set", "nodes.pc2.workers=1")

ONE_EACH = ("--set", "nodes.pc1.workers=1", "--set", "nodes.pc2.workers=1")

#: Workers compute 10 % of the time, because tests share the cores.
RESTING = ("--set", "nodes.pc1.gpu_share=0.1", "--set", "nodes.pc2.gpu_share=0.1")

#: A loaded machine may take minutes for a start or a step. tests/run tests timeouts in virtual
#: time.
PATIENT = tuple(f"--set=run.{name}_timeout_s={PATIENCE_S:.0f}" for name in ("start", "hang"))


@dataclass
class Head:
    """A running `python -m orchestrator …`."""

    process: subprocess.Popen[str]
    runs: Path

    def folder(self) -> Path:
        """Wait for the run folder; return it."""
        found = wait_for(
            lambda: next(iter(self.runs.glob("*/head.json")), None),
            "run folder",
            lambda: computed(self.process.pid),
        )
        return Path(found.parent)

    def events(self, name: str | None = None, **fields: object) -> list[dict[str, Any]]:
        """Return the logged events so far; with a name or fields, only those that match."""
        return events_in(self.folder(), name, **fields)

    def opened(self, slot: str) -> list[int]:
        """Return the processes of a slot that have opened its device, in order."""
        return [event["pid"] for event in self.events("device_opened", slot=slot)]

    def progress(self) -> object:
        """Return a value that changes with each progress of the run, and not merely with time."""
        if not any(self.runs.glob("*/head.json")):
            return computed(self.process.pid)
        rows = self.rows().values()
        steps = [row.get("train_step") for row in rows]
        is_starting = not steps or any(row["state"] in {"STARTING", "RESTARTING"} for row in rows)
        log = self.folder() / "events.jsonl"
        return (
            log.stat().st_size if log.exists() else 0,
            steps,
            # An import may take minutes.
            is_starting and [computed(child.pid) for child in psutil.Process().children()],
        )

    def wait(self, ask: Callable[[], Any], what: str) -> None:
        """Wait until `ask` is true while the run lives; a failure shows the last events."""

        def asked() -> bool:
            assert self.process.poll() is None, f"the run ended early: {self.process.communicate()}"
            return bool(ask())

        try:
            wait_for(asked, what, self.progress)
        except AssertionError as error:
            raise AssertionError(f"{error}; the last events: {self.events()[-20:]}") from None

    def wait_until_running(self, workers: int, after: int = 0) -> None:
        """Wait until `workers` slots have been RUNNING in the events after the first `after`."""

        def enough() -> bool:
            events = self.events()[after:]
            running = {it["slot"] for it in events if it.get("to_state") == "RUNNING"}
            return len(running) >= workers

        self.wait(enough, f"{workers} running workers")

    def rows(self) -> dict[str, Mapping[str, Any]]:
        """Return the stored rows of the table, keyed by slot.

        Empty before the store has any.
        """
        with contextlib.suppress(NothingStoredError):
            return {it.slot: it.row.to_dict() for it in read_run(self.folder()).slots}
        return {}

    def interrupt_when(self, ask: Callable[[], Any], what: str) -> dict[str, Any]:
        """Wait until `ask` is true, then interrupt the run; return its summary."""
        self.wait(ask, what)
        self.process.send_signal(signal.SIGINT)
        code, out, err = self.finish()
        assert code == 130, out + err
        return dict(json.loads(out))

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end of a run that makes progress; return exit code and both outputs."""

        def progress() -> object:
            with contextlib.suppress(NothingStoredError, StopIteration):
                folder = next(self.runs.glob("*/run.sqlite")).parent
                return read_run(folder).elapsed_s, self.progress()
            return self.progress()

        out, err = ended(self.process, progress=progress)
        return self.process.returncode, out, err

    def kill(self) -> None:
        """End the head as a crash does."""
        self.process.kill()
        self.process.wait()

    def summary(self) -> dict[str, Any]:
        """Return the summary in the run folder."""
        return dict(json.loads((self.folder() / "summary.json").read_text(encoding="utf-8")))

    def close(self) -> None:
        """Interrupt the run if it has not ended, and close its output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                ended(self.process)
            self.process.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def at_unix_s(event: dict[str, Any]) -> float:
    """Return the Unix time of an event in seconds."""
    return datetime.fromisoformat(event["at"]).timestamp()


def samples(folder: Path) -> dict[str, list[sqlite3.Row]]:
    """Return all samples of all slots in the order of time, keyed by slot."""
    found: dict[str, list[sqlite3.Row]] = {}
    with contextlib.closing(sqlite3.connect(folder / STORE_NAME)) as store:
        store.row_factory = sqlite3.Row
        for line in store.execute("SELECT * FROM samples ORDER BY at_unix_s"):
            found.setdefault(line["slot"], []).append(line)
    return found


#: Trains without the engine and without an interruption.
_UNDISTURBED = """
import json, sys, torch
from pathlib import Path
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
torch.set_num_threads(1)
keys, seed, earlier = json.loads(sys.argv[1])
settings = TrainSettings(**keys)
trainer = Trainer(find_task(settings, seed), settings, torch.device("cpu"), seed)
if earlier is not None:
    trainer.begin_with(Path(earlier))
while not trainer.finished:
    trainer.micro_batch(settings.micro)
print(json.dumps([trainer.weights_sha256(), trainer.progress().loss]))
"""


def undisturbed(
    keys: Mapping[str, Any], seed: int = 0, earlier: Path | None = None, **more: Any
) -> tuple[str, float]:
    """Return the hash of the weights and the last loss of an uninterrupted training.

    The training has these keys of `train:`, and begins with the file `earlier`.
    """
    given = json.dumps([{**keys, **more}, seed, None if earlier is None else str(earlier)])
    sha256, loss = json.loads(python("-c", _UNDISTURBED, given, cwd=ROOT).stdout)
    return sha256, loss


@pytest.fixture(scope="module", autouse=True)
def _adopt_orphans() -> Iterator[None]:
    """Make processes that a run leaves behind children of this process, so that tests find them."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Return the live descendants of this process, and reap its dead children."""
    for child in psutil.Process().children():
        if _is_dead(child):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
    return [child for child in psutil.Process().children(recursive=True) if not _is_dead(child)]


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # ended after it was listed
        return True


def actors() -> set[int]:
    """Return the descendants of this process that run our actors."""
    found = set()
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(("ray::WorkerActor", "ray::CommandActor")):
                found.add(process.pid)
    return found


def ray_process(node: str, name: str) -> psutil.Process | None:
    """Return the process of Ray with this name that `up` started for a node."""
    for process in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended after it was listed
            if process.name() == name and process.environ().get(NODE_MARK) == node:
                return process
    return None


def shared_memory() -> set[Path]:
    """Return files in /dev/shm that no live process has mapped, without Python's semaphores."""
    found = {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):  # another user's process, or it has ended
            mapped = maps.read_text(encoding="utf-8", errors="replace")
            found = {path for path in found if str(path) not in mapped}
    return found


@contextlib.contextmanager
def nothing_left_of(folder: Path) -> Iterator[None]:
    """Fail if the block leaves a process, a file in /dev/shm or a temporary folder of ours."""
    before = {process.pid for process in descendants()}
    shared = shared_memory()

    def left() -> list[psutil.Process]:
        return [process for process in descendants() if process.pid not in before]

    yield
    try:
        wait_for(lambda: not left(), "end of the processes we started", lambda: len(left()))
    finally:
        for process in left():
            process.kill()
    # Other programs make files there too, and remains of a killed head disappear a bit later.
    wait_for(lambda: shared_memory() <= shared, f"end of {shared_memory() - shared}")
    wait_for(lambda: not list(folder.glob("orch-*")), f"end of {list(folder.glob('orch-*'))}")


@contextlib.contextmanager
def short_folder(reaper: Reaper) -> Iterator[Path]:
    """Make a folder with a path short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    reaper.remove_at_the_end(folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def short_tmp(session_reaper: Reaper) -> Iterator[Path]:
    """Return a folder with a path short enough for Ray's sockets."""
    with short_folder(session_reaper) as folder:
        yield folder


@pytest.fixture
def nothing_left(short_tmp: Path) -> Iterator[None]:
    """Fail if the test leaves processes or files of ours."""
    with nothing_left_of(short_tmp):
        yield


Starter = Callable[..., Head]


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Starter]:
    """Start `python -m orchestrator run` with the shipped cluster.yaml, and check for remains."""
    heads: list[Head] = []

    def start(
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        runs: Path | None = None,
        verb: tuple[str, ...] = ("run",),
        before: tuple[str, ...] = (),
    ) -> Head:
        """Start a run. `runs` is an existing folder; `before` are words before the command."""
        runs = runs or folder / f"runs{len(heads)}"
        where = ("--config", str(ROOT / "cluster.yaml"), "--run-dir", str(runs))
        patient = () if "--resume" in arguments else PATIENT
        process = subprocess.Popen(
            [*before, *COMMAND, *verb, *where, *patient, *arguments],
            cwd=cwd,
            env={**os.environ, "TMPDIR": str(folder), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        heads.append(Head(process=process, runs=runs))
        return heads[-1]

    with nothing_left_of(folder):
        try:
            yield start
        finally:
            for head in heads:
                head.close()
    folders = (folder for head in heads for folder in head.runs.glob("*"))
    illegal = [event for each in folders for event in events_in(each, "illegal_event")]
    assert illegal == [], "the lifecycle got an event that its table does not allow"


@pytest.fixture
def start(short_tmp: Path) -> Iterator[Starter]:
    """Start runs in a fresh folder."""
    with starting(short_tmp) as starter:
        yield starter


#: Asks Ray itself for the number of live actors on each node.
_ASK_RAY = """
import json, ray
from ray._private.state import actors
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
names = {node["NodeID"]: node["Labels"].get("node") for node in ray.nodes()}
alive = [names[a["Address"]["NodeID"]] for a in actors().values()
         if a["State"] == "ALIVE" and a["ActorClassName"] in ("WorkerActor", "CommandActor")]
print(json.dumps({name: alive.count(name) for name in set(alive)}))
"""

_STATUS_COMMAND = """
from orchestrator.cluster.connect import connected
with connected("auto", "token"):
    from orchestrator.cluster.node_tasks import status_command
    print(status_command())
"""


class ByHand:
    """A user's shell on a PC with its own home and its own Ray."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (folder / "home").mkdir()
        scripts = str(Path(sys.executable).parent)
        self.environment = {
            "HOME": str(folder / "home"),
            "RAY_TMPDIR": str(folder),
            "RAY_gcs_server_port_wait_time_s": f"{PATIENCE_S:.0f}",
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        }
        self.arguments: tuple[str, ...] = ("--set", f"cluster.port={self.port}")

    def orchestrator(self, *arguments: str) -> str:
        return self._run([*COMMAND, *arguments, *self.arguments])

    def type_what_up_prints(self, node: str) -> str:
        """Run the printed commands, again if Ray gave a loaded machine too little time."""
        script = self.orchestrator("up", node)
        while True:
            try:
                return self.type(script)
            except AssertionError as error:
                if "timed out during startup" not in str(error):
                    raise
            self.stop_node(node)

    def type(self, script: str) -> str:
        return self._run(["bash", "-e", "-c", script])

    def stop_node(self, node: str) -> str:
        # Without run.dir, `stop` would also end other runs of this working tree.
        return self.orchestrator(
            "stop", "--node", node, "--set", f"run.dir={self.environment['HOME']}"
        )

    def ask_ray(self) -> dict[str, int]:
        environment = {"RAY_AUTH_MODE": "token"}
        return dict(
            json.loads(self._run([sys.executable, "-c", _ASK_RAY], **environment).splitlines()[-1])
        )

    def status_command(self) -> str:
        return self._run([sys.executable, "-c", _STATUS_COMMAND]).splitlines()[-1]

    def _run(self, command: list[str], **environment: str) -> str:
        done = ran(
            command,
            cwd=ROOT,
            env={**os.environ, **self.environment, **environment},
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def by_hand(short_tmp: Path) -> Iterator[ByHand]:
    """A shell whose nodes end before the check for remains: request `nothing_left` first."""
    shell = ByHand(short_tmp)
    yield shell
    shell.stop_node("pc2")
    shell.stop_node("pc1")
