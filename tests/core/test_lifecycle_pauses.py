"""How long a slot waits before its process is started again: not at all, then longer, and never all at once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.slot import Tick
from tests.core.scene import RULES, Scene, sequences


def pauses_s(deaths: int, **scene: Any) -> list[float]:  # noqa: ANN401 - of any rule
    acted = Scene(**{"max_deaths": deaths + 1, "death_window_s": 1e9, **scene})
    acted.work()
    return [acted.die() for _ in range(deaths)]


def test_restarts_wait_longer_each_time_up_to_the_cap_and_half_of_it_is_chance() -> None:
    waited_s = pauses_s(8)
    whole_s = [0, 1, 2, 4, 5, 5, 5, 5]
    assert all(whole / 2 <= pause <= whole for pause, whole in zip(waited_s, whole_s, strict=True))
    assert len({pause / whole for pause, whole in zip(waited_s[1:], whole_s[1:], strict=True)}) == 7


def test_the_same_seed_pauses_the_same_and_another_seed_or_slot_otherwise() -> None:
    assert pauses_s(6, seed=7) == pauses_s(6, seed=7)
    assert pauses_s(6, seed=7)[1:] != pauses_s(6, seed=8)[1:]
    assert pauses_s(6, seed=7, slot="pc1/0")[1:] != pauses_s(6, seed=7, slot="pc1/1")[1:]


def test_workers_that_die_together_do_not_come_back_together() -> None:
    second_pauses_s = [
        pauses_s(2, slot=f"pc1/{index}", restart_backoff_s=60.0, restart_backoff_max_s=60.0)[1] for index in range(50)
    ]
    assert max(second_pauses_s) - min(second_pauses_s) > 20
    assert len({round(pause, 3) for pause in second_pauses_s}) == 50


@given(
    seed=st.integers(0, 2**32 - 1),
    slot=st.text(min_size=1, max_size=12),
    first_s=st.floats(0.001, 100),
    most_s=st.floats(0.001, 1000),
)
def test_a_pause_is_between_half_and_whole_and_never_beyond_the_maximum(
    seed: int, slot: str, first_s: float, most_s: float
) -> None:
    waited_s = pauses_s(7, seed=seed, slot=slot, restart_backoff_s=first_s, restart_backoff_max_s=most_s)
    assert waited_s[0] == 0
    for doublings, pause in enumerate(waited_s[1:]):
        whole = min(first_s * 2**doublings, most_s)
        # Seconds of a clock are differences here: they are exact to its rounding only.
        assert whole / 2 - 1e-6 <= pause <= whole + 1e-6
        assert pause <= most_s + 1e-6


def test_nothing_is_sent_before_the_back_off_is_over() -> None:
    scene = Scene()
    scene.work()
    scene.die()
    scene.feed(scene.failure())
    assert scene.slot.wake_at_s is not None
    left_s = scene.slot.wake_at_s - scene.now_s
    assert left_s >= 0.5
    assert scene.feed(Tick(), later_s=left_s - 0.01) == []
    assert sequences(scene.feed(Tick(), later_s=0.02)) == [6]


def test_a_thousand_deaths_overflow_nothing() -> None:
    assert max(pauses_s(1100, restart_backoff_s=0.001, restart_backoff_max_s=0.01)) <= 0.011


def test_the_first_death_after_a_quiet_window_is_met_at_once_again() -> None:
    scene = Scene()
    scene.work()
    assert scene.die() == 0
    assert scene.die() > 0
    scene.feed(scene.report(), later_s=RULES.death_window_s)
    assert scene.die() == 0
