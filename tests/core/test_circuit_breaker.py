"""When a card is given up: all of its workers keep dying, and there is more than one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.circuit_breaker import cards_to_quarantine
from orchestrator.core.slot import Phase, Rules, Slot
from tests.factories import CPU, RULES, status_of

NOW_S = 10_000.0
CARD = "pc1's NVIDIA GeForce RTX 3090"


def worker(index: int, deaths: int, *, ago_s: float = 1.0, **changes: Any) -> Slot:
    """Return a worker that died so often, so long ago, and waits to be started again."""
    died = tuple(NOW_S - ago_s - deaths + death for death in range(deaths))
    usual: dict[str, Any] = {"phase": Phase.PAUSING, "deaths_at_s": died, "placed": True}
    return Slot(slot=f"pc1/{index}", **{**usual, **changes})


def is_faulty(*slots: Slot, rules: Rules = RULES) -> bool:
    return CARD in cards_to_quarantine({CARD: slots}, NOW_S, rules)


def test_a_card_whose_workers_all_die_is_quarantined() -> None:
    assert not is_faulty(worker(0, 100)), "with one worker the card is not blamed"
    slots = [
        worker(index, 3 + index, ago_s=7.0 - index, reason=f"reason {index}") for index in range(7)
    ]
    text = f"{CARD}: all 7 workers keep dying, at least 3 times each in 300 s; the last: reason 6"
    assert cards_to_quarantine({CARD: slots}, NOW_S, RULES) == {CARD: text}
    # Where to look in the hardware is said only of hardware.
    on_card = [replace(slot, device=replace(CPU, kind="cuda")) for slot in slots]
    hint = "; look for Xid errors in dmesg, and at power and cables"
    assert cards_to_quarantine({CARD: on_card}, NOW_S, RULES) == {CARD: text + hint}
    on_cpu = [replace(slot, device=CPU) for slot in slots]
    assert cards_to_quarantine({CARD: on_cpu}, NOW_S, RULES) == {CARD: text}


@given(
    deaths=st.lists(st.integers(0, 5), min_size=2, max_size=7),
    phases=st.lists(st.sampled_from(list(Phase)), min_size=7, max_size=7),
    ready=st.lists(st.booleans(), min_size=7, max_size=7),
    gone=st.integers(0, 6),
)
def test_a_card_with_a_working_or_absent_worker_is_not_sick(
    deaths: list[int], phases: list[Phase], ready: list[bool], gone: int
) -> None:
    up = status_of("pc1/0")
    slots = [
        worker(i, count, phase=phases[i], runs=ready[i], status=up)
        for i, count in enumerate(deaths)
    ]
    spared = any(
        slot.phase in {Phase.ABSENT, Phase.HELD, Phase.STOPPED, Phase.DONE}
        or (slot.phase is Phase.WORKING and slot.ready)
        for slot in slots
    )
    fine = any(slot.phase is not Phase.QUARANTINED and len(slot.deaths_at_s) < 3 for slot in slots)
    over = all(slot.phase is Phase.QUARANTINED for slot in slots)
    assert is_faulty(*slots) == (not spared and not fine and not over)
