"""The election of a team's leader: a table of cases, and invariants for any state of members."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.team import NO_STATE, Election, Member, elect
from workers.messages import TeamState, TeamStatus

NOW_S = 1000.0
PATIENCE_S = 120.0


def told(step: int | None, generation: int | None = None, **changes: Any) -> TeamStatus:
    """Return a status of a member that waits for its first orders, or has joined its leader."""
    state = TeamState.REJOINING if generation is None else TeamState.TOGETHER
    usual: dict[str, Any] = {
        "state": state,
        "listens": "10.0.0.1:6390",
        "generation": generation,
        "step": step,
    }
    return TeamStatus(**{**usual, **changes})


def member(slot: str, team: TeamStatus | None = None, **changes: Any) -> Member:
    """Return a member that is up, reports, and has stored nothing."""
    usual: dict[str, Any] = {
        "slot": slot,
        "process": 0,
        "gone": None,
        "may_begin": team is not None and team.step is not None,
        "is_awaited": False,
        "late_s": -0.5,
        "stored_step": NO_STATE,
        "team": team,
    }
    return Member(**{**usual, **changes})


def starting(slot: str, stored_step: float = NO_STATE) -> Member:
    gone = "its process has ended"
    return member(slot, gone=gone, is_awaited=True, late_s=math.inf, stored_step=stored_step)


#: pc1/0 leads the third generation, from step 100 on.
LED = Election(generation=3, leader="a", address="10.0.0.1:6390", step=100)
LEADER = member("a", told(140, 3))
DEAD = member("a", gone="its process has ended", late_s=math.inf)
HELPER = member("b", told(140, 3))
LEFT = member("b", told(140, 3, lost=3, state=TeamState.REJOINING))


@pytest.mark.parametrize(
    ("before", "members", "leader", "generation"),
    [
        # At the beginning no member can have a state, so the election waits for no member.
        (Election(), [starting("a"), starting("b")], None, 0),
        (Election(), [starting("a"), member("b", told(0))], "b", 1),
        (Election(), [member("a", told(None)), member("b", told(0))], "b", 1),
        (Election(), [member("a", told(0)), member("b", told(0))], "a", 1),
        (Election(), [member("a", told(7)), member("b", told(9))], "b", 1),
        # A leader stays while it reports, or its helpers report that they are together with it.
        (LED, [LEADER, LEFT], "a", 3),
        (LED, [replace(LEADER, late_s=9.0), HELPER], "a", 3),
        (LED, [replace(LEADER, late_s=9.0), LEFT, replace(HELPER, slot="c")], "a", 3),
        (LED, [LEADER, member("b", told(999))], "a", 3),
        # It is replaced after its process has ended, or after all have lost it and it is silent.
        (LED, [DEAD, LEFT], "b", 4),
        (LED, [member("a", told(100), process=1), LEFT], "b", 4),
        (LED, [member("a", told(100), process=1), replace(DEAD, slot="b")], "a", 4),
        (LED, [replace(LEADER, late_s=2.3), LEFT], "b", 4),
        (LED, [replace(LEADER, late_s=2.3), replace(LEFT, slot="c"), LEFT], "c", 4),
        (LED, [replace(LEADER, team=told(90, 3, lost=3)), LEFT], "b", 4),
        (LED, [replace(LEADER, team=told(90, 3, lost=3)), replace(DEAD, slot="b")], "a", 4),
        # A member that lost another generation's leader, or may not lead, does not count.
        (LED, [replace(LEADER, late_s=9.0), member("b", told(9, 3, lost=2))], "a", 3),
        (LED, [DEAD, replace(LEFT, may_begin=False)], None, 3),
        (LED, [DEAD, replace(LEFT, late_s=0.6)], None, 3),
        # The election waits 1 s for another helper that may not know yet that its leader is gone.
        (LED, [DEAD, HELPER, replace(LEFT, slot="c", team=told(139, 3, lost=3))], "b", 4),
        (LED, [DEAD, LEFT, replace(HELPER, slot="c")], None, 3),
        # The election does not wait for an older state, or for a lost PC.
        (LED, [starting("a", 140), LEFT], "b", 4),
        (LED, [replace(starting("a", 90), reached_step=140), LEFT], "b", 4),
        (LED, [member("a", told(120), process=1, reached_step=200), LEFT], "b", 4),
        (LED, [member("a", gone="its PC is lost", stored_step=math.inf), LEFT], "b", 4),
        # A member without a state may not define it.
        (LED, [DEAD, member("b", told(0))], "b", 4),
        (LED, [DEAD, member("b", told(None))], None, 3),
        (LED, [DEAD, member("b", told(0), stored_step=50)], "b", 4),
    ],
)  # fmt: skip
def test_who_leads(
    before: Election, members: list[Member], leader: str | None, generation: int
) -> None:
    began = before if before.leader else replace(before, since_s=NOW_S)
    after = elect(began, members, NOW_S, PATIENCE_S)
    assert (after.leader, after.generation) == (leader, generation)
    assert leader is None or after.waits_for is None


@pytest.mark.parametrize(
    ("members", "until_s", "leader"),
    [
        # The newest of the known members, although they may not know yet.
        ([DEAD, LEFT, replace(HELPER, slot="c", team=told(139, 3))], 1.0, "b"),
        # A newer state may arrive: it is on a disk, or unknown to this head.
        ([starting("a", 141), LEFT], PATIENCE_S, "b"),
        ([starting("a", math.inf), LEFT], PATIENCE_S, "b"),
        ([replace(starting("a"), reached_step=7), member("b", told(0))], PATIENCE_S, "b"),
        ([member("a", told(None), process=1, stored_step=141), LEFT], PATIENCE_S, "b"),
        ([replace(DEAD, stored_step=50), member("b", told(0))], 1e6, None),
    ],
)
def test_waiting_has_a_bound_unless_a_state_would_be_lost(
    members: list[Member], until_s: float, leader: str | None
) -> None:
    waiting = elect(LED, members, NOW_S, PATIENCE_S)
    assert waiting.leader is None
    assert elect(waiting, members, NOW_S + until_s - 0.01, PATIENCE_S).leader is None
    assert elect(waiting, members, NOW_S + until_s, PATIENCE_S).leader == leader


STEPS = st.none() | st.integers(0, 3)
TOLD = st.none() | st.builds(
    told, STEPS, st.sampled_from([None, 2, 3]), lost=st.sampled_from([None, None, 2, 3])
)


@st.composite
def members_of_three(draw: st.DrawFn) -> list[Member]:
    """Draw members in any state that a head may observe."""
    members = []
    for slot in "abc":
        team, gone = draw(TOLD), draw(st.sampled_from([None, None, "it is held"]))
        drawn = {
            "process": draw(st.integers(0, 1)),
            "gone": gone,
            "is_awaited": gone is not None and draw(st.booleans()),
            "late_s": draw(st.sampled_from([-0.5, 1.0, 9.0])),
            "stored_step": draw(st.sampled_from([NO_STATE, 0.0, 2.0, math.inf])),
        }
        members.append(member(slot, team, **drawn))
    return members


@given(
    looks=st.lists(
        st.tuples(members_of_three(), st.sampled_from([0.1, 0.7, 3.0, 200.0])), min_size=1
    )
)
def test_each_generation_has_one_leader_that_is_up_and_has_the_newest_state(
    looks: list[tuple[list[Member], float]],
) -> None:
    """This holds for any sequence of observations."""
    now, now_s = Election(since_s=NOW_S), NOW_S
    for seen, later_s in looks:
        now_s += later_s
        before, now = now, elect(now, seen, now_s, PATIENCE_S)
        if now.generation == before.generation:
            assert now.leader in {None, before.leader}
            continue
        assert now.generation == before.generation + 1
        leader = next(each for each in seen if each.slot == now.leader)
        assert leader.gone is None
        assert leader.team is not None
        assert (now.process, now.address) == (leader.process, leader.team.listens)
        able = [each for each in seen if each.gone is None and each.may_begin and each.late_s < 0]
        assert leader.held_step >= max(each.held_step for each in able)
        others = [each.stored_step for each in seen if each is not leader]
        assert leader.held_step > 0 or not any(0 < step < math.inf for step in others)
