"""What `up NODE --exec --stay` does with processes, a socket for the head, and a stand-in for Ray.

The stand-in is a script that leaves a process of the raylet's name behind, or fails;
`tests/cluster/nodes` has Ray. As Ray's own program it is written in Python, and goes on as a shell.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.cli.nodes import processes_of, stop_node
from tests.scene import PATIENCE_S, ROOT, wait_for

#: A name no other process on this machine is marked with.
NODE = f"stay-{os.getpid()}"

KEEP = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from orchestrator.cli.stay import keep
from orchestrator.core.node_commands import NODE_MARK, NodeCommand
node, address, script = sys.argv[-3:]
how = dict(environment={NODE_MARK: node}, argv=(script, script + ".sh"), is_head=False, token_steps=(), cpus_said="")
sys.exit(keep(NodeCommand(head_address=address, **how)))
"""


STAND_IN = "import os, sys; os.execvp('sh', ['sh', sys.argv[1]])"


class Kept:
    def __init__(self, folder: Path, address: str, number: int) -> None:
        self._output = folder / f"said-{number}"
        with self._output.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", KEEP, "--stay", NODE, address, str(folder / "ray")],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def says(self, words: str, times: int = 1) -> None:
        wait_for(lambda: self.said().count(words) >= times, f"{words!r} of {self.process.args}")

    def said(self) -> str:
        return self._output.read_text()

    def ended(self) -> tuple[int, str]:
        return self.process.wait(PATIENCE_S), self.said()


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[[str], Kept]]:
    """Keep a node whose `ray start` is a shell script."""
    shutil.copy(shutil.which("sleep") or "sleep", tmp_path / "raylet")
    (tmp_path / "ray").write_text(STAND_IN)
    (tmp_path / "ray").chmod(0o700)
    kept: list[Kept] = []

    def started(script: str, address: str = "127.0.0.1:1") -> Kept:
        (tmp_path / "ray.sh").write_text(script)
        kept.append(Kept(tmp_path, address, len(kept)))
        return kept[-1]

    yield started
    list(stop_node(NODE))
    for each in kept:
        each.process.wait(PATIENCE_S)


@pytest.fixture
def head() -> Iterator[str]:
    """The address of something that listens, as a head does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def raylets() -> list[psutil.Process]:
    return [process for process in processes_of(NODE) if process.name() == "raylet"]


def raylet() -> psutil.Process:
    (found,) = raylets()
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_waits_for_the_head_until_it_is_asked_to_end(
    keep: Callable[..., Kept], number: int
) -> None:
    kept = keep("exit 1")
    kept.says(f"{NODE}: waiting: the Ray head at 127.0.0.1:1 cannot be reached")
    time.sleep(2.5)  # two more looks
    kept.process.send_signal(number)
    code, said = kept.ended()
    assert code == 130
    assert [line.split(" ", 1)[-1].split(":")[0] for line in said.splitlines()] == [NODE, NODE], (
        "one line, and the end"
    )


def test_a_killed_raylet_is_started_again_until_stopped(
    keep: Callable[..., Kept], head: str, tmp_path: Path
) -> None:
    kept = keep(f"{tmp_path}/raylet 600 &", head)
    kept.says("up, a member")
    first = raylet()
    first.kill()
    kept.says("up, a member", times=2)
    assert raylet() != first
    assert "Ray has ended on this PC" in kept.said()
    list(stop_node(NODE))
    assert kept.ended()[0] == 130
    assert processes_of(NODE) == set()


def test_why_a_start_has_failed_is_said(
    keep: Callable[..., Kept], head: str, tmp_path: Path
) -> None:
    kept = keep(f"{tmp_path}/raylet 600 & echo; echo the port is in use; echo; exit 1", head)
    kept.says("`ray start` has failed: the port is in use; next try after 2 s")


def test_a_start_whose_raylet_has_ended_is_not_waited_for(
    keep: Callable[..., Kept], head: str, tmp_path: Path
) -> None:
    """Ray's own start would wait half a minute for it."""
    kept = keep(f"{tmp_path}/raylet 3 & sleep 600", head)
    kept.says("what `ray start` has started has ended", times=2)
    (tmp_path / "ray.sh").write_text(f"{tmp_path}/raylet 600 &")
    kept.says("up, a member")
    assert [
        process.name() for process in processes_of(NODE) if process.name() in {"sh", "sleep"}
    ] == []


def test_a_child_with_the_raylets_name_is_not_taken_for_it(
    keep: Callable[..., Kept], head: str, tmp_path: Path
) -> None:
    """A raylet that starts a worker has such a child until the worker's program runs in it."""
    program = tmp_path / "raylet"
    family = (
        "import os, sys\n"
        f"for _ in range(7): os.fork() or os.execv('{program}', ['raylet', '601'])\n"
        f"os.execv('{program}', ['raylet', '602'])\n"
    )
    (tmp_path / "family.py").write_text(family)
    kept = keep(f"{sys.executable} {tmp_path}/family.py & sleep 3", head)
    kept.says("up, a member")
    (parent,) = [process for process in raylets() if "602" in process.cmdline()]
    children = parent.children()
    assert len(children) == 7
    for child in children:
        child.kill()
    time.sleep(3)  # further looks
    assert parent.is_running()
    assert kept.said().count("up, a member") == 1


def test_a_node_that_runs_is_kept_and_a_second_keeper_is_refused(
    keep: Callable[..., Kept], head: str, tmp_path: Path
) -> None:
    kept = keep(f"{tmp_path}/raylet 600 &", head)
    kept.says("up, a member")
    second = keep(f"{tmp_path}/raylet 600 &", head)
    code, said = second.ended()
    assert code != 0
    assert f"process {kept.process.pid} keeps {NODE} already" in said
    assert kept.said().count("up, a member") == 1, "a line for each change"
    kept.process.kill()
    kept.process.wait(PATIENCE_S)
    before = raylet()
    third = keep("exit 1", head)
    third.says("up, but it is not sure")
    assert raylet() == before
    third.process.send_signal(signal.SIGTERM)
    assert third.ended()[0] == 130
    assert processes_of(NODE) == set()
