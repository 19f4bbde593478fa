"""A card is given up if it has more than one worker, and all of them keep dying."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.circuit_breaker import cards_to_quarantine
from orchestrator.core.slot import Phase, Slot
from tests.factories import CPU, status_of

NOW_S = 10_000.0
CARD = "pc1's NVIDIA GeForce RTX 3090"


def worker(index: int, deaths: int, *, ago_s: float = 1.0, **changes: Any) -> Slot:
    """Return a worker that died `deaths` times, the last about `ago_s` ago, and will restart."""
    died = tuple(NOW_S - ago_s - deaths + death for death in range(deaths))
    usual: dict[str, Any] = {"phase": Phase.PAUSING, "deaths_at_s": died, "placed": True}
    return Slot(slot=f"pc1/{index}", **{**usual, **changes})


def is_faulty(*slots: Slot) -> bool:
    return CARD in cards_to_quarantine({CARD: slots}, NOW_S, 300.0)


def test_a_card_whose_workers_all_die_is_quarantined() -> None:
    assert not is_faulty(worker(0, 100)), "with one worker the card is not blamed"
    slots = [
        worker(index, 3 + index, ago_s=7.0 - index, reason=f"reason {index}") for index in range(7)
    ]
    text = f"{CARD}: all 7 workers keep dying, at least 3 times each in 300 s; the last: reason 6"
    assert cards_to_quarantine({CARD: slots}, NOW_S, 300.0) == {CARD: text}
    # Only a real card gets a hint about its hardware.
    on_card = [replace(slot, device=replace(CPU, kind="cuda")) for slot in slots]
    hint = "; look for Xid errors in dmesg, and at power and cables"
    assert cards_to_quarantine({CARD: on_card}, NOW_S, 300.0) == {CARD: text + hint}
    on_cpu = [replace(slot, device=CPU) for slot in slots]
    assert cards_to_quarantine({CARD: on_cpu}, NOW_S, 300.0) == {CARD: text}


@pytest.mark.parametrize(
    "other",
    [
        {"phase": Phase.WORKING, "runs": True, "status": status_of("pc1/0")},
        *({"phase": phase} for phase in (Phase.ABSENT, Phase.HELD, Phase.STOPPED, Phase.DONE)),
        {"deaths": 2},
    ],
)
def test_a_card_with_a_worker_that_is_well_or_not_there_is_not_sick(other: dict[str, Any]) -> None:
    assert not is_faulty(worker(0, 3), worker(1, **{"deaths": 3, **other}))


def test_a_card_of_which_all_workers_were_given_up_already_is_left_alone() -> None:
    given_up = worker(1, 0, phase=Phase.QUARANTINED)
    assert is_faulty(worker(0, 3), given_up)
    assert not is_faulty(given_up, replace(given_up, slot="pc1/2"))
