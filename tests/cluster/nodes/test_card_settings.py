"""Cards of a node are set by an actor on it, and are put back when the block or its process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cards import script_cards, scripted_card
from tests.scene import ROOT, orchestrator, wait_for
from workers.host.processes import is_alive

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("nothing_left")]

#: A head as far as cards are concerned: it may be killed, or told to end.
HEAD = """
import sys
from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from workers.card_settings import WantedSettings

wanted = {"pc1": WantedSettings(node="pc1", cards=1, power_limit_w=280)}
def ended(node, lines):
    print(node, *lines, flush=True)
with rehearsed([RayletPlan(name="pc1", cpus=1, gpus=1)]):
    from orchestrator.cluster.node_tasks import with_cards_set  # Ray reads its settings when imported
    with with_cards_set(wanted, ended, lambda: False) as outcomes:
        print(outcomes["pc1"], flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def limit_w(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give processes a card; return what asks for its power limit."""
    path = tmp_path / "cards.json"
    for name, value in script_cards(path, scripted_card()).items():
        monkeypatch.setenv(name, value)
    uuid, values = scripted_card()["uuid"], path.with_suffix(".set")
    return lambda: json.loads(values.read_text())[uuid]["power_limit_w"] if values.exists() else 350


def start() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    head: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-c", HEAD], text=True, cwd=ROOT, **pipes
    )
    assert head.stdout is not None
    told = head.stdout.readline()
    assert "power limit 280 W until the run ends (before: 350 W)" in told, told
    return head


def test_a_limit_is_put_back_when_the_run_ends(limit_w: Any) -> None:
    head = start()
    assert limit_w() == 280
    told, _ = head.communicate("")
    assert told.startswith("pc1 pc1: the power limit of card GPU-1")
    assert limit_w() == 350


def test_a_limit_is_put_back_after_the_head_was_killed(limit_w: Any, state_dir: Path) -> None:
    head = start()
    os.kill(head.pid, signal.SIGKILL)
    head.communicate()
    (record,) = (state_dir / "kept").glob("*.json")
    holder = json.loads(record.read_text())
    wait_for(lambda: not is_alive(holder["pid"], holder["started"]), "end of the actor")
    done = orchestrator("stop", cwd=state_dir)
    assert "is back at 350 W" in done.stdout, done.stdout + done.stderr
    assert limit_w() == 350
