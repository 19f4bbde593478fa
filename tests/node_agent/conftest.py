"""Real agent processes over a fake NVML, a stand-in for NVIDIA's control daemon, and the proof that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.factories import fake_card
from tests.scene import python, wait_for
from workers.host.processes import is_alive
from workers.learned_limits import STATE_DIR_VARIABLE
from workers.node_agent.protocol import AgentClient, AgentOrders, to_line
from workers.nvml.fake.script import prepare
from workers.settings import FakeSensors

#: Another one in each process of the tests: the folder of a run's daemon is named after it.
RUN_ID = f"20261120-120000-{os.getpid() % 0x10000:04x}"

#: Asks the cards of a fake NVML; a process has one NVML for good.
_ASK = """
import json, sys
import pynvml
from workers.nvml.fake import load
from workers.settings import FakeSensors
load(FakeSensors(**json.loads(sys.argv[1])))
pynvml.nvmlInit()
handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
print(json.dumps([getattr(pynvml, sys.argv[2])(handle) for handle in handles]))
"""

#: Has an agent, tells what it did, and waits to be killed.
_PARENT = """
import sys, time
from workers.node_agent.protocol import AgentClient, AgentOrders, from_line, to_line
agent = AgentClient(from_line(AgentOrders, sys.argv[1]))
print(to_line(agent.outcome()), flush=True)
time.sleep(600)
"""

#: Behaves like nvidia-cuda-mps-control as far as NVIDIA's documents say, with a socket of its own
#: kind.
_STAND_IN = """#!{python}
import json, os, signal, socket, sys
from pathlib import Path

pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
manner = Path(__file__).with_name("manner")
manner = manner.read_text() if manner.exists() else ""
if sys.argv[1:] == ["-f"]:
    logs = Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
    if manner == "crash":
        (logs / "control.log").write_text("starting\\nUser does not have permission\\n\\n")
        sys.exit(1)
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(pipes / "control"))
    server.listen()
    (pipes / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    Path(__file__).with_name("environment.json").write_text(json.dumps(dict(os.environ)))
    while True:
        client, _ = server.accept()
        command = client.recv(1000).decode()
        with Path(__file__).with_name("commands").open("a") as file:
            file.write(f"{{pipes}} {{command}}\\n")
        if manner == "mute":
            continue
        client.sendall(b"4711\\n" if command == "get_server_list" else b"ok")
        client.close()
        if command.split()[0] == "quit" and manner != "stubborn":
            sys.exit(0)
client = socket.socket(socket.AF_UNIX)
client.settimeout(0.5)
try:
    client.connect(str(pipes / "control"))
    client.sendall(sys.stdin.readline().strip().encode())
    print(client.recv(1000).decode())
except OSError:
    print("Cannot find MPS control daemon process")
    sys.exit(1)
"""


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; whoever adopted it may not have noticed yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(process: subprocess.Popen[str]) -> None:
    """End a process the hard way, and reap it."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Node:
    """A machine with a fake NVML: its agents, and what they leave."""

    def __init__(self, fake: FakeSensors, state: Path) -> None:
        self.fake = fake
        self.records = state / "kept"
        self.parents: list[subprocess.Popen[str]] = []
        self.agents: list[AgentClient] = []

    def orders(self, **changes: Any) -> AgentOrders:
        """Return orders for this machine."""
        fields = {"node": "pc1", "run_id": RUN_ID, "card_count": 1, "fake": self.fake, **changes}
        return AgentOrders(**fields)

    def agent(self, **changes: Any) -> AgentClient:
        """Start an agent as a child of this process."""
        self.agents.append(AgentClient(self.orders(**changes)))
        return self.agents[-1]

    def parent(self, **changes: Any) -> subprocess.Popen[str]:
        """Start an agent as the child of a process of its own, which can be killed."""
        command = [sys.executable, "-c", _PARENT, to_line(self.orders(**changes))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.parents.append(process)
        return process

    def limits_w(self) -> list[float]:
        """Ask the cards for their power limits, in watts."""
        return [limit_mw / 1000 for limit_mw in self._asked("nvmlDeviceGetEnforcedPowerLimit")]

    def offsets_mhz(self) -> list[int]:
        """Ask the cards for their memory offsets."""
        return self._asked("nvmlDeviceGetMemClkVfOffset")

    def _asked(self, function: str) -> list[int]:
        return list(json.loads(python("-c", _ASK, json.dumps(asdict(self.fake)), function).stdout))

    def record(self) -> dict[str, Any]:
        """Return what the one agent of this machine has written down."""
        (path,) = self.records.glob("*.json")
        return dict(json.loads(path.read_text(encoding="ascii")))

    def is_clean(self) -> bool:
        """Say whether nothing is written down any more."""
        return not list(self.records.glob("*.json"))

    def kill_guard(self) -> None:
        """End the one agent of this machine the hard way."""
        told = self.record()
        os.kill(told["pid"], signal.SIGKILL)
        wait_for(lambda: not is_alive(told["pid"], told["started"]), "end of the agent")


@pytest.fixture
def node(
    library_folder: Path, tmp_path: Path, state_dir: Path, nothing_left: None
) -> Iterator[Callable[..., Node]]:
    """Make ready a machine with some cards."""
    made: list[Node] = []

    def ready(*cards: dict[str, Any]) -> Node:
        path = tmp_path / f"{tmp_path.name}.json"
        path.write_text(json.dumps({"cards": cards or [fake_card()]}))
        made.append(Node(prepare(path, library_folder), state_dir))
        return made[-1]

    yield ready
    for each in made:
        for process in each.parents:
            kill(process)
        for agent in each.agents:
            agent.end()


@pytest.fixture
def nothing_left(state_dir: Path) -> Iterator[None]:
    """Fail if a process is left after the test that knows its state folder: agents and daemons do."""

    def left() -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _knows(process, str(state_dir))]

    yield
    try:
        wait_for(lambda: not left(), "end of the processes we started")
    finally:
        for process in left():
            process.kill()


def _knows(process: psutil.Process, state: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(STATE_DIR_VARIABLE) == state
    except psutil.Error:
        return False


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> Path:
    """Put a stand-in for nvidia-cuda-mps-control first on the PATH; return its folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(_STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "nobody"))
    return folder
