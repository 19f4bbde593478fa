"""Finds cards on which every worker keeps dying, so that the head quarantines the card instead of
each worker. Pure.

The lifecycle (`lifecycle.py`) quarantines a single worker that keeps dying. If all workers of a
card keep dying, the likely cause is the card, its driver, its power or its cable, and one message
is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from orchestrator.core.placement import SlotPlan
from orchestrator.core.processes import without_progress
from orchestrator.core.slot import Phase, Slot

#: A worker keeps dying after this number of deaths within the window and without progress. Two may
#: be a coincidence: all workers were killed twice. `run.max_deaths` of a slot is higher.
_DEATHS = 3

#: With one worker on a card, a faulty card cannot be distinguished from a faulty worker.
_LEAST_WORKERS = 2


def by_card(plans: Mapping[str, SlotPlan], slots: Mapping[str, Slot]) -> dict[str, list[Slot]]:
    """Return the slots on each card, keyed by a name for people. A node whose cards are not known
    yet counts as one card.
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
    """Return which of the cards of `by_card` to quarantine at `now_s` (monotonic seconds), with the
    reason; deaths of the last `window_s` seconds count.
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
