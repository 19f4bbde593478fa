"""`up NODE --exec --stay` with real Ray: an ended node returns to the current cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.core.node_commands import NODE_MARK
from tests.cluster.conftest import ByHand, descendants, ray_process
from tests.scene import COMMAND, ROOT, ended, wait_for

pytestmark = pytest.mark.ray


def agent_of(node: str) -> psutil.Process | None:
    """Return the process that Ray starts for the metrics of a node's raylet."""
    for process in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended after it was listed
            is_agent = any(word.endswith("dashboard/agent.py") for word in process.cmdline())
            if is_agent and process.environ().get(NODE_MARK) == node:
                return process
    return None


def session_of(node: str) -> str | None:
    """Return the Ray session of a node's raylet; each cluster has its own session."""
    raylet = ray_process(node, "raylet")
    words = [] if raylet is None else raylet.cmdline()
    return next((word for word in words if word.startswith("--session-name=")), None)


def members(by_hand: ByHand) -> int:
    """Return the number of nodes of the head; 0 while it starts and refuses connections."""
    with contextlib.suppress(AssertionError):
        return by_hand.type(by_hand.status_command()).count(" node_")
    return 0


class Kept:
    """A running `up NODE --exec --stay`."""

    def __init__(self, by_hand: ByHand, node: str, said: Path) -> None:
        self.node, self._said = node, said
        command = [*COMMAND, "up", node, "--exec", "--stay", *by_hand.arguments]
        with said.open("w") as stream:
            self.process: subprocess.Popen[str] = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **by_hand.environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def said(self) -> str:
        return self._said.read_text()

    def wait(self) -> int:
        """Wait for the end of the command; return its exit code."""
        ended(self.process, progress=self.said)
        return self.process.returncode

    def wait_until_up(self, before: int | None = None) -> int:
        """Wait until the node has a raylet whose process is not `before`; return its process."""

        def raylet() -> int | None:
            assert self.process.poll() is None, self.said()
            found = ray_process(self.node, "raylet")
            return None if found is None or found.pid == before else found.pid

        pid: int = wait_for(raylet, f"raylet of {self.node}", self.said)
        return pid


@pytest.fixture
def keep(by_hand: ByHand, short_tmp: Path) -> Iterator[Callable[[str], Kept]]:
    """Keep nodes with `--stay`; they end before the test's other nodes."""
    kept: list[Kept] = []

    def started(node: str) -> Kept:
        kept.append(Kept(by_hand, node, short_tmp / f"{node}-{len(kept)}.log"))
        return kept[-1]

    yield started
    for each in kept:
        each.process.terminate()
        each.wait()


def killed(kept: Kept, name: str) -> None:
    """Kill the process with this name on a kept node, and wait until the node has a new raylet."""
    before, raylet = ray_process(kept.node, name), ray_process(kept.node, "raylet")
    assert before is not None
    assert raylet is not None
    before.kill()
    kept.wait_until_up(raylet.pid)
    wait_for(lambda: ray_process(kept.node, name), f"{name} of {kept.node}", kept.said)
    assert "Ray has ended on this PC" in kept.said()


def test_a_kept_node_joins_whatever_cluster_its_head_has(
    nothing_left: None, by_hand: ByHand, keep: Callable[[str], Kept]
) -> None:
    """Both nodes survive slow agents, and the kills of a raylet and of the head; then they end."""
    head = keep("pc1")
    head.wait_until_up()
    node = keep("pc2")
    agent = wait_for(lambda: agent_of("pc2"), "agent of pc2")
    agent.suspend()  # on a loaded machine an agent starts too late for Ray's raylet
    try:
        wait_for(lambda: members(by_hand) == 2, "second member", node.said)
        assert "has ended" not in node.said()
    finally:
        agent.resume()
    killed(node, "raylet")
    before = session_of("pc1")
    assert session_of("pc2") == before

    # On one machine, with this file of the old cluster, Ray would take pc2's raylet for a running
    # head.
    (Path(by_hand.environment["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").unlink()
    killed(head, "gcs_server")
    wait_for(lambda: session_of("pc1") not in {None, before}, "another cluster", head.said)
    wait_for(lambda: members(by_hand) == 2, "second member of the new cluster", node.said)
    assert session_of("pc2") == session_of("pc1") != before

    node.process.send_signal(signal.SIGINT)
    assert node.wait() == 130, node.said()
    assert ray_process("pc2", "raylet") is None
    assert ray_process("pc1", "raylet") is not None
    by_hand.stop_node("pc1")
    assert head.wait() == 130, head.said()
    assert ray_process("pc1", "gcs_server") is None
