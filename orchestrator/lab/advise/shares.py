"""From facts to the shares of time that each cause has cost a card. Pure.

A slot's time, from its first report on, is divided by its states; the time in which it reported is
divided further by its counters. Shares need not add up to 1: the rest is work. Says nothing in
words (`causes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Final

from orchestrator.core.slot import HeadState
from orchestrator.lab.advise.facts import CardFacts, SlotFacts
from workers.messages import STARVED, WorkerState
from workers.units import MIB


class Cause(StrEnum):
    """What keeps a card from the work that it was given."""

    DATA = "data"
    COPIES = "copies"
    OPTIMIZER = "optimizer"
    #: The program waits for the card, and gives it nothing to do meanwhile; only a pass of
    #: torch.profiler tells it.
    SYNCHRONISATIONS = "synchronisations"
    #: The card waits for the host between kernels: these are too small, or started too late.
    GAPS = "gaps"
    DUTY = "duty"
    HEAT = "heat"
    #: Another program uses the card.
    NEIGHBOUR = "neighbour"
    #: Slower than before, and nothing that is known explains it.
    SLOW = "slow"
    MEMORY = "memory"
    RESTARTS = "restarts"
    LOST = "lost"
    HELD = "held"
    QUARANTINED = "quarantined"
    #: The worker waits for its next slice.
    HEAD = "head"


#: Below this share nothing is said: it is within what counters and sensors tell.
LEAST_SHARE: Final = 0.05
#: NVML counts a moment as busy if any kernel ran in it, so it tells of long gaps only.
_LEAST_GAPS: Final = 0.10
#: More than a desktop takes while its user looks on.
_FOREIGN_LEAST_BYTES: Final = 768 * MIB
_FOREIGN_LEAST_SHARE: Final = 0.05
#: So much busier than its own workers explain is a card that computes for another program.
_FOREIGN_LEAST_BUSY: Final = 0.15
#: Less observed time is no ground for advice.
LEAST_SEEN_S: Final = 10.0

_OF_STATE: Final[Mapping[HeadState, Cause]] = {
    HeadState.STARTING: Cause.RESTARTS,
    HeadState.RESTARTING: Cause.RESTARTS,
    HeadState.LOST: Cause.LOST,
    HeadState.HELD: Cause.HELD,
    HeadState.QUARANTINED: Cause.QUARANTINED,
}

#: Time in which the card does nothing for this slot; another slot of the card may use it.
_IDLE: Final = frozenset(
    {
        Cause.DATA,
        Cause.DUTY,
        Cause.MEMORY,
        Cause.HEAD,
        *_OF_STATE.values(),
    }  # not heat: it slows all slots of a card
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Where the time of a card has gone."""

    seen_s: float
    """Time that was looked at, of its slots together."""
    busy: float | None
    """Share of the time in which it worked for this run; `None` if that is unknown."""
    shares: Mapping[Cause, float]
    """All that are known, also the small ones."""


def divide(card: CardFacts) -> Division:
    """Return where the time of a card has gone."""
    slots = [slot for slot in card.slots if sum(slot.states_s.values()) > 0]
    seen_s = sum(sum(slot.states_s.values()) for slot in slots)
    if not slots:
        return Division(seen_s=0.0, busy=None, shares={})
    has_neighbour = _has_neighbour(card, slots)
    parts = [_of_slot(slot, card, has_neighbour=has_neighbour) for slot in slots]
    shares = {cause: fmean(part.get(cause, 0.0) for part in parts) for cause in Cause}
    works = [_works(slot) for slot in slots]
    known = [work for work in works if work is not None]
    if not known:
        return Division(seen_s=seen_s, busy=None, shares=_positive(shares))
    if card.uuid is None:  # the slots of a processor have cores of their own
        return Division(seen_s=seen_s, busy=fmean(known), shares=_positive(shares))
    together = min(1.0, sum(known))
    # While one slot is idle another may use the card; only what all of them leave idle is lost.
    idle_of_slot = 1 - fmean(known)
    part_idle = min(1.0, (1 - together) / idle_of_slot) if idle_of_slot > 0 else 0.0
    shares = {
        cause: share * part_idle if cause in _IDLE else share for cause, share in shares.items()
    }
    if card.utilisation is not None and together - card.utilisation >= _LEAST_GAPS:
        if all(slot.profile is None for slot in slots):
            shares[Cause.GAPS] = together - card.utilisation
        together = card.utilisation
    return Division(seen_s=seen_s, busy=together, shares=_positive(shares))


