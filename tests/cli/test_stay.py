"""`up NODE --exec --stay` with real processes, a socket for the head, and a stand-in for Ray.

The stand-in is a script; `tests/cluster/nodes` has Ray. Like Ray's own program, the script is
written in Python, and then becomes a shell.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.cli.nodes import processes_of, stop_node
from tests.scene import PATIENCE_S, ROOT, wait_for
from workers.keeper.processes import name_of

#: A node name that marks no other process on this machine.
NODE = f"stay-{os.getpid()}"

KEEP = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from orchestrator.cli.nodes import keep
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
        wait_for(lambda: self._output.read_text().count(words) >= times, repr(words))

    def ended(self) -> tuple[int, str]:
        return self.process.wait(PATIENCE_S), self._output.read_text()


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[[str], Kept]]:
    """Keep a node whose `ray start --block` is a shell script."""
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
    """The address of a socket that listens, as a head does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_it_waits_for_the_head_until_it_is_asked_to_end(keep: Callable[..., Kept]) -> None:
    kept = keep("exit 1")
    kept.says(f"{NODE}: waits: the Ray head at 127.0.0.1:1 cannot be reached")
    kept.process.send_signal(signal.SIGHUP)
    code, said = kept.ended()
    assert (code, len(said.splitlines())) == (130, 1)


def test_what_has_ended_is_started_again_until_stopped(
    keep: Callable[..., Kept], head: str
) -> None:
    kept = keep("exit 7", head)
    kept.says("Ray has ended on this PC")
    kept.says("starting", times=2)
    list(stop_node(NODE))
    assert kept.ended()[0] == 130
    assert processes_of(NODE) == {}


def test_what_an_ended_start_has_left_is_ended_too(keep: Callable[..., Kept], head: str) -> None:
    """A worker whose raylet has died may still hold its card."""
    kept = keep("sleep 600 & exit 7", head)
    kept.says("starting", times=2)
    assert [name_of(pid) for pid in processes_of(NODE)].count("sleep") <= 1
    kept.process.send_signal(signal.SIGTERM)
    assert kept.ended()[0] == 130
    assert processes_of(NODE) == {}


def test_a_node_that_runs_already_is_refused_with_a_remedy(
    keep: Callable[..., Kept], head: str
) -> None:
    kept = keep("sleep 600", head)
    kept.says("starting")
    code, said = keep("sleep 600", head).ended()
    assert code != 0
    assert f"{NODE} runs here already (process " in said
    assert f"python -m orchestrator stop --node {NODE}" in said
    assert kept.process.poll() is None
