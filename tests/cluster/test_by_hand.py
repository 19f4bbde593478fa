"""Two nodes started by hand, with nothing but what `up` prints; and a run on them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, Starter, wait_for

pytestmark = pytest.mark.ray

#: Asks Ray itself, not us, how many living actors each node has.
_ASK_RAY = """
import json, ray
from ray._private.state import actors
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
names = {node["NodeID"]: node["Labels"].get("node") for node in ray.nodes()}
alive = [names[a["Address"]["NodeID"]] for a in actors().values() if a["State"] == "ALIVE"]
print(json.dumps({name: alive.count(name) for name in set(alive)}))
"""


class ByHand:
    """A user's shell on a PC, with a home and a Ray of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (folder / "home").mkdir()
        scripts = str(Path(sys.executable).parent)
        self.environment = {
            "HOME": str(folder / "home"),
            "RAY_TMPDIR": str(folder),
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        }
        self.arguments = ("--set", f"cluster.port={self.port}")

    def orchestrator(self, *arguments: str) -> str:
        return self._run([sys.executable, "-m", "orchestrator", *arguments, *self.arguments])

    def type_what_up_prints(self, node: str) -> str:
        return self._run(["bash", "-e", "-c", self.orchestrator("up", node)])

    def ask_ray(self) -> dict[str, int]:
        environment = {"RAY_AUTH_MODE": "token"}
        return dict(json.loads(self._run([sys.executable, "-c", _ASK_RAY], **environment).splitlines()[-1]))

    def _run(self, command: list[str], **environment: str) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def by_hand(nothing_left: None, short_tmp: Path) -> Iterator[ByHand]:
    shell = ByHand(short_tmp)
    yield shell
    shell.orchestrator("stop", "--node", "pc2")
    shell.orchestrator("stop", "--node", "pc1")


def test_nodes_started_by_hand_run_seven_and_three_and_a_missing_one_is_named_or_awaited(
    start: Starter, by_hand: ByHand
) -> None:
    by_hand.type_what_up_prints("pc1")
    token = Path(by_hand.environment["HOME"], ".ray", "auth_token")
    assert token.stat().st_mode & 0o077 == 0

    began = time.monotonic()
    refused = start("--duration", "30s", "--json", *by_hand.arguments, environment=by_hand.environment)
    code, out, err = refused.finish()
    assert code == 3
    assert time.monotonic() - began < 10  # the one promise of this product that is about seconds
    error = json.loads(out)["error"]
    assert "node=pc2" in error
    assert f"--address={own_address(by_hand)}" in error
    assert token.read_text() not in out + err + error

    awaiting = ("--wait-for-nodes", *by_hand.arguments)
    head = start("--duration", "5", "--json", *awaiting, environment=by_hand.environment)
    head.wait_until_running(7)
    by_hand.type_what_up_prints("pc2")
    head.wait_until_running(10)
    assert by_hand.ask_ray() == {"pc1": 7, "pc2": 3}
    by_hand.orchestrator("stop", "--set", f"run.dir={head.runs}")
    code, out, err = head.finish()
    assert code == 130, err
    summary = json.loads(out)
    assert summary["outcome"] == "interrupted"
    assert [row["node"] for row in summary["workers"] if row["steps_ok"] > 0] == ["pc1"] * 7 + ["pc2"] * 3
    wait_for(lambda: by_hand.ask_ray() == {}, 10, "end of the actors with their head")
    assert token.read_text() not in "".join(
        path.read_text(errors="replace")
        for path in head.folder().iterdir()
        if path.suffix in {".jsonl", ".json", ".log"}
    )


def own_address(by_hand: ByHand) -> str:
    line = by_hand.orchestrator("up", "pc2").splitlines()[-1]
    return line.split("--address=")[1].split()[0]
