"""Finds cards on which every worker keeps dying, so that the card is quarantined and not each
worker. Pure.

A single worker that keeps dying is quarantined by the lifecycle (`lifecycle.py`). If every worker
of a card does, the likely cause is the card, its driver, its power or its cable, and one message is
enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from orchestrator.core.placement import SlotPlan
from orchestrator.core.processes import without_progress
from orchestrator.core.slot import Phase, Slot

#: Deaths within the window, without progress between them, that make a worker count as one that
#: keeps dying. Two may be a coincidence of all workers being killed at once and once more; the
#: slot's own limit is higher.
_DEATHS = 3

#: With one worker on a card, a faulty card cannot be distinguished from a faulty worker.
_LEAST_WORKERS = 2


def by_card(plans: Mapping[str, SlotPlan], slots: Mapping[str, Slot]) -> dict[str, list[Slot]]:
    """Return each card, as a person would call it, with the slots on it.

    Where none is known, the node's.
    """
    cards: defaultdict[str, list[Slot]] = defaultdict(list)
    for name, plan in plans.items():
        device, card = slots[name].device, plan.gpu or "card"
        if device is not None and device.uuid is not None:
            card = f"{device.name} ({device.uuid})"
        cards[f"{plan.spec.node}'s {card}"].append(slots[name])
    return dict(cards)


def cards_to_quarantine(
    cards: Mapping[str, Sequence[Slot]], now_s: float, window_s: float
) -> dict[str, str]:
    """Return which of the cards of `by_card` to give up at `now_s` (monotonic seconds), each with
    the reason; deaths count for `window_s`.
    """
    return {
        card: _reason(card, slots, window_s)
        for card, slots in cards.items()
        if len(slots) >= _LEAST_WORKERS
        and any(slot.phase is not Phase.QUARANTINED for slot in slots)
        and all(_is_down(slot, now_s - window_s) for slot in slots)
    }


def _reason(card: str, slots: Sequence[Slot], window_s: float) -> str:
    last = max(slots, key=lambda slot: slot.deaths_at_s[-1:] or (0.0,))
    text = (
        f"{card}: all {len(slots)} workers keep dying, at least {_DEATHS} times each in "
        f"{window_s:.0f} s; the last: {last.reason}"
    )
    on_card = any(slot.device is not None and slot.device.kind != "cpu" for slot in slots)
    return f"{text}; look for Xid errors in dmesg, and at power and cables" if on_card else text


def _is_down(slot: Slot, since_s: float) -> bool:
    if slot.phase is Phase.QUARANTINED:
        return True
    working = slot.phase is Phase.PAUSING or (slot.phase is Phase.WORKING and not slot.ready)
    deaths = [at for at in without_progress(slot) if at > since_s]
    return working and len(deaths) >= _DEATHS
