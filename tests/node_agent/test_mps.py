"""An MPS daemon is there for the length of a run: one that runs is used, one of our own is ended, else it is said why.

There is no MPS here, so NVIDIA's program is a stand-in on the PATH; everything else is real.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.factories import fake_card
from tests.node_agent.conftest import Node, is_gone, kill
from tests.scene import wait_for
from workers.host.processes import start_time
from workers.node_agent import mps
from workers.node_agent.protocol import AgentOrders, AgentOutcome, from_line, to_line
from workers.nvml.queries import CardIdentity

pytestmark = pytest.mark.slow

Ready = Callable[..., Node]

PID_FILE = "nvidia-cuda-mps-control.pid"


def commands(stand_in: Path, pipes: str) -> list[str]:
    """Return what the daemon of a pipe directory was told."""
    path = stand_in / "commands"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{pipes} ")]


@pytest.fixture
def strangers_daemon(
    stand_in: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[psutil.Process]:
    """A daemon that somebody else has started, in the pipe directory that the environment names."""
    folder = tmp_path_factory.mktemp("theirs")
    environment = {
        **os.environ,
        "CUDA_MPS_PIPE_DIRECTORY": str(folder),
        "CUDA_MPS_LOG_DIRECTORY": str(folder),
        "ORCHESTRATOR_STATE_DIR": "",
    }
    process = subprocess.Popen([mps.CONTROL, "-f"], env=environment, text=True)
    wait_for((folder / PID_FILE).exists, "daemon of somebody else")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder))
        yield psutil.Process(process.pid)
    kill(process)


def test_an_own_daemon_is_started_and_told_to_quit(
    node: Ready, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    pc = node()
    agent = pc.agent(mps=True)
    outcome = agent.outcome()
    assert outcome.mps_problem is None
    pipes = outcome.pipe_directory
    assert pipes is not None
    assert commands(stand_in, pipes) == ["get_server_list"]
    told = json.loads((stand_in / "environment.json").read_text())
    assert told["CUDA_MPS_PIPE_DIRECTORY"] == pipes
    assert Path(told["CUDA_MPS_LOG_DIRECTORY"]).parent == Path(pipes).parent
    assert told["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    # They would hide cards from every client, or limit all of them.
    assert {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}.isdisjoint(told)
    assert stat.S_IMODE(Path(pipes).parent.stat().st_mode) == 0o700
    assert len(f"{pipes}/control_privileged") < 107
    pid = int((Path(pipes) / PID_FILE).read_text())
    assert outcome.notes == (f"pc1: an MPS daemon runs for this run, process {pid}",)
    assert agent.end() == ("pc1: the MPS daemon of the run has ended",)
    assert commands(stand_in, pipes)[-1] == "quit"
    assert start_time(pid) is None
    assert not Path(pipes).parent.exists()
    assert pc.is_clean()


def test_a_daemon_that_runs_is_used_and_left_alone(
    node: Ready, stand_in: Path, strangers_daemon: psutil.Process
) -> None:
    pc = node()
    agent = pc.agent(mps=True)
    outcome = agent.outcome()
    pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
    assert outcome == AgentOutcome(
        pipe_directory=pipes, notes=(f"pc1: the MPS daemon in {pipes} is used, and left running",)
    )
    assert agent.end() == ()
    assert strangers_daemon.is_running()
    assert commands(stand_in, pipes) == ["get_server_list"]


def test_only_the_own_daemon_is_ended(
    node: Ready, stand_in: Path, strangers_daemon: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
    agent = node().agent(mps=True)
    own = agent.outcome().pipe_directory
    agent.end()
    assert own is not None
    assert commands(stand_in, own)[-1] == "quit"
    assert commands(stand_in, theirs) == []
    assert strangers_daemon.is_running()


def test_without_the_program_it_says_so(
    node: Ready, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    agent = node().agent(mps=True)
    outcome = agent.outcome()
    assert outcome.pipe_directory is None
    assert "nvidia-cuda-mps-control is not on the PATH; it comes with the driver" in str(
        outcome.mps_problem
    )
    assert agent.end() == ()


def test_a_daemon_that_ends_at_once_is_quoted(node: Ready, stand_in: Path) -> None:
    (stand_in / "manner").write_text("crash")
    pc = node()
    agent = pc.agent(mps=True)
    problem = "nvidia-cuda-mps-control ended with status 1: User does not have permission"
    assert agent.outcome() == AgentOutcome(mps_problem=problem)
    assert agent.end() == ()
    assert pc.is_clean()


def test_a_daemon_that_does_not_answer_is_ended(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_START_S", 0.6)
    monkeypatch.setattr(mps, "_END_S", 0.2)
    (stand_in / "manner").write_text("mute")
    before = psutil.Process().children()
    daemon = mps.new_daemon(f"test-{os.getpid()}")
    with pytest.raises(mps.MpsError, match="nvidia-cuda-mps-control does not answer"):
        mps.start(daemon)
    assert not Path(daemon.folder).exists()
    assert [
        child for child in psutil.Process().children() if child not in before and not is_gone(child)
    ] == []


def test_a_daemon_that_does_not_quit_is_ended_by_its_process(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_END_S", 0.2)
    (stand_in / "manner").write_text("stubborn")
    daemon = mps.start(mps.new_daemon(f"test-{os.getpid()}"))
    assert daemon.pid is not None
    mps.end(daemon)
    assert start_time(daemon.pid) is None
    assert not Path(daemon.folder).exists()
    assert commands(stand_in, daemon.pipe_directory)[-1] == "quit"


def test_a_folder_that_is_there_already_is_not_taken_over(stand_in: Path) -> None:
    daemon = mps.new_daemon(f"test-{os.getpid()}")
    Path(daemon.folder).mkdir()
    try:
        with pytest.raises(mps.MpsError, match=f"{daemon.folder} is in use by another run"):
            mps.start(daemon)
    finally:
        Path(daemon.folder).rmdir()


def test_the_folder_is_short_enough_for_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", f"/tmp/{'x' * 200}")
    assert mps.new_daemon("pc1-ab12cd34").folder == "/tmp/orch-mps-pc1-ab12cd34"
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert mps.new_daemon("pc1-ab12cd34").folder == "/var/tmp/orch-mps-pc1-ab12cd34"


def test_an_agent_outlives_its_parent_and_undoes_everything(node: Ready, stand_in: Path) -> None:
    pc = node()
    parent = pc.parent(mps=True, power_limit_w=280.0)
    assert parent.stdout is not None
    outcome = from_line(AgentOutcome, parent.stdout.readline())
    pid = pc.record()["daemon"]["pid"]
    agent = psutil.Process(pc.record()["pid"])
    assert os.getsid(agent.pid) != os.getsid(parent.pid)
    assert parent.pid not in [process.pid for process in agent.parents()]
    kill(parent)
    wait_for(pc.is_clean, "record of the agent to go")
    wait_for(lambda: is_gone(agent), "end of the agent")
    assert start_time(pid) is None
    assert outcome.pipe_directory is not None
    assert commands(stand_in, outcome.pipe_directory)[-1] == "quit"
    assert pc.limits_w() == [350.0]


def test_the_daemon_of_a_killed_guard_is_ended_by_the_next(node: Ready, stand_in: Path) -> None:
    pc = node()
    first = pc.agent(mps=True).outcome()
    pid = pc.record()["daemon"]["pid"]
    pc.kill_guard()
    assert psutil.Process(pid).is_running()
    second = pc.agent(mps=True)
    outcome = second.outcome()
    assert (
        outcome.notes[0]
        == "left by a run that was killed: pc1: the MPS daemon of the run has ended"
    )
    assert (
        outcome.pipe_directory == first.pipe_directory
    )  # the same run, so that its workers find it again
    assert start_time(pid) is None
    second.end()
    assert pc.is_clean()


def test_a_daemon_whose_guard_died_at_its_start_is_ended(stand_in: Path) -> None:
    daemon = mps.start(mps.new_daemon(f"test-{os.getpid()}"))
    assert daemon.pid is not None
    mps.end(mps.Daemon(folder=daemon.folder))
    assert start_time(daemon.pid) is None
    assert not Path(daemon.folder).exists()


AMPERE = CardIdentity(
    index=0, uuid="GPU-1", name="RTX 3090", compute_capability=(8, 6), compute_mode=3
)
PROHIBITED = replace(AMPERE, compute_mode=2)
PASCAL = CardIdentity(index=1, uuid="GPU-2", name="GTX 1080", compute_capability=(6, 1))


@pytest.mark.parametrize(
    ("system", "kernel", "cards", "words"),
    [
        ("linux", "5.15.153.1-microsoft-standard-WSL2", [AMPERE],
         "MPS runs on Linux only, and this is WSL2"),
        ("linux", "4.4.0-19041-Microsoft", [AMPERE], "MPS runs on Linux only, and this is WSL2"),
        ("win32", "10", [AMPERE], "MPS runs on Linux only, and this is win32"),
        ("linux", "6.8.0", [], "there is no card for MPS to share"),
        ("linux", "6.8.0", [AMPERE, PASCAL], "GTX 1080 is older than Volta"),
        ("linux", "6.8.0", [PROHIBITED],
         "RTX 3090 is in compute mode PROHIBITED; type: sudo nvidia-smi -i 0"),
        ("linux", "6.8.0", [AMPERE], None),
    ],
)  # fmt: skip
def test_where_it_cannot_work_it_says_why(
    stand_in: Path, system: str, kernel: str, cards: list[CardIdentity], words: str | None
) -> None:
    found = mps.obstacle(system=system, kernel=kernel, cards=cards)
    assert found is None if words is None else words in str(found)


def test_only_the_cards_that_a_node_lends_are_judged(node: Ready, stand_in: Path) -> None:
    pc = node(fake_card(1), fake_card(2, compute_mode=2), fake_card(3, compute_capability="6.1"))
    for number, words in (("1", "is in compute mode PROHIBITED"), ("2", "is older than Volta")):
        assert words in str(pc.agent(mps=True, cards=(number,)).outcome().mps_problem)
    assert pc.agent(mps=True, cards=("0",)).outcome().mps_problem is None


def test_orders_and_outcomes_survive_the_pipe(node: Ready) -> None:
    orders = node().orders(mps=True, power_limit_w=280.5, cards=("GPU-1", "1"))
    assert from_line(AgentOrders, to_line(orders)) == orders
    outcome = AgentOutcome(pipe_directory="/tmp/é", mps_problem="a\nb", notes=("x",))
    assert from_line(AgentOutcome, to_line(outcome)) == outcome
    for line in ("", "3", "{}", '{"notes": 3}', to_line(outcome)):
        with pytest.raises(ValueError, match=r"no AgentOrders|Expecting"):
            from_line(AgentOrders, line)


def test_a_client_is_ended_by_the_daemon_first(node: Ready, stand_in: Path) -> None:
    agent = node().agent(mps=True)
    pipes = agent.outcome().pipe_directory
    assert pipes is not None
    assert mps.end_client(pipes, 12345)
    assert commands(stand_in, pipes)[-1] == "terminate_client 4711 12345"
    agent.end()
    assert not mps.end_client(pipes, 12345)
