"""From facts to the causes that kept cards from work, the largest share of time first. Pure.

A slot's time, from its first report on, is divided by its states; the time in which it reported is
divided further by its counters. Shares need not add up to 1: the rest is work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Final

from orchestrator.core.slot import HeadState
from orchestrator.lab.advise.facts import CardHistory, RunHistory, SlotHistory
from workers.messages import STARVED, WorkerState
from workers.units import GIB, MIB


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


def divide(card: CardHistory) -> Division:
    """Return where the time of a card has gone."""
    slots = [slot for slot in card.slots if sum(slot.states_s.values()) > 0]
    seen_s = sum(sum(slot.states_s.values()) for slot in slots)
    if not slots:
        return Division(seen_s=0.0, busy=None, shares={})
    has_neighbour = _has_neighbour(card, slots)
    parts = [_of_slot(slot, card, has_neighbour=has_neighbour) for slot in slots]
    shares = {cause: fmean(part.get(cause, 0.0) for part in parts) for cause in Cause}
    works = [work for slot in slots if (work := _works(slot)) is not None]
    if not works:
        return Division(seen_s=seen_s, busy=None, shares=_positive(shares))
    if card.uuid is None:  # the slots of a processor have cores of their own
        return Division(seen_s=seen_s, busy=fmean(works), shares=_positive(shares))
    together = min(1.0, sum(works))
    # While one slot is idle another may use the card; only what all of them leave idle is lost.
    idle_of_slot = 1 - fmean(works)
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


def _of_slot(slot: SlotHistory, card: CardHistory, *, has_neighbour: bool) -> dict[Cause, float]:
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


def _reported(slot: SlotHistory) -> float:
    """Return the share of the time in which a process reported."""
    seen_s = sum(slot.states_s.values())
    return (
        sum(seconds for state, seconds in slot.states_s.items() if isinstance(state, WorkerState))
        / seen_s
    )


def _got(slot: SlotHistory) -> float | None:
    return None if slot.duty_got is None else min(1.0, slot.duty_got) * _reported(slot)


def _works(slot: SlotHistory) -> float | None:
    """Return the share of the time in which it kept the device at work, without the
    wait for data.
    """
    got = _got(slot)
    return None if got is None else max(0.0, got - _reported(slot) * (slot.data_wait or 0.0))


def _has_neighbour(card: CardHistory, slots: list[SlotHistory]) -> bool:
    """Say whether another program uses the card: by memory, load, or what its driver says."""
    foreign = card.foreign_bytes
    if foreign is not None and foreign > max(
        _FOREIGN_LEAST_BYTES, _FOREIGN_LEAST_SHARE * (card.total_bytes or 0)
    ):
        return True
    works = [work for slot in slots if (work := _works(slot)) is not None]
    is_told = card.utilisation is not None and len(works) == len(slots)
    if is_told and (card.utilisation or 0.0) - sum(works) > _FOREIGN_LEAST_BUSY:
        return True
    return any((holder.used_bytes or 0) > _FOREIGN_LEAST_BYTES for holder in card.holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """One cause on one card."""

    cause: Cause
    share: float
    """Of the time, 0..1."""
    text: str
    slots: tuple[str, ...]
    """That are held, or were given up, where that is the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardAnswer:
    """Why one card was not busy."""

    card: CardHistory
    division: Division
    causes: tuple[CauseShare, ...]
    """The largest first, without those that hardly count."""
    unknown: str | None
    """Why nothing can be said; `None` if something can."""


def answers(run: RunHistory) -> tuple[CardAnswer, ...]:
    """Return the answer for each card, in the order of the facts."""
    return tuple(_answer(card) for card in run.cards)


def _answer(card: CardHistory) -> CardAnswer:
    division, unknown = divide(card), None
    if division.seen_s < LEAST_SEEN_S:
        unknown = f"its workers were seen at work for {division.seen_s:.0f} s, which is too short"
    elif division.busy is None and not division.shares:
        unknown = "no worker has reported how long it kept the card busy"
    shares = () if unknown is not None else division.shares.items()
    causes = [_cause(cause, share, card) for cause, share in shares if share >= LEAST_SHARE]
    causes.sort(key=lambda each: -each.share)
    return CardAnswer(card=card, division=division, causes=tuple(causes), unknown=unknown)


#: What was seen, with what `_cause` fills in; what to do about it is in `advice.py`.
_TEXTS: Final[Mapping[Cause, str]] = {
    Cause.DATA: "it waited for data",
    Cause.COPIES: "batches were copied from the host to the device",
    Cause.OPTIMIZER: "gradients were clipped and weights updated",
    Cause.SYNCHRONISATIONS: "the program waited for the card with nothing more for it to do, as it "
    "does to read a value",
    Cause.GAPS: "it had work and ran no kernel: it waited for the host between kernels",
    Cause.DUTY: "its workers rested: the duty lets each of them use {duty} % of the time",
    Cause.HEAT: "workers paused or did less, or the card lowered its clock, because it was "
    "hot{degrees}",
    Cause.NEIGHBOUR: "another program uses the card{who}",
    Cause.SLOW: "it was slower than such workers have been on it ({best} % of their best), and "
    "nothing here says why",
    Cause.MEMORY: "not even the smallest step of a worker fitted into its memory",
    Cause.RESTARTS: "workers were started again",
    Cause.LOST: "{node} was not in the cluster",
    Cause.HELD: "you held {slots}",
    Cause.QUARANTINED: "{slots} was given up",
    Cause.HEAD: "workers waited for their next slice, or for the processor",
}


def _cause(cause: Cause, share: float, card: CardHistory) -> CauseShare:
    states = {Cause.HELD: "HELD", Cause.QUARANTINED: "QUARANTINED"}
    slots = [slot.slot for slot in card.slots if states.get(cause) in slot.states_s]
    text = _TEXTS[cause].format(
        duty=_range(slot.duty_asked for slot in card.slots),
        best=_range(slot.of_best for slot in card.slots),
        degrees="" if card.hottest_c is None else f", up to {card.hottest_c:.0f} C",
        who=_who(card),
        node=card.node,
        slots=", ".join(slots),
    )
    return CauseShare(cause=cause, share=share, text=text, slots=tuple(slots))


def _range(values: Iterable[float | None]) -> str:
    """Return shares in per cent: "60", or "60 to 70"."""
    pcts = sorted({round(100 * value) for value in values if value is not None})
    return f"{pcts[0]} to {pcts[-1]}" if len(pcts) > 1 else "".join(map(str, pcts))


def _who(card: CardHistory) -> str:
    foreign = card.foreign_bytes
    held = f", and holds {foreign / GIB:.1f} GiB of it" if foreign else ""
    names = [f"{holder.name or 'unknown'} (pid {holder.pid})" for holder in card.holders[:3]]
    return f"{held}; now there: {', '.join(names)}" if names else held
