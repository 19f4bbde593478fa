"""When a PC's Ray node is started, asked about and replaced: the rules of `rejoin.py` in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from orchestrator.core.rejoin import Action, Node, NodePhase, NodeSample, turn


@dataclass
class PC:
    """A PC whose `ray start` takes so long, mostly 3 s, and whose head answers at once.

    One turn a second.
    """

    starts: Callable[[float], bool] = lambda _now_s: True
    """Whether a start that begins at this moment ends well."""
    is_plugged: bool = True
    is_running: bool = False
    is_member: bool = True
    start_s: float = 3.0
    is_in_vain: bool = False
    node: Node = field(default_factory=Node)
    now_s: float = 1000.0
    started_s: list[float] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    _ready_s: float | None = None
    _answer: bool | None = None

    def pass_s(self, seconds: float) -> list[Action]:
        """Let time pass; return what was done in it, waiting apart."""
        before, end_s = len(self.actions), self.now_s + seconds
        while self.now_s < end_s:
            self._turn()
            self.now_s += 1.0
        return self.actions[before:]

    def _turn(self) -> None:
        if self._ready_s is not None and self.is_plugged and self.now_s >= self._ready_s:
            self.is_running = self.is_member = self.starts(self.started_s[-1])
            self._ready_s = None
        sample = NodeSample(
            now_s=self.now_s,
            is_reachable=self.is_plugged,
            is_starting=self._ready_s is not None,
            is_in_vain=self.is_in_vain,
            is_running=self.is_running,
            is_member=self._answer,
        )
        self.node, action = turn(self.node, sample)
        self._answer = None
        if action is Action.START:
            assert not self.is_running, "two nodes of one name"
            self.started_s.append(self.now_s)
            self._ready_s = self.now_s + self.start_s
        elif action is Action.ASK:
            self._answer = self.is_member
        elif action is Action.END:
            self.is_running, self._ready_s = False, None
        if action is not Action.WAIT:
            self.actions.append(action)


def joined(**kinds: object) -> PC:
    pc = PC(**kinds)  # type: ignore[arg-type]
    assert pc.pass_s(5) == [Action.START]
    assert pc.node.phase is NodePhase.UP
    return pc


def test_a_node_is_started_once_the_head_can_be_reached() -> None:
    pc = PC(is_plugged=False)
    assert pc.pass_s(600) == []
    pc.is_plugged = True
    assert pc.pass_s(600) == [Action.START]
    assert pc.node.phase is NodePhase.UP


def test_after_an_unnoticed_cut_the_node_stays() -> None:
    pc = joined()
    pc.is_plugged = False
    assert pc.pass_s(25) == []
    pc.is_plugged = True
    assert pc.pass_s(600) == [Action.ASK]
    assert pc.is_running


def test_a_node_unknown_to_the_head_is_replaced_at_once() -> None:
    """It was declared dead, or the head has begun a new cluster."""
    pc = joined()
    pc.is_plugged = False
    pc.pass_s(75)
    pc.is_member, pc.is_plugged = False, True
    assert pc.pass_s(10) == [Action.ASK, Action.END, Action.START]
    assert pc.node.phase is NodePhase.UP


def test_a_head_that_does_not_answer_is_asked_again() -> None:
    pc = joined()
    pc.is_plugged = False
    pc.pass_s(5)
    pc.is_plugged, pc.is_member = True, None  # type: ignore[assignment]  # no answer
    assert set(pc.pass_s(60)) == {Action.ASK}
    assert pc.node.in_doubt
    at_work = NodeSample(now_s=pc.now_s + 60.0, is_reachable=True, is_running=True, is_asking=True)
    assert turn(pc.node, at_work)[1] is Action.WAIT, "one question at a time"
    pc.is_member = True
    pc.pass_s(5)
    assert not pc.node.in_doubt


@pytest.mark.parametrize("away_s", [0, 300])
def test_an_ended_node_is_started_when_the_head_is_there(away_s: int) -> None:
    pc = joined()
    pc.pass_s(3600)
    pc.is_running, pc.is_plugged = False, away_s == 0
    assert Action.START not in pc.pass_s(away_s)
    pc.is_plugged = True
    assert Action.START in pc.pass_s(3)


def test_the_pause_between_failed_starts_doubles_to_a_minute() -> None:
    repaired_s = float("inf")
    pc = PC(starts=lambda now_s: now_s >= repaired_s)
    pc.pass_s(600)
    pauses_s = [
        after - before - 3.0 for before, after in zip(pc.started_s, pc.started_s[1:], strict=False)
    ]
    assert set(pc.actions[0::2]) == {Action.START}
    assert set(pc.actions[1::2]) == {Action.END}, "what a start that failed has left holds the card"
    assert pauses_s[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]

    repaired_s = pc.now_s
    pc.pass_s(70)
    assert pc.node.phase is NodePhase.UP
    pc.is_running = False  # too early for a first failure
    assert Action.START not in pc.pass_s(30)
    pc.pass_s(30 + 5 + 120)
    assert pc.node.phase is NodePhase.UP
    pc.is_running = False
    assert Action.START in pc.pass_s(3)


def test_the_heads_return_ends_a_pause() -> None:
    pc = PC(starts=lambda _now_s: False)
    pc.pass_s(200)
    assert pc.node.phase is NodePhase.DOWN
    pc.is_plugged = False
    pc.pass_s(2)
    pc.is_plugged = True
    assert pc.pass_s(1) == [Action.START]


def test_a_start_into_which_a_cut_falls_is_no_failure() -> None:
    """`ray start` would wait without an end."""
    pc = PC()
    pc.pass_s(2)
    pc.is_plugged = False
    assert pc.pass_s(600) == [Action.END]
    pc.is_plugged = True
    assert pc.pass_s(5) == [Action.START]
    assert pc.node.phase is NodePhase.UP
    assert pc.node.failures == 0


def test_a_start_that_hangs_is_ended_and_tried_again() -> None:
    pc = PC()
    pc.pass_s(1)
    pc._ready_s = float("inf")
    assert pc.pass_s(63) == [Action.END, Action.START]
    pc.pass_s(5)
    assert pc.node.phase is NodePhase.UP


def test_each_start_that_took_too_long_lengthens_the_next() -> None:
    pc = PC(start_s=float("inf"))
    pc.pass_s(60 + 1 + 120 + 2 + 180 + 4 + 180 + 8 + 10)
    lasted_s = [round(after - before) for before, after in itertools.pairwise(pc.started_s)]
    assert lasted_s == [61 + 1, 121 + 2, 181 + 4, 181 + 8]
    pc.start_s = 170.0
    pc.pass_s(400)
    assert pc.node.phase is NodePhase.UP
    pc.pass_s(60)
    pc.is_running, pc.start_s = False, float("inf")
    assert pc.pass_s(66) == [Action.END, Action.START, Action.END, Action.START], "as at first"


def test_a_start_whose_raylet_ended_is_ended_and_retried() -> None:
    """`ray start` would wait half a minute for it, and then fail."""
    pc = PC(start_s=float("inf"))
    pc.pass_s(10)
    pc.is_in_vain = True
    assert pc.pass_s(1) == [Action.END]
    pc.is_in_vain, pc.start_s = False, 3.0
    assert pc.pass_s(10) == [Action.START]
    assert pc.node.phase is NodePhase.UP


def test_a_running_node_is_kept_if_the_head_counts_it() -> None:
    pc = PC(is_running=True)
    assert pc.pass_s(600) == [Action.ASK]
    stranger = PC(is_running=True, is_member=False)
    assert stranger.pass_s(600) == [Action.ASK, Action.END, Action.START]
