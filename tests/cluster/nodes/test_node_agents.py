"""What a run sets on cards is put back however it ends: the agents of real runs, over the fake cards of a rehearsal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.conftest import SMALL, Head, Starter, descendants
from tests.scene import ROOT, wait_for

HEAT = str(ROOT / "scripts" / "heat.json")
LIMITED = ("--rehearse", "--fake-sensors", HEAT, *SMALL, "--set", "nodes.pc1.power_limit_w=280")

pytestmark = pytest.mark.ray


def limit_w(head: Head) -> float | None:
    """The limit that the first fake card was given; `None` before it was given any."""
    path = head.folder() / "fake-sensors" / "heat.sensors.limit-0"
    return int(path.read_text()) / 1000 if path.exists() else None


def record(state: Path) -> dict[str, Any] | None:
    """What the agent has written down, if there is one."""
    for path in (state / "kept").glob("*.json"):
        return dict(json.loads(path.read_text()))
    return None


def keeper() -> psutil.Process | None:
    """The process of the one actor that has an agent."""
    for process in descendants():
        with contextlib.suppress(psutil.Error):  # it has ended since
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::NodeAgentActor"):
                return process
    return None


def test_a_limit_is_put_back_when_actor_run_or_head_ends(start: Starter, state_dir: Path) -> None:
    head = start(*LIMITED, "--duration", "10m", "--apply-power-limit")
    head.wait_until_running(3)
    assert limit_w(head) == 280.0
    first = record(state_dir)
    assert first is not None
    actor = wait_for(keeper, "keeper")

    actor.kill()  # Ray starts it again, and it another agent, which finds what was there before the first
    second = wait_for(
        lambda: (found := record(state_dir)) and found["pid"] != first["pid"] and found, "agent"
    )
    assert second["changes"] == [{**first["changes"][0], "before": 350_000}]
    wait_for(lambda: limit_w(head) == 280.0, "limit")

    head.process.send_signal(signal.SIGINT)
    code, _, err = head.finish()
    assert code == 130, err
    assert limit_w(head) == 350.0
    assert record(state_dir) is None
    (restored,) = [event for event in head.events() if event["event"] == "node_restored"]
    assert restored["text"] == "pc1's NVIDIA GeForce RTX 3090: power limit back at 350 W"
    assert (
        "pc1's NVIDIA GeForce RTX 3090: power limit 280 W until the run ends (before: 350 W)" in err
    )

    killed = start(*LIMITED, "--duration", "10m", "--apply-power-limit")
    killed.wait_until_running(3)
    assert limit_w(killed) == 280.0
    os.kill(killed.process.pid, signal.SIGKILL)
    wait_for(lambda: record(state_dir) is None, "agent that undoes")
    assert limit_w(killed) == 350.0
    wait_for(
        lambda: not list(killed.runs.parent.glob("orch-*")), "removal of the rehearsal's folder"
    )


def test_ctrl_c_is_heard_while_a_guard_waits_for_another(start: Starter, state_dir: Path) -> None:
    (state_dir / "kept").mkdir(mode=0o700, parents=True)
    with (state_dir / "kept" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as an agent of another run has it
        head = start(*LIMITED, "--duration", "10m", "--apply-power-limit")
        wait_for(keeper, "keeper")
        head.process.send_signal(signal.SIGINT)
        code, _, err = head.finish()
    assert code == 130, err
    assert head.summary()["outcome"] == "interrupted"
    wait_for(
        lambda: record(state_dir) is None, "agent that undoes what it did when the lock was free"
    )
    assert limit_w(head) in {None, 350.0}
