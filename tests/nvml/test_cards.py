"""The cards of a machine: which there are, what they say, and who holds them."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.cards import scripted_card
from tests.nvml.conftest import Script
from tests.scene import wait_for
from workers.host.machine import is_visible, look_at_cards, visible_cards
from workers.host.processes import SilenceMeter
from workers.nvml import queries
from workers.units import GIB, MIB


def test_what_a_card_says_and_who_holds_it(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    holders = [
        {"pid": os.getpid(), "used_bytes": GIB},
        {"pid": 2**22 + 5, "used_bytes": None, "kind": "graphics"},
    ]
    script(scripted_card(processes=holders, used_bytes=GIB), driver="580.1", cuda_driver=13010)
    found = look_at_cards()
    assert (found.driver, found.driver_cuda, found.nvml_error) == ("580.1", (13, 1), None)
    (card,) = found.cards
    assert (card.index, card.uuid, card.compute_capability) == (0, scripted_card()["uuid"], (8, 6))
    assert (card.used_bytes, card.free_bytes, card.visible) == (GIB, 23 * GIB, True)
    # What this card does not tell is unknown, not nothing.
    assert (card.persistence, card.display) == (None, None)
    assert [(holder.pid, holder.name, holder.used_bytes) for holder in card.holders] == [
        (os.getpid(), psutil.Process().name(), GIB),
        (2**22 + 5, None, None),
    ]


def test_a_card_that_does_not_answer_never_hides_the_others(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nameless = scripted_card(2, fails={"name": "unknown"})
    script(scripted_card(1, lost=True), nameless, scripted_card(3))
    found = look_at_cards()
    assert found.card_errors == ("card 0 is lost", "card 1 does not answer")
    assert [card.index for card in visible_cards()] == [2]


def test_without_a_driver_it_is_said_why(stub: None) -> None:
    assert look_at_cards().nvml_error == "NVML Shared Library Not Found"
    assert visible_cards() == ()


@pytest.mark.parametrize(
    ("setting", "visible"),
    [(None, True), ("0", True), ("1", False), ("", False), ("1, 0", True), ("GPU-1aaa", True),
     ("GPU-2", False)],
)  # fmt: skip
def test_which_cards_are_visible(setting: str | None, *, visible: bool) -> None:
    assert is_visible(0, "GPU-1aaaaaaa-0000", setting) is visible


@pytest.mark.parametrize(
    ("reserved_mib", "missing"), [(380, []), (0, []), (0, ["nvmlDeviceGetMemoryInfo_v2"])]
)
def test_the_reserve_of_the_driver_belongs_to_no_budget(
    script: Script, reserved_mib: int, missing: list[str]
) -> None:
    """An older driver leaves it out of what it calls the total."""
    sizes = {"total_bytes": 12288 * MIB, "used_bytes": MIB, "reserved_bytes": reserved_mib * MIB}
    script(scripted_card(**sizes), missing_functions=missing)
    shown_mib = 12288 - reserved_mib
    assert queries.card_total_bytes("0") == look_at_cards().cards[0].total_bytes == shown_mib * MIB
    assert queries.card_used_bytes("0") == MIB
    assert queries.card_free_bytes("0") == (shown_mib - 1) * MIB


def test_a_process_whose_card_computes_is_at_work(script: Script) -> None:
    """Though it uses no CPU. Where the driver does not tell for whom a card computes, it counts."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    wait_for(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_SLEEPING, "its sleep")
    try:
        for utilisation_pct, computes in ((97, True), (0, False)):
            script(scripted_card(utilisation_pct=utilisation_pct))
            activity = SilenceMeter(on_card=True).activity(sleeper.pid)
            assert activity.on_card is computes
        script(scripted_card(utilisation_pct=97))
        quiet = SilenceMeter(on_card=True).measure(sleeper.pid, 0.0)
        assert quiet.computed_s > 0
    finally:
        sleeper.kill()
        sleeper.wait()
