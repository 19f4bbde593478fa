"""Elects the leader of a team of slots that share one training, from the statuses of its members.
Pure.

    a leader leads until            its process has ended, is held, or its PC is lost; or a helper
                                    has lost it, no helper is with it, and the head gets no status
    a member may lead if            it reports, and its state is the newest that is known
    an election waits for           helpers that may not know yet that their leader is gone; members
                                    that may come with a newer state; a saved state, if there is one

A generation is a fencing token: each has one leader, and members obey no smaller one. A leader that
is cut off from the head may continue alone; its work is void once it learns of the next generation.
Does not notify the members (`run/team.py`), and does not cover their computing (`workers/team`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from workers.messages import TeamState, TeamStatus

#: Most seconds by which a status of a new leader may be late.
_HEARD_S: Final = 0.5

#: A leader whose status is later than this is silent. By then its actor has checked whether it
#: computes: it may be in the middle of a long part.
_SILENT_S: Final = 2.2

#: How long an election waits for helpers to report that their leader's process has ended. They
#: notice it at once.
_SETTLE_S: Final = 1.0

#: The step of a member that has no state, not even that of step 0.
NO_STATE: Final = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A slot of the team, as the head knows it now."""

    slot: str
    process: int
    """The incarnation of its process."""
    gone: str | None
    """Why it cannot continue to lead; `None`: its process is up and trains."""
    may_begin: bool
    """Whether it may become leader: it has opened the training, and is not ordered to rest."""
    is_awaited: bool
    """Whether its process will come up soon, on a PC that is there."""
    late_s: float
    """Seconds by which its next status, or a sign that it computes, is late."""
    stored_step: float
    """Step of the newest state on its disk, as last reported; infinite: unknown."""
    team: TeamStatus | None
    """The status of its present process; `None`: it has not reported yet."""
    reached_step: float = NO_STATE
    """The step that its processes last reported; its disk may have that state."""

    @property
    def held_step(self) -> float:
        """Step of the state in the memory of its process."""
        step = None if self.team is None else self.team.step
        return NO_STATE if step is None else step


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """The result of the last call of `elect`."""

    generation: int = 0
    leader: str | None = None
    """`None`: no member leads now."""
    process: int = 0
    """The leader's incarnation, while there is a leader."""
    address: str = ""
    """Where the leader listens."""
    step: int | None = None
    """Step of the state with which it began to lead, as it reported before."""
    why: str = "the training begins"
    """Why the generation before has ended."""
    since_s: float = -math.inf
    """When the leader was lost, or when last no member could lead (monotonic seconds)."""
    waits_for: str | None = None
    """Why no member leads although one could."""


def elect(
    election: Election, members: Sequence[Member], now_s: float, patience_s: float
) -> Election:
    """Return the election now: unchanged, without a leader, or with one of the next generation.

    The member with the newest state leads, among equals the first. `patience_s` bounds how long the
    election waits for a member that may come with a newer state.
    """
    if election.leader is not None:
        why = _why_deposed(election, members)
        if why is None:
            return election
        election = replace(election, leader=None, why=why, since_s=now_s)
    able = [
        each for each in members if each.gone is None and each.may_begin and each.late_s <= _HEARD_S
    ]
    if not able:
        return replace(election, since_s=now_s, waits_for=None)
    best = max(able, key=lambda member: member.held_step)
    waits_for = _awaited(election, best, members, now_s - election.since_s, patience_s)
    if waits_for is not None or best.team is None:
        return replace(election, waits_for=waits_for)
    return replace(
        election,
        generation=election.generation + 1,
        leader=best.slot,
        process=best.process,
        address=best.team.listens,
        step=best.team.step,
        waits_for=None,
    )


def _why_deposed(election: Election, members: Sequence[Member]) -> str | None:
    """Return why the leader is deposed; `None`: it continues to lead."""
    leader = next(each for each in members if each.slot == election.leader)
    if leader.gone is not None:
        return f"{leader.slot}: {leader.gone}"
    if leader.process != election.process:
        return f"{leader.slot}: another process begins"
    if leader.team is not None and leader.team.lost == election.generation:
        return f"{leader.slot}: it cannot continue to lead"
    helpers = [each for each in members if each is not leader and each.gone is None]
    lost = [
        each.slot
        for each in helpers
        if each.team is not None and each.team.lost == election.generation
    ]
    with_it = any(_is_with(election, each) and each.late_s <= _SILENT_S for each in helpers)
    if lost and not with_it and leader.late_s > _SILENT_S:
        return f"{leader.slot}: lost by {', '.join(lost)}, and silent"
    return None


def _is_with(election: Election, helper: Member) -> bool:
    """Return whether a helper reports that it works with the leader of the last generation."""
    team = helper.team
    return (
        team is not None
        and team.generation == election.generation
        and team.lost is None
        and team.state is TeamState.TOGETHER
    )


def _awaited(
    election: Election, best: Member, members: Sequence[Member], waited_s: float, patience_s: float
) -> str | None:
    """Return why `best` must wait before it leads; `None`: it may lead now."""
    others = [each for each in members if each is not best]
    for each in others if waited_s < _SETTLE_S else ():
        if each.gone is None and each.late_s <= _HEARD_S and _is_with(election, each):
            return f"{each.slot} may not know yet that its leader is gone"
    for each in members:
        is_coming = each.is_awaited or (each.gone is None and not each.may_begin)
        newest = max(each.stored_step, each.reached_step)
        if is_coming and newest > best.held_step and waited_s < patience_s:
            return f"{each.slot} may come with a newer state"
    for each in others:
        if best.held_step == 0 < each.stored_step < math.inf:
            return f"{each.slot} has saved step {each.stored_step:.0f}, and those here have no step"
    return None
