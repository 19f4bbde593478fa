"""A memory offset is set, read back and put back, however the process that asked for it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.factories import fake_card
from tests.node_agent.conftest import Node, kill
from tests.scene import wait_for

pytestmark = pytest.mark.slow

Ready = Callable[..., Node]


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


def test_the_offset_is_put_back_when_its_process_is_killed(node: Ready) -> None:
    pc = node()
    parent = pc.parent(memory_offset_mhz=200)
    assert parent.stdout is not None
    parent.stdout.readline()
    assert pc.offsets_mhz() == [200]
    kill(parent)
    wait_for(pc.is_clean, "end of the agent")
    assert pc.offsets_mhz() == [0]


@pytest.mark.parametrize(
    ("changes", "offset_mhz", "words"),
    [
        ({}, 7000, "--sweep memory-offset at 7000 is out of range"),
        ({"fails": {"set_memory_offset": "no_permission"}}, 50,
         "can only be set by root: start Ray as root on pc1"),
        ({"memory_offset_mhz": None}, 50,
         "pc1: the memory offset of card 0 cannot be set: Not Supported"),
    ],
)  # fmt: skip
def test_a_refused_offset_puts_the_power_limit_back(
    node: Ready, changes: dict[str, Any], offset_mhz: int, words: str
) -> None:
    pc = node(fake_card(1, **changes))
    agent = pc.agent(memory_offset_mhz=offset_mhz, power_limit_w=300.0)
    assert words in str(agent.outcome().power_problem)
    assert pc.limits_w() == [350.0]
    agent.end()
    assert pc.is_clean()
