"""The heap of timers against the plain rule: a slot comes up when its earliest moment has come, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.run.supervisor import Timers

MOMENTS = st.integers(0, 50).map(float)
CALLS = st.lists(st.tuples(st.sampled_from("abc"), MOMENTS | st.none()) | MOMENTS, max_size=60)


@given(CALLS)
def test_a_slot_comes_up_once_when_its_earliest_moment_has_come(
    calls: list[tuple[str, float | None] | float],
) -> None:
    timers = Timers()
    earliest: dict[str, float] = {}
    for call in calls:
        if isinstance(call, tuple):
            slot, at_s = call
            timers.set(slot, at_s)
            if at_s is not None:
                earliest[slot] = min(at_s, earliest.get(slot, at_s))
        else:
            due = {slot for slot, at_s in earliest.items() if at_s <= call}
            found = timers.due(call)
            assert sorted(found) == sorted(due)
            for slot in due:
                del earliest[slot]
