"""Power limits are set, read back and put back, however a run ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.factories import fake_card
from tests.node_agent.conftest import Node, kill
from tests.scene import PATIENCE_S, ROOT, python
from workers.host.processes import is_alive
from workers.learned_limits import STATE_DIR_VARIABLE
from workers.node_agent.protocol import AgentClient, AgentOrders, AgentOutcome, from_line, to_line

pytestmark = pytest.mark.slow

Ready = Callable[..., Node]


def test_a_limit_is_set_read_back_and_put_back_at_the_end(node: Ready) -> None:
    pc = node(fake_card(1), fake_card(2))
    agent = pc.agent(power_limit_w=280.5)
    outcome = agent.outcome()
    assert outcome.power_problem is None
    assert outcome.notes == (
        "pc1's NVIDIA GeForce RTX 3090: power limit 280.5 W until the run ends (before: 350 W)",
    )
    assert pc.limits_w() == [280.5, 350.0]  # the node lends one card
    (path,) = pc.records.glob("*.json")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, pc.records)] == [0o600, 0o700]
    told = pc.record()
    assert is_alive(told["pid"], told["started"])
    assert told["changes"] == [
        {
            "setting": "power_limit",
            "uuid": fake_card()["uuid"],
            "before": 350_000,
            "set_to": 280_500,
        }
    ]
    assert agent.end() == ("pc1's NVIDIA GeForce RTX 3090: power limit back at 350 W",)
    assert pc.limits_w() == [350.0, 350.0]
    assert pc.is_clean()


def test_the_cards_of_a_node_are_those_it_lends(
    node: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    pc = node(fake_card(1), fake_card(2), fake_card(3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    agent = pc.agent(power_limit_w=200.0, card_count=2)
    agent.outcome()
    assert pc.limits_w() == [200.0, 350.0, 200.0]
    agent.end()
    agent = pc.agent(power_limit_w=210.0, cards=(fake_card(2)["uuid"],))
    agent.outcome()
    assert pc.limits_w() == [350.0, 210.0, 350.0]
    agent.end()
    assert pc.limits_w() == [350.0, 350.0, 350.0]


@pytest.mark.parametrize(
    ("changes", "limit_w", "words"),
    [
        ({}, 99.9, "nodes.pc1.power_limit_w 99.9 is out of range: pc1's NVIDIA GeForce RTX 3090 takes 100 to 366 W"),
        ({}, 367.0, "nodes.pc1.power_limit_w 367 is out of range"),
        ({"fails": {"set_power_limit": "no_permission"}}, 280.0, "can only be set by root: start Ray as root on pc1"),
        ({"fails": {"set_power_limit": "unknown"}}, 280.0, "cannot be set: Unknown Error"),
        ({"power_limit_w": None}, 280.0, "pc1: the power limit of card 0 cannot be set: Not Supported"),
        ({"lost_after_calls": 0}, 280.0, "pc1: the power limit of card 0 cannot be set: GPU is lost"),
    ],
)  # fmt: skip
def test_a_limit_that_cannot_be_set_is_refused_in_words(
    node: Ready, changes: dict[str, Any], limit_w: float, words: str
) -> None:
    pc = node(fake_card(1, **changes))
    agent = pc.agent(power_limit_w=limit_w)
    outcome = agent.outcome()
    assert words in str(outcome.power_problem)
    assert "\n" not in str(outcome.power_problem)
    assert pc.is_clean()
    assert agent.end() == ()


def test_a_limit_that_one_card_refuses_is_set_on_none(node: Ready) -> None:
    pc = node(fake_card(1), fake_card(2, fails={"set_power_limit": "no_permission"}))
    agent = pc.agent(power_limit_w=280.0, card_count=2)
    assert "only be set by root" in str(agent.outcome().power_problem)
    assert pc.limits_w() == [350.0, 350.0]
    assert agent.end() == ()
    assert pc.is_clean()


def test_the_limit_that_a_card_has_is_left_alone(node: Ready) -> None:
    """Nobody needs to be root for that."""
    pc = node(fake_card(1, fails={"set_power_limit": "no_permission"}))
    agent = pc.agent(power_limit_w=350.0)
    outcome = agent.outcome()
    assert (outcome.power_problem, outcome.notes) == (None, ("pc1: power limit 350 W, as it was",))
    assert pc.is_clean()
    assert agent.end() == ()


def test_an_offset_and_a_power_limit_are_put_back_together(node: Ready) -> None:
    pc = node(fake_card(1, memory_offset_mhz=-100), fake_card(2))
    agent = pc.agent(memory_offset_mhz=450, power_limit_w=300.0)
    outcome = agent.outcome()
    assert outcome.power_problem is None
    assert outcome.notes[1].endswith("memory offset 450 MHz until the run ends (before: -100 MHz)")
    assert (pc.offsets_mhz(), pc.limits_w()) == ([450, 0], [300.0, 350.0])
    assert [change["setting"] for change in pc.record()["changes"]] == [
        "power_limit",
        "memory_offset",
    ]
    assert agent.end()[0].endswith("memory offset back at -100 MHz"), "last things first"
    assert (pc.offsets_mhz(), pc.limits_w()) == ([-100, 0], [350.0, 350.0])
    assert pc.is_clean()


def test_a_refused_offset_puts_the_power_limit_back(node: Ready) -> None:
    pc = node(fake_card(1))
    agent = pc.agent(memory_offset_mhz=7000, power_limit_w=300.0)
    refusal = agent.outcome().power_problem
    assert "--sweep memory-offset at 7000 is out of range" in str(refusal)
    assert pc.limits_w() == [350.0]
    agent.end()
    assert pc.is_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_guard_that_is_asked_to_end_undoes_first(node: Ready, number: signal.Signals) -> None:
    pc = node()
    agent = pc.agent(power_limit_w=280.0)
    agent.outcome()
    os.kill(pc.record()["pid"], number)
    assert agent.end() == ("pc1's NVIDIA GeForce RTX 3090: power limit back at 350 W",)
    assert pc.limits_w() == [350.0]


def test_what_a_killed_guard_left_is_put_back_by_the_next(node: Ready) -> None:
    pc = node()
    first = pc.agent(power_limit_w=280.0)
    first.outcome()
    pc.kill_guard()
    assert first.end() == ()
    assert pc.limits_w() == [280.0]
    second = pc.agent(power_limit_w=300.0)
    undone, done = second.outcome().notes
    assert (
        undone
        == "left by a run that was killed: pc1's NVIDIA GeForce RTX 3090: power limit back at 350 W"
    )
    assert "(before: 350 W)" in done
    assert pc.limits_w() == [300.0]
    second.end()
    assert pc.limits_w() == [350.0]
    assert pc.is_clean()


def test_a_guard_of_another_machine_is_none_of_ours(node: Ready) -> None:
    """A home folder may be shared."""
    pc = node()
    pc.agent(power_limit_w=280.0).outcome()
    pc.kill_guard()
    (path,) = pc.records.glob("*.json")
    path.write_text(
        path.read_text().replace(f'"host": "{pc.record()["host"]}"', '"host": "elsewhere"')
    )
    agent = pc.agent()
    assert agent.outcome().notes == ()
    agent.end()
    assert pc.limits_w() == [280.0]
    assert path.exists()


def test_what_somebody_else_has_set_meanwhile_stays(node: Ready) -> None:
    pc = node()
    agent = pc.agent(power_limit_w=280.0)
    agent.outcome()
    Path(f"{pc.fake.script_path}.limit-0").write_text("320000\n")
    assert agent.end() == (
        "pc1's NVIDIA GeForce RTX 3090: power limit left at 320 W, which another program has set meanwhile",
    )
    assert pc.limits_w() == [320.0]
    assert pc.is_clean()


def test_what_cannot_be_put_back_is_told_and_stays_written_down(
    node: Ready, library_folder: Path
) -> None:
    pc = node()
    pc.agent(power_limit_w=280.0).outcome()
    pc.kill_guard()
    refusing = node(
        fake_card(1, fails={"set_power_limit": "no_permission"})
    )  # the same script: root no more
    agent = refusing.agent()
    (sentence,) = agent.outcome().notes
    assert (
        "could not be put back: Insufficient Permissions; type: sudo nvidia-smi -i GPU-1aaaaaaa"
        in sentence
    )
    assert sentence.endswith("-pl 350")
    agent.end()
    assert not pc.is_clean()


def test_two_runs_do_not_set_the_same_card(node: Ready) -> None:
    pc = node()
    first = pc.agent(power_limit_w=280.0)
    first.outcome()
    impatient = "from workers.node_agent import agent; agent._OTHER_S = 0.3; agent.main()"
    orders = to_line(pc.orders(power_limit_w=200.0))
    done = subprocess.run(
        [sys.executable, "-c", impatient],
        input=f"{orders}\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    outcome, undone = done.stdout.splitlines()
    words = f"another run has set a power limit on its cards (the agent is process {pc.record()['pid']})"
    assert words in str(from_line(AgentOutcome, outcome).power_problem)
    assert undone == "[]"
    assert pc.limits_w() == [280.0]
    first.end()
    assert pc.limits_w() == [350.0]


def test_a_guard_that_is_started_again_waits_for_the_one_before(node: Ready) -> None:
    pc = node()
    parent = pc.parent(power_limit_w=280.0)
    assert parent.stdout is not None
    parent.stdout.readline()
    again = pc.agent(power_limit_w=280.0)
    kill(parent)
    assert "(before: 350 W)" in again.outcome().notes[-1]
    assert pc.limits_w() == [280.0]
    again.end()
    assert pc.limits_w() == [350.0]


def test_nothing_is_changed_that_cannot_be_written_down(
    node: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pc = node()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "file"))
    agent = pc.agent(power_limit_w=280.0, mps=True)
    outcome = agent.outcome()
    assert "nothing is changed that could not be written down" in str(outcome.power_problem)
    assert outcome.mps_problem == outcome.power_problem
    agent.end()
    assert pc.limits_w() == [350.0]


def test_what_is_no_record_is_left_alone(node: Ready) -> None:
    pc = node()
    pc.records.mkdir(parents=True)
    for name, text in {
        "a": "",
        "b": "[]",
        "c": '{"schema": 1}',
        "d": '{"schema": 2, "changes": [{}]}',
    }.items():
        (pc.records / f"{name}.json").write_text(text)
    agent = pc.agent(power_limit_w=280.0)
    assert agent.outcome().power_problem is None
    agent.end()
    assert len(list(pc.records.glob("?.json"))) == 4


def test_without_a_driver_the_guard_says_so(nothing_left: None) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    agent = AgentClient(AgentOrders(node="pc1", run_id="x", card_count=1, power_limit_w=280.0))
    assert "pc1: its driver does not answer: NVML Shared Library Not Found" in str(
        agent.outcome().power_problem
    )
    assert agent.end() == ()


def test_an_agent_finds_its_package_wherever_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for by name, and the folder in which it is started is not searched."""
    told = json.dumps({**asdict(AgentOutcome()), "notes": ["%s"]})
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\nread orders\nprintf '{told}\\n' \"$PYTHONPATH\"\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setenv("PYTHONPATH", "/mine")
    agent = AgentClient(AgentOrders(node="pc1", run_id="x", card_count=1))
    assert agent.outcome().notes == (f"{ROOT}:/mine",)
    assert agent.end() == ()


def test_what_is_left_can_be_put_back_by_hand(nothing_left: None) -> None:
    done = python("-m", "workers.node_agent.agent", "--undo", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    has_driver = Path("/dev/nvidiactl").exists()
    assert ("nothing is left of runs that were killed" in done.stdout) == has_driver
    assert ("the driver of this machine does not answer" in done.stdout) != has_driver
