"""What a rehearsal uses of this machine: its card if that has room, and useful number types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.run.environment import CpuRates, Environment, in_rehearsal
from tests.cards import script_cards, scripted_card
from tests.factories import REFERENCE
from tests.run.scripted_fleet import ScriptedFleet, VirtualClock
from tests.scene import ROOT, python

DEVICE = """
from orchestrator.config.load import load_config
from orchestrator.run.environment import in_rehearsal
print(in_rehearsal(load_config("cluster.yaml", [])).target.device)
"""


class Measured(CpuRates):
    """A CPU of which the rates are known."""

    def __init__(self, ratio: float | None) -> None:
        super().__init__()
        self._ratio = ratio

    def bf16_per_fp32(self) -> float | None:
        return self._ratio


def settled(ratio: float | None) -> tuple[Environment, Environment]:
    with_rates = replace(in_rehearsal(REFERENCE), rates=Measured(ratio))
    return with_rates, with_rates.settle(with_rates, ScriptedFleet(VirtualClock()))


@pytest.mark.parametrize("ratio", [None, 0.25, 2.0])
def test_a_useful_type_is_rehearsed_as_it_is(ratio: float | None) -> None:
    before, after = settled(ratio)
    assert after is before


def test_a_useless_type_is_rehearsed_in_fp32() -> None:
    before, after = settled(0.02)
    assert after.config.workload.dtype == "fp32"
    assert after.config.nodes["pc1"].size == 1472  # 2048 / 1.41, a multiple of 64
    assert before.config.nodes["pc1"].size == 2048
    assert after.lines == (
        "This CPU computes bf16 at 0.02 of the rate of fp32: rehearsed in fp32, sizes x 0.71, the same bytes",
    )


@pytest.mark.torch
def test_the_rates_of_this_cpu_are_measured() -> None:
    rates = CpuRates()
    rates.measure()
    assert (rates.bf16_per_fp32() or 0.0) > 0.0


def test_a_rehearsal_leaves_a_card_without_room_alone(tmp_path: Path) -> None:
    full = script_cards(tmp_path / "cards.json", scripted_card())
    done = python("-c", DEVICE, cwd=ROOT, **full)
    assert (done.stdout, done.stderr) == ("cpu\n", "")
