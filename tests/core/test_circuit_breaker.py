"""When a card is given up: all of its workers keep dying, and there is more than one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.circuit_breaker import cards_to_quarantine
from orchestrator.core.lifecycle import advance
from orchestrator.core.slot import CardQuarantined, Phase, Rules, Slot
from tests.core.scene import CPU, RULES, Scene

NOW_S = 10_000.0
CARD = "pc1's NVIDIA GeForce RTX 3090"


def worker(index: int, deaths: int, *, ago_s: float = 1.0, **changes: Any) -> Slot:  # noqa: ANN401 - of any field
    """Return a worker that died so often, so long ago, and waits to be started again."""
    died = tuple(NOW_S - ago_s - deaths + death for death in range(deaths))
    usual: dict[str, Any] = {"phase": Phase.PAUSING, "deaths_at_s": died, "placed": True}
    return Slot(slot=f"pc1/{index}", **{**usual, **changes})


def healthy(index: int) -> Slot:
    return worker(index, 0, phase=Phase.WORKING, ready=True)


def quarantined(index: int) -> Slot:
    return worker(index, 6, phase=Phase.QUARANTINED)


def is_faulty(*slots: Slot, rules: Rules = RULES) -> bool:
    return CARD in cards_to_quarantine({CARD: slots}, NOW_S, rules)


def test_a_card_on_which_every_worker_keeps_dying_is_quarantined_with_one_message() -> None:
    slots = [worker(index, 3 + index, ago_s=7.0 - index, reason=f"reason {index}") for index in range(7)]
    text = f"{CARD}: all 7 workers keep dying, at least 3 times each in 300 s; the last: reason 6"
    assert cards_to_quarantine({CARD: slots}, NOW_S, RULES) == {CARD: text}
    # Where to look in the hardware is said only of hardware.
    on_card = [replace(slot, device=replace(CPU, kind="cuda")) for slot in slots]
    hint = "; look for Xid errors in dmesg, and at power and cables"
    assert cards_to_quarantine({CARD: on_card}, NOW_S, RULES) == {CARD: text + hint}
    on_cpu = [replace(slot, device=CPU) for slot in slots]
    assert cards_to_quarantine({CARD: on_cpu}, NOW_S, RULES) == {CARD: text}


def test_a_card_is_quarantined_once() -> None:
    slots = [worker(index, 3) for index in range(3)]
    (reason,) = cards_to_quarantine({CARD: slots}, NOW_S, RULES).values()
    given_up = [advance(slot, CardQuarantined(reason=reason), NOW_S, RULES, None)[0] for slot in slots]
    assert [slot.phase for slot in given_up] == [Phase.QUARANTINED] * 3
    assert cards_to_quarantine({CARD: given_up}, NOW_S, RULES) == {}


def test_only_the_sick_card_of_several_is_faulty() -> None:
    sick = [worker(0, 3), worker(1, 3)]
    well = [worker(2, 3), healthy(3)]
    assert list(cards_to_quarantine({"a": well, "b": sick, "c": []}, NOW_S, RULES)) == ["b"]


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(healthy(9), id="works"),
        pytest.param(worker(9, 5, phase=Phase.WORKING, ready=True), id="died often and works again"),
        pytest.param(worker(9, 2), id="died twice"),
        pytest.param(worker(9, 0), id="waits, and never died"),
        pytest.param(worker(9, 5, phase=Phase.ABSENT), id="its node is gone"),
        pytest.param(worker(9, 5, phase=Phase.STOPPED), id="has stopped"),
        pytest.param(worker(9, 5, ago_s=RULES.death_window_s), id="died long ago"),
    ],
)
def test_one_worker_that_does_not_keep_dying_speaks_for_its_card(one: Slot) -> None:
    assert not is_faulty(*(worker(index, 3) for index in range(6)), one)
    assert is_faulty(*(worker(index, 3) for index in range(6)))


def test_a_worker_that_was_started_again_and_has_not_answered_yet_still_counts_as_dying() -> None:
    assert is_faulty(worker(0, 3), worker(1, 3, phase=Phase.WORKING, ready=False))


def test_with_one_worker_nobody_can_tell_the_worker_from_the_card() -> None:
    assert not is_faulty(worker(0, 100))
    assert not is_faulty()


def test_workers_that_were_given_up_before_count_as_dying() -> None:
    assert is_faulty(quarantined(0), quarantined(1), worker(2, 3))


def test_a_card_whose_workers_were_all_given_up_one_by_one_needs_no_message() -> None:
    assert not is_faulty(quarantined(0), quarantined(1))


@pytest.mark.parametrize(("ago_s", "counts"), [(296.0, True), (298.0, False), (1e6, False)])
def test_deaths_count_while_they_are_in_the_window(ago_s: float, counts: bool) -> None:
    """The oldest of three deaths lies three seconds further back than the others say: at 299 s, and at 301 s."""
    assert is_faulty(worker(0, 3), worker(1, 3, ago_s=ago_s)) == counts


@given(
    deaths=st.lists(st.integers(0, 5), min_size=2, max_size=7),
    phases=st.lists(st.sampled_from(list(Phase)), min_size=7, max_size=7),
    ready=st.lists(st.booleans(), min_size=7, max_size=7),
    gone=st.integers(0, 6),
)
def test_a_card_with_a_worker_at_work_or_an_absent_one_is_never_sick(
    deaths: list[int], phases: list[Phase], ready: list[bool], gone: int
) -> None:
    slots = [worker(i, count, phase=phases[i], ready=ready[i]) for i, count in enumerate(deaths)]
    spared = any(
        slot.phase in {Phase.ABSENT, Phase.STOPPED} or (slot.phase is Phase.WORKING and slot.ready) for slot in slots
    )
    fine = any(slot.phase is not Phase.QUARANTINED and len(slot.deaths_at_s) < 3 for slot in slots)
    over = all(slot.phase is Phase.QUARANTINED for slot in slots)
    assert is_faulty(*slots) == (not spared and not fine and not over)


def test_workers_that_really_die_together_condemn_their_card_before_each_is_given_up_by_itself() -> None:
    scenes = [Scene(slot=f"pc1/{index}") for index in range(3)]

    def named() -> list[str]:
        now_s = max(scene.now_s for scene in scenes)
        return list(cards_to_quarantine({CARD: [scene.slot for scene in scenes]}, now_s, RULES))

    for scene in scenes:
        scene.work()
        scene.die()
        scene.die()
    assert named() == []
    for scene in scenes:
        assert named() == [], "there is one that has not died for the third time"
        scene.feed(scene.failure())
    assert [scene.slot.phase for scene in scenes] == [Phase.PAUSING] * 3
    assert named() == [CARD]
