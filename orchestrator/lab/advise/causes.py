"""From facts to causes in words, the one that took most of the time first. Pure.

Says what was seen; what to do about it is in `advice.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.lab.advise.facts import CardFacts, RunFacts
from orchestrator.lab.advise.shares import LEAST_SEEN_S, LEAST_SHARE, Cause, Division, divide
from workers.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One cause on one card."""

    cause: Cause
    card: CardFacts
    share: float
    """Of the time, 0..1."""
    text: str

    def slots_in(self, state: str) -> tuple[str, ...]:
        """Return the slots of the card that have been in a state."""
        return _in_state(self.card, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardAnswer:
    """Why one card was not busy."""

    card: CardFacts
    division: Division
    causes: tuple[Found, ...]
    """The largest first, without those that hardly count."""
    unknown: str | None
    """Why nothing can be said; `None` if something can."""


def answers(run: RunFacts) -> tuple[CardAnswer, ...]:
    """Return the answer for each card, in the order of the facts."""
    return tuple(_answer(card) for card in run.cards)


def _answer(card: CardFacts) -> CardAnswer:
    division = divide(card)
    found = (
        Found(cause=cause, card=card, share=share, text=_text(cause, card))
        for cause, share in division.shares.items()
        if share >= LEAST_SHARE
    )
    unknown = None
    if division.seen_s < LEAST_SEEN_S:
        unknown = f"its workers were seen at work for {division.seen_s:.0f} s, which is too short"
    elif division.busy is None and not division.shares:
        unknown = "no worker has reported how long it kept the card busy"
    causes = () if unknown is not None else tuple(sorted(found, key=lambda each: -each.share))
    return CardAnswer(card=card, division=division, causes=causes, unknown=unknown)


def _text(cause: Cause, card: CardFacts) -> str:  # noqa: C901, PLR0911, PLR0912 - one sentence for each cause
    match cause:
        case Cause.DATA:
            return "it waited for data"
        case Cause.COPIES:
            return "batches were copied from the host to the device"
        case Cause.OPTIMIZER:
            return "gradients were clipped and weights updated"
        case Cause.SYNCHRONISATIONS:
            return (
                "the program waited for the card with nothing more for it to do, as it does to "
                "read a value"
            )
        case Cause.GAPS:
            return "it had work and ran no kernel: it waited for the host between kernels"
        case Cause.DUTY:
            asked = _range(slot.duty_asked for slot in card.slots)
            return f"its workers rested: the duty lets each of them use {asked} % of the time"
        case Cause.HEAT:
            hot = "" if card.hottest_c is None else f", up to {card.hottest_c:.0f} C"
            return (
                "workers paused or did less, or the card lowered its clock, because it was "
                f"hot{hot}"
            )
        case Cause.NEIGHBOUR:
            return f"another program uses the card{_who(card)}"
        case Cause.SLOW:
            best = _range(slot.of_best for slot in card.slots)
            return (
                f"it was slower than such workers have been on it ({best} % of their best), "
                "and nothing here says why"
            )
        case Cause.MEMORY:
            return "not even the smallest step of a worker fitted into its memory"
        case Cause.RESTARTS:
            return "workers were started again"
        case Cause.LOST:
            return f"{card.node} was not in the cluster"
        case Cause.HELD:
            return f"you held {', '.join(_in_state(card, 'HELD'))}"
        case Cause.QUARANTINED:
            return f"{', '.join(_in_state(card, 'QUARANTINED'))} was given up"
        case Cause.HEAD:
            return "workers waited for their next slice, or for the processor"


def _range(values: Iterable[float | None]) -> str:
    """Return shares in per cent: "60", or "60 to 70"."""
    known = sorted({round(100 * value) for value in values if value is not None})
    return f"{known[0]} to {known[-1]}" if len(known) > 1 else str(*known)


def _in_state(card: CardFacts, state: str) -> tuple[str, ...]:
    return tuple(
        slot.slot for slot in card.slots if any(known.value == state for known in slot.states_s)
    )


def _who(card: CardFacts) -> str:
    foreign = card.foreign_bytes
    held = f", and holds {foreign / GIB:.1f} GiB of it" if foreign else ""
    names = ", ".join(
        f"{holder.name or 'unknown'} (pid {holder.pid})" for holder in card.holders[:3]
    )
    return f"{held}; now there: {names}" if names else held
