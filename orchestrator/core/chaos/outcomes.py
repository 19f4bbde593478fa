"""The outcome of each injected fault, derived from how slots change. Injects nothing (`schedule.py`). Pure."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.chaos.state import (
    ChaosState,
    FaultOutcome,
    Sent,
    close,
    down_around,
    new_fault,
    sent_to,
    with_down,
    without,
)
from orchestrator.core.slot import Phase, Slot
from workers.messages import FaultKind, Report, Verdict

#: Faults of single steps and checks: reports name them by their events.
_STEP_FAULTS = frozenset({FaultKind.OOM, FaultKind.RAISE, FaultKind.FLIP})


def watch(book: ChaosState, before: Slot, after: Slot, accepted: Report | None, now_s: float) -> ChaosState:
    """Take in what an event made of a slot; called at every one, before the commands that follow are performed.

    Args:
        book: As it was.
        before: The slot before the event.
        after: The slot after it.
        accepted: The report that the event brought, if it was accepted.
        now_s: Monotonic seconds.
    """
    if after is before or book.over:
        return book
    slot, report = after.slot, after.report
    died = after.restarts > before.restarts
    left = after.phase is Phase.ABSENT and before.phase is not Phase.ABSENT
    given_up = after.phase is Phase.QUARANTINED and before.phase is not Phase.QUARANTINED
    silent = after.phase is Phase.STOPPED and bool(before.in_flight) and not after.in_flight and accepted is None
    if accepted is not None:
        book = _step_faults(book, after, accepted, given_up=given_up, now_s=now_s)
    if died or left:
        book = _gone(book, before, after, accepted, died=died, now_s=now_s)
    elif silent and (sent := sent_to(book, slot)) is not None and _can_have_met(before, sent):
        book = _struck(book, before, sent, "no report when the run ended", now_s)
    if given_up:
        book = _given_up(book, after, now_s)
    elif after.ready and not before.ready and not died and report is not None and report.verdict is Verdict.OK:
        book = _back(book, after, now_s)
    works = after.phase is Phase.WORKING and after.ready and not after.draining
    if works == (slot in book.working):
        return book
    return replace(book, working=book.working | {slot} if works else book.working - {slot})


def ended(book: ChaosState, now_s: float) -> ChaosState:
    """The run is over: give every fault that is still under way its outcome. Nothing is injected or started again."""
    if book.over:
        return book
    for sent in book.sent:
        if sent.last_heard_s is not None:
            book = close(book, sent.fault, FaultOutcome.NOT_BACK, "not back when the run ended")
        else:
            book = close(book, sent.fault, FaultOutcome.MOOT, "never struck: the run ended first")
    for down in book.down:
        missing = ", ".join(sorted(down.waiting))
        fault = replace(down.fault, detail=f"waiting for {missing}" if missing else "still down")
        book = close(book, fault, FaultOutcome.NOT_BACK, "not back when the run ended")
    for planned in book.planned:
        book, fault = new_fault(book, FaultKind.NODE, planned.node, now_s)
        book = close(book, replace(fault, at_s=planned.at_s), FaultOutcome.MOOT, "never struck: the run ended first")
    return replace(book, over=True, sent=(), down=(), planned=())


def _gone(
    book: ChaosState, before: Slot, after: Slot, accepted: Report | None, *, died: bool, now_s: float
) -> ChaosState:
    """The slot's process is gone: by the injected fault, or by something else."""
    down = down_around(book, after.slot)
    if down is not None:
        book = with_down(book, replace(down, waiting=down.waiting | {after.slot}), now_s)
    sent = sent_to(book, after.slot)
    if sent is None or sent.last_heard_s is not None:
        return book
    reported_well = accepted is not None and accepted.verdict is Verdict.OK
    if not died or down is not None:
        first = "its node was lost"
    elif reported_well:
        first = "its process was replaced"
    elif not _can_have_met(before, sent):
        first = "its process ended in an earlier slice"
    else:
        return _struck(book, before, sent, after.reason, now_s)
    return close(without(book, sent), sent.fault, FaultOutcome.MOOT, f"overtaken: {first} first")


def _can_have_met(before: Slot, sent: Sent) -> bool:
    """Whether the slice that was running is the one the strike was sent with, or came after it."""
    return bool(before.in_flight) and before.in_flight[0].sequence >= sent.sequence


def _struck(book: ChaosState, before: Slot, sent: Sent, how: str, now_s: float) -> ChaosState:
    """Note that the fault has struck, as far as the head knows; a second death changes nothing."""
    if sent.last_heard_s is not None:
        return book
    last_heard_s = before.heard_at_s if before.heard_at_s is not None else now_s
    struck = replace(sent, last_heard_s=last_heard_s, fault=replace(sent.fault, detail=how))
    return replace(book, sent=tuple(struck if other is sent else other for other in book.sent))


def _back(book: ChaosState, after: Slot, now_s: float) -> ChaosState:
    """A fresh process of the slot has reported."""
    sent = sent_to(book, after.slot)
    if sent is not None and sent.last_heard_s is not None:
        took_s = now_s - sent.last_heard_s
        became = f"{after.state} again after {took_s:.1f} s"
        book = close(without(book, sent), sent.fault, FaultOutcome.RECOVERED, became, took_s)
    down = down_around(book, after.slot)
    if down is not None:
        book = with_down(book, replace(down, waiting=down.waiting - {after.slot}), now_s)
    return book


def _given_up(book: ChaosState, after: Slot, now_s: float) -> ChaosState:
    """The slot was quarantined: it does not come back in this run."""
    slot = after.slot
    sent = sent_to(book, slot)
    if sent is not None and sent.last_heard_s is not None:
        book = close(without(book, sent), sent.fault, FaultOutcome.GIVEN_UP, f"given up: {after.reason}")
    elif sent is not None:
        book = close(without(book, sent), sent.fault, FaultOutcome.MOOT, "overtaken: its slot was given up first")
    down = down_around(book, slot)
    if down is not None and slot in down.waiting:
        book = with_down(book, replace(down, waiting=down.waiting - {slot}, given_up=(*down.given_up, slot)), now_s)
    return replace(book, quarantined=book.quarantined | {slot})


def _step_faults(book: ChaosState, after: Slot, report: Report, *, given_up: bool, now_s: float) -> ChaosState:
    """Record the faults of single steps that a report names."""
    if given_up:
        fate, became = FaultOutcome.GIVEN_UP, f"given up: {after.reason}"
    elif report.error is not None:
        fate, became = FaultOutcome.SURVIVED, "ended its slice; the process continued"
    else:
        fate, became = FaultOutcome.SURVIVED, "survived in the same slice"
    for event in report.events:
        kind, count = event.detail.get("kind"), event.detail.get("count")
        if event.name != "chaos" or kind not in _STEP_FAULTS or not isinstance(count, int):
            continue
        words = became
        if kind == FaultKind.FLIP:
            words = "found by the check" if report.counts.verify_errors >= count else "not all found by the checks"
        key = (FaultKind(str(kind)), after.slot, words)
        known = next((fault for fault in book.steps if (fault.kind, fault.target, fault.became) == key), None)
        if known is not None:
            more = replace(known, count=known.count + count)
            book = replace(book, steps=tuple(more if fault is known else fault for fault in book.steps))
        else:
            book, fault = new_fault(book, key[0], after.slot, now_s)
            book = replace(book, steps=(*book.steps, replace(fault, fate=fate, became=words, count=count)))
    return book
