"""Who leads a team: cases as a table, and a machine of deaths, cables, pauses and heads that crash."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.core.team import NO_STATE, Election, Member, elect
from workers.messages import TeamState, TeamStatus

NOW_S = 1000.0
PATIENCE_S = 120.0


def told(step: int | None, generation: int | None = None, **changes: Any) -> TeamStatus:
    """What a member tells: it waits for its first orders, or is together with its leader."""
    state = TeamState.REJOINING if generation is None else TeamState.TOGETHER
    usual: dict[str, Any] = {
        "state": state,
        "listens": "10.0.0.1:6390",
        "generation": generation,
        "step": step,
    }
    return TeamStatus(**{**usual, **changes})


def member(slot: str, team: TeamStatus | None = None, **changes: Any) -> Member:
    """A member that is up, heard, and has stored nothing."""
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
        # The beginning: nobody can hold a state, so that nobody is waited for.
        (Election(), [starting("a"), starting("b")], None, 0),
        (Election(), [starting("a"), member("b", told(0))], "b", 1),
        (Election(), [member("a", told(None)), member("b", told(0))], "b", 1),
        (Election(), [member("a", told(0)), member("b", told(0))], "a", 1),
        (Election(), [member("a", told(7)), member("b", told(9))], "b", 1),
        # A leader stays while it is heard, or its helpers say that they are with it.
        (LED, [LEADER, HELPER], "a", 3),
        (LED, [LEADER, LEFT], "a", 3),
        (LED, [replace(LEADER, late_s=9.0), HELPER], "a", 3),
        (LED, [replace(LEADER, late_s=9.0), LEFT, replace(HELPER, slot="c")], "a", 3),
        (LED, [LEADER, member("b", told(999))], "a", 3),
        # It is replaced once its process has ended, or all have lost it and it is silent.
        (LED, [DEAD, LEFT], "b", 4),
        (LED, [member("a", told(100), process=1), LEFT], "b", 4),
        (LED, [member("a", told(100), process=1), replace(DEAD, slot="b")], "a", 4),
        (LED, [replace(LEADER, late_s=2.3), LEFT], "b", 4),
        (LED, [replace(LEADER, late_s=2.3), replace(LEFT, slot="c"), LEFT], "c", 4),
        (LED, [replace(LEADER, team=told(90, 3, lost=3)), LEFT], "b", 4),
        (LED, [replace(LEADER, team=told(90, 3, lost=3)), replace(DEAD, slot="b")], "a", 4),
        # Who lost another generation's leader, or may not lead, does not count.
        (LED, [replace(LEADER, late_s=9.0), member("b", told(9, 3, lost=2))], "a", 3),
        (LED, [DEAD, replace(LEFT, may_begin=False)], None, 3),
        (LED, [DEAD, replace(LEFT, late_s=0.6)], None, 3),
        # Another helper that may not know yet that its leader is gone is waited for a second.
        (LED, [DEAD, HELPER, replace(LEFT, slot="c", team=told(139, 3, lost=3))], "b", 4),
        (LED, [DEAD, LEFT, replace(HELPER, slot="c")], None, 3),
        # A newer state may come: on a disk, or unknown to this head. Older ones are not waited for.
        (LED, [starting("a", 141), LEFT], None, 3),
        (LED, [starting("a", 140), LEFT], "b", 4),
        (LED, [starting("a", math.inf), LEFT], None, 3),
        (LED, [replace(starting("a", 90), reached_step=141), LEFT], None, 3),
        (LED, [replace(starting("a", 90), reached_step=140), LEFT], "b", 4),
        (LED, [member("a", told(120), process=1, reached_step=200), LEFT], "b", 4),
        (LED, [member("a", gone="its PC is lost", stored_step=math.inf), LEFT], "b", 4),
        (LED, [member("a", told(None), process=1, stored_step=141), LEFT], None, 3),
        # Who has no state may not define it.
        (LED, [replace(DEAD, stored_step=50), member("b", told(0))], None, 3),
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
        # The newest of those that are known, although they may not know.
        ([DEAD, LEFT, replace(HELPER, slot="c", team=told(139, 3))], 1.0, "b"),
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


@dataclass
class Process:
    """A member as it really is, and what the head has heard of it."""

    incarnation: int = 0
    is_up: bool = False
    is_stopped: bool = False
    is_held: bool = False
    has_pc: bool = True
    has_cable: bool = True
    held: int | None = None
    saved: int | None = None
    generation: int | None = None
    lost: int | None = None
    told: TeamStatus | None = None
    told_at_s: float = -math.inf
    known_saved: float = NO_STATE
    is_known: bool = True


NAMES = st.sampled_from(["a", "b", "c"])


class Cluster(RuleBasedStateMachine):
    """Three members that train, save, die and return, and the heads of their run."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = NOW_S
        self.members = {name: Process() for name in "abc"}
        self.election = Election(since_s=self.now_s)
        self.led: dict[int, tuple[str, int]] = {}

    @rule(name=NAMES, opens=st.booleans())
    def comes_up(self, name: str, *, opens: bool) -> None:
        """A process begins; it opens its training at once, or needs long for it."""
        one = self.members[name]
        if one.has_pc and not one.is_up:
            one.is_up, one.is_stopped, one.held = True, False, None
            one.generation = one.lost = one.told = None
        if one.is_up and one.held is None and opens:
            one.held = one.saved or 0
        self._tells(name)

    @rule(name=NAMES)
    def dies(self, name: str) -> None:
        one = self.members[name]
        if one.is_up:
            one.is_up, one.told = False, None
            one.incarnation += 1

    @rule(name=NAMES, disk_stays=st.booleans())
    def pc_is_lost_or_returns(self, name: str, *, disk_stays: bool) -> None:
        one = self.members[name]
        self.dies(name)
        one.has_pc = not one.has_pc
        one.saved = one.saved if disk_stays else None

    @rule(name=NAMES, what=st.sampled_from(["is_held", "is_stopped", "has_cable"]))
    def changes(self, name: str, what: str) -> None:
        """A member is held or stopped, or its cable is out; or that is over."""
        setattr(self.members[name], what, not getattr(self.members[name], what))

    @rule(steps=st.integers(1, 9), deaf=NAMES)
    def trains(self, steps: int, deaf: str) -> None:
        """All but one hear the orders; each leader and those that are with it go on."""
        for name in self.members:
            if name != deaf:
                self._obeys(name)
        for generation, (name, incarnation) in self.led.items():
            leader = self.members[name]
            is_same = (leader.generation, leader.incarnation) == (generation, incarnation)
            if not is_same or not leader.is_up or leader.is_stopped or leader.held is None:
                continue
            before, leader.held = leader.held, leader.held + steps
            for each in self.members.values():
                if each is leader or each.generation != generation or not each.is_up:
                    continue
                if each.held == before and each.has_cable and leader.has_cable:
                    each.held = leader.held
                else:
                    each.lost = generation

    @rule(name=NAMES, tells=st.booleans())
    def saves(self, name: str, *, tells: bool) -> None:
        one = self.members[name]
        if one.is_up and one.held:
            one.saved = one.held
        if tells:
            self._tells(name)

    @rule(seconds=st.sampled_from([0.1, 0.7, 3.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        """Those that are heard tell how they stand."""
        self.now_s += seconds
        for name in self.members:
            self._tells(name)

    @rule()
    def head_crashes(self) -> None:
        """All processes end with it; the next one knows the generation, and what was told."""
        for name, one in self.members.items():
            self.dies(name)
            one.incarnation += 1
            one.is_known = False
        self.election = Election(generation=self.election.generation, since_s=self.now_s)

    @invariant()
    def looks(self) -> None:
        """The head looks after each of these."""
        before = self.election
        seen = [self._seen(name, one) for name, one in self.members.items()]
        self.election = now = elect(before, seen, self.now_s, PATIENCE_S)
        if now.generation == before.generation:
            assert now.leader in {None, before.leader}
            return
        assert now.generation == before.generation + 1
        assert now.generation not in self.led
        leader = next(each for each in seen if each.slot == now.leader)
        self.led[now.generation] = (leader.slot, leader.process)
        assert leader.gone is None
        assert leader.team is not None
        assert now.address == leader.team.listens
        able = [each for each in seen if each.gone is None and each.may_begin and each.late_s < 0]
        assert leader.held_step >= max((each.held_step for each in able), default=0)
        others = [each.stored_step for each in seen if each is not leader]
        assert leader.held_step > 0 or not any(0 < step < math.inf for step in others)

    @precondition(lambda self: self.election.leader is not None)
    @invariant()
    def who_leads_was_named(self) -> None:
        assert self.led[self.election.generation][0] == self.election.leader

    def _obeys(self, name: str) -> None:
        """A member hears who leads; a helper takes the leader's state."""
        now, one = self.election, self.members[name]
        if now.leader is None or not one.is_up or one.is_stopped or one.held is None:
            return
        leader = self.members[now.leader]
        one.generation, one.lost = now.generation, None
        if one is leader:
            return
        if leader.is_up and leader.has_cable and one.has_cable:
            one.held = leader.held
        else:
            one.lost = now.generation

    def _tells(self, name: str) -> None:
        one = self.members[name]
        if not one.is_up or one.is_stopped:
            return
        together = one.generation is not None and one.lost is None
        one.told = TeamStatus(
            state=TeamState.TOGETHER if together else TeamState.REJOINING,
            listens=f"{name}:1",
            generation=one.generation,
            step=one.held,
            lost=one.lost,
        )
        one.told_at_s, one.is_known = self.now_s, True
        if one.saved is not None:
            one.known_saved = one.saved

    def _seen(self, name: str, one: Process) -> Member:
        gone = None if one.is_up and one.told is not None else "its process has ended"
        if one.is_held:
            gone = "it is held"
        return Member(
            slot=name,
            process=one.incarnation,
            gone=gone,
            may_begin=one.told is not None and one.told.step is not None and not one.is_held,
            is_awaited=one.has_pc and not one.is_held and one.told is None,
            late_s=self.now_s - one.told_at_s - 1.0,
            stored_step=one.known_saved if one.is_known else math.inf,
            team=one.told,
        )


Cluster.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestCluster = Cluster.TestCase
