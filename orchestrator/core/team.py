"""Who leads a team of slots that share one training: an election by what the head hears. Pure.

    who leads stays so until        its process has ended, is held, or its PC is lost; or a helper
                                    has lost it, none is with it, and the head hears nothing of it
    who may lead                    a member that is heard, whose state is the newest that is known
    what is waited for meanwhile    helpers that may not know yet that their leader is gone; members
                                    that may come with a newer state; any state, where one was saved

A generation is a fencing number: each has one leader, and members obey no smaller one. So a leader
that was cut off from the head may go on alone; what it does counts no more once it hears of the
next generation. Does not tell the members (`run/team.py`), and says nothing of how they compute
(`workers/team`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from workers.messages import TeamState, TeamStatus

#: Who is to begin to lead must have told something no later than this after it should have.
_HEARD_S: Final = 0.5

#: Of who leads, by then its PC has looked whether it computes: it may be in the middle of a long
#: part.
_SILENT_S: Final = 2.2

#: Helpers see at once that a leader's process has ended: those that have not said so by then may
#: not know.
_SETTLE_S: Final = 1.0

#: Stands for the step of who has no state yet, not even the first one, of step 0.
NO_STATE: Final = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A slot of the team, as the head knows it now."""

    slot: str
    process: int
    """Its incarnation."""
    gone: str | None
    """Why it cannot lead on, in words; `None`: its process is up and trains."""
    may_begin: bool
    """Whether it may begin to lead: it has opened the training, and is not about to rest."""
    is_awaited: bool
    """Whether a process of it is about to come up, on a PC that is there."""
    late_s: float
    """By so much it is later than it should be with telling something, or with computing."""
    stored_step: float
    """Of the newest state on its disk, as far as that was told; infinite: it is not known."""
    team: TeamStatus | None
    """What its present process tells; `None`: nothing yet."""
    reached_step: float = NO_STATE
    """The newest that its processes have told: it may have saved that without having told it."""

    @property
    def held_step(self) -> float:
        """Of the state that its process holds."""
        step = None if self.team is None else self.team.step
        return NO_STATE if step is None else step


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """What the last look has led to."""

    generation: int = 0
    leader: str | None = None
    """`None`: no member leads now."""
    process: int = 0
    """The leader's incarnation, while there is one."""
    address: str = ""
    """Where it listens."""
    step: int | None = None
    """Of the state with which it began to lead, as it told last."""
    why: str = "the training begins"
    """Why the generation before has ended."""
    since_s: float = -math.inf
    """When its leader was lost, or when no member could lead last (monotonic seconds)."""
    waits_for: str | None = None
    """Why no member leads although one could, in words."""


def elect(
    election: Election, members: Sequence[Member], now_s: float, patience_s: float
) -> Election:
    """Return who leads now: as before, no member, or one under the next generation.

    Of members that hold the same step the first one leads. `patience_s` bounds how long a member is
    waited for that may come with a newer state than those have that are here.
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
    """Return why the leader leads no more; `None`: it does."""
    leader = next(each for each in members if each.slot == election.leader)
    if leader.gone is not None:
        return f"{leader.slot}: {leader.gone}"
    if leader.process != election.process:
        return f"{leader.slot}: another process begins"
    if leader.team is not None and leader.team.lost == election.generation:
        return f"{leader.slot}: it cannot lead on"
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
    """Say whether a helper tells that it is together with the leader of the last generation."""
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
    """Return whom to wait for before `best` may lead, and why; `None`: it may lead now."""
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
