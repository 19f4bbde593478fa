"""The team of a run or of a job: turns the statuses of its members into orders for all of them.

Keeps the leader, the secret of this head, and the generation; stores the generation, so that it
rises even after a crash of the head. Does not elect (`core/team.py`), nor compute what a team gains
(`core/team_time.py`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from orchestrator.core.slot import Phase, Slot
from orchestrator.core.team import NO_STATE, Election, Member, elect
from orchestrator.core.team_time import StepTimes
from orchestrator.record.events import EventLog
from orchestrator.record.store import RunStore
from workers.messages import TeamOrders, TeamState, TeamStatus
from workers.settings import TeamSpec

_SECRET_BYTES: Final = 32

#: Steps of the whole team after which its gain is judged.
_JUDGED_STEPS: Final = 5


class Team:
    """The members of one training, under one head."""

    def __init__(
        self,
        spec: TeamSpec,
        poll_s: float,
        generation: int,
        patience_s: float,
        events: EventLog,
        store: RunStore,
        *,
        may_rest: bool,
    ) -> None:
        """Continue after `generation`, the last one of earlier heads. `patience_s` is that of
        `core.team.elect`. With `may_rest`, one member trains alone if the others gain nothing.
        """
        self.members = spec.members
        """The slots of the members, in the order of the team."""
        self._able = spec.members[:1] if spec.split == "layers" else spec.members
        """The members that can lead; if they divide a model, only the first."""
        self._poll_s, self._patience_s = poll_s, patience_s
        self._events, self._store = events, store
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._election = Election(generation=generation)
        self._may_rest = may_rest
        self._is_judged = False
        self._advice: str | None = None
        self._saved: dict[str, float] = {}
        """The newest step that each member has reported as saved."""
        self._reached: dict[str, float] = {}
        """The step that each member has last reported."""

    def update(self, slots: Mapping[str, Slot], now_s: float) -> bool:
        """Process the statuses of the members, and say whether their orders change. The caller must
        commit the new generation to the store before it sends new orders.
        """
        for name in self.members:
            saved_step = slots[name].training.last.saved_step
            if saved_step is not None:  # a process that has just begun reports none
                self._saved[name] = saved_step
            if (team := _team_status(slots[name])) is not None and team.step is not None:
                self._reached[name] = team.step
        if any(slots[name].phase is Phase.DONE for name in self.members):
            return False  # finished: another leader would repeat the end of the training
        before = self._election
        members = [self._member(slots[name], now_s) for name in self._able]
        self._election = now = elect(before, members, now_s, self._patience_s)
        if now.generation != before.generation:
            self._store.team(now.generation)
            self._events.write(
                "team_leader",
                slot=now.leader,
                generation=now.generation,
                step=now.step,
                address=now.address,
                cause=now.why,
            )
        elif now.leader is None and before.leader is not None:
            self._events.write("team_without_leader", slot=before.leader, cause=now.why)
        return (now.generation, now.leader) != (before.generation, before.leader)

    def surplus(self, slots: Mapping[str, Slot]) -> Sequence[tuple[str, str]]:
        """Return the members that must rest, and why: with `split: auto`, the measured gain of the
        whole team is too small. Only once: a member that the user lets work then keeps working.
        """
        leader = self._election.leader
        if self._is_judged or leader is None:
            return ()
        of_team = [slots[name] for name in self.members]
        teams = {
            slot.slot: slot.status.team
            for slot in of_team
            if slot.phase is Phase.WORKING and slot.ready and slot.status and slot.status.team
        }
        paces = {name: team.pace for name, team in teams.items() if team.pace is not None}
        is_whole = all(team.members == len(of_team) for team in teams.values())
        if len(paces) < len(of_team) or not is_whole or paces[leader].steps < _JUDGED_STEPS:
            return ()
        self._is_judged = True
        fastest = min(paces, key=lambda name: paces[name].alone_s)
        wire_s = teams[leader].wire_s or 0.0
        compute_s = paces[leader].step_s - wire_s
        times = StepTimes(fastest, paces[fastest].alone_s, compute_s, wire_s)
        figures = {**asdict(times), "gain_pct": 100 * times.gain}
        self._events.write("team_times", cause=times.sentence, **figures)
        if times.pays:
            return ()
        if not self._may_rest:
            self._advice = f"{times.sentence}; with train.split: auto the others would rest"
            return ()
        why = f"{times.sentence}; `unpause` makes it train anyway"
        return [(name, why) for name in self.members if name != fastest]

    @property
    def orders(self) -> TeamOrders | None:
        """The orders for every member; `None` while no member leads."""
        now = self._election
        if now.leader is None:
            return None
        return TeamOrders(
            generation=now.generation,
            leader=now.leader,
            address=now.address,
            secret=self._secret,
        )

    def notices(self, slots: Mapping[str, Slot]) -> tuple[str, ...]:
        """Return why no member leads although one could, and that a team gains too little."""
        waits_for = self._election.waits_for
        no_leader = None if waits_for is None else f"the team has no leader: {waits_for}"
        rests = (slots[name].orders.why for name in self.members)
        return tuple(dict.fromkeys(filter(None, [no_leader, self._advice, *rests])))

    def _member(self, slot: Slot, now_s: float) -> Member:
        is_up = slot.phase is Phase.WORKING and slot.ready
        team = _team_status(slot)
        # An earlier head may not have stored all that it heard of this slot.
        is_unheard = slot.incarnation > 0 and slot.status is None
        return Member(
            slot=slot.slot,
            process=slot.incarnation,
            gone=None if is_up else _why_gone(slot),
            may_begin=team is not None and team.step is not None and slot.orders.hold is None,
            is_awaited=slot.phase in {Phase.WORKING, Phase.PAUSING} and not slot.ready,
            late_s=_silent_s(slot, now_s) - self._poll_s,
            stored_step=math.inf if is_unheard else self._saved.get(slot.slot, NO_STATE),
            team=team,
            reached_step=self._reached.get(slot.slot, NO_STATE),
        )


def _team_status(slot: Slot) -> TeamStatus | None:
    """Return what the present process of a slot reports of its team."""
    return slot.status.team if slot.ready and slot.status is not None else None


def is_finished(members: Iterable[Slot]) -> bool:
    """Say whether the training is over: a member is done, and none works together with it any more.
    A member that was not with it at the end cannot learn the last steps.
    """
    of_team = list(members)
    if not any(slot.phase is Phase.DONE for slot in of_team):
        return False
    return not any(slot.phase is Phase.WORKING and _is_together(slot) for slot in of_team)


def _is_together(slot: Slot) -> bool:
    team = _team_status(slot)
    return team is not None and team.lost is None and team.state is not TeamState.REJOINING


def _why_gone(slot: Slot) -> str:
    if slot.phase is Phase.STOPPED:
        return "it rests, since the run ends"
    if slot.phase is Phase.HELD:
        return "it is held"
    return "its PC is lost" if slot.phase is Phase.ABSENT else "its process has ended"


def _silent_s(slot: Slot, now_s: float) -> float:
    """Return for how many seconds the slot's process has neither reported nor computed."""
    if slot.unreached_since_s is not None or slot.heard_at_s is None or slot.news_at_s is None:
        return math.inf
    if slot.quiet is None:
        return now_s - slot.news_at_s
    return now_s - slot.heard_at_s + slot.quiet.idle_s