def _positive(shares: Mapping[Cause, float]) -> dict[Cause, float]:
    return {cause: min(1.0, share) for cause, share in shares.items() if share > 0}


def _of_slot(slot: SlotFacts, card: CardFacts, *, has_neighbour: bool) -> dict[Cause, float]:
    seen_s = sum(slot.states_s.values())
    shares = dict.fromkeys(Cause, 0.0)
    for state, seconds in slot.states_s.items():
        if isinstance(state, HeadState):
            shares[_OF_STATE[state]] += seconds / seen_s
    paused, starved, throttled = (
        sum(slot.states_s.get(state, 0.0) for state in states) / seen_s
        for states in ({WorkerState.PAUSED}, STARVED, {WorkerState.THROTTLED})
    )
    reported = _reported(slot)
    shares[Cause.NEIGHBOUR if has_neighbour else Cause.MEMORY] += starved
    shares[Cause.HEAT] += paused
    got = _got(slot)
    if got is None:
        return shares
    # What its own duty takes from the time in which it could work; heat takes what it gets less
    # than that.
    could = max(0.0, reported - paused - starved)
    duty = 1.0 if slot.duty_asked is None else slot.duty_asked
    idle = max(0.0, could - got)
    shares[Cause.DUTY] = min(idle, could * (1 - duty))
    rest = idle - shares[Cause.DUTY]
    by_heat = min(rest, throttled * duty)
    shares[Cause.HEAT] += by_heat
    shares[Cause.HEAD] = rest - by_heat
    waits = {Cause.DATA: slot.data_wait, Cause.COPIES: slot.copies, Cause.OPTIMIZER: slot.optimizer}
    for cause, share in waits.items():
        shares[cause] = reported * (share or 0.0)
    if slot.profile is not None:
        shares[Cause.COPIES] = got * slot.profile.copies
        shares[Cause.SYNCHRONISATIONS] = got * slot.profile.synchronisations
        shares[Cause.GAPS] = max(0.0, got * slot.profile.idle - shares[Cause.DATA])
    by_clock = 0.0
    if card.slowed:
        # What the clock fell; where it is unknown, at most the time in which the card was slowed.
        by_clock = got * (
            min(card.slowed, 1 - card.clock) if card.clock is not None else card.slowed
        )
        shares[Cause.HEAT] += by_clock
    if slot.of_best is not None:
        explained = by_clock + by_heat + shares[Cause.DATA] + shares[Cause.COPIES]
        slower = got * (1 - min(1.0, slot.of_best)) - explained
        shares[Cause.NEIGHBOUR if has_neighbour else Cause.SLOW] += max(0.0, slower)
    return shares


def _reported(slot: SlotFacts) -> float:
    """Return the share of the time in which a process reported."""
    seen_s = sum(slot.states_s.values())
    return (
        sum(seconds for state, seconds in slot.states_s.items() if isinstance(state, WorkerState))
        / seen_s
    )


def _got(slot: SlotFacts) -> float | None:
    return None if slot.duty_got is None else min(1.0, slot.duty_got) * _reported(slot)


def _works(slot: SlotFacts) -> float | None:
    """Return the share of the time in which it kept the device at work, without the wait for data."""
    got = _got(slot)
    return None if got is None else max(0.0, got - _reported(slot) * (slot.data_wait or 0.0))


def _has_neighbour(card: CardFacts, slots: list[SlotFacts]) -> bool:
    """Say whether another program holds or uses the card, by its memory, its load, or what its
    driver says now.
    """
    foreign = card.foreign_bytes
    if foreign is not None and foreign > max(
        _FOREIGN_LEAST_BYTES, _FOREIGN_LEAST_SHARE * (card.total_bytes or 0)
    ):
        return True
    works = [_works(slot) for slot in slots]
    if card.utilisation is not None and all(each is not None for each in works):
        ours = sum(each for each in works if each is not None)
        if card.utilisation - ours > _FOREIGN_LEAST_BUSY:
            return True
    return any((holder.used_bytes or 0) > _FOREIGN_LEAST_BYTES for holder in card.holders)
