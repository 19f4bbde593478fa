"""The answer as text for people and as JSON for scripts. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.advise.advice import Advice
from orchestrator.advise.causes import CardAnswer
from orchestrator.watch.cells import Glyphs
from orchestrator.watch.phrases import counted
from orchestrator.watch.summary import SCHEMA, summary_text

QUESTION = "Why is the card not busy?"


def answer_json(
    run_id: str | None, code: int, answers: Sequence[CardAnswer], advice: Sequence[Advice], notes: Sequence[str]
) -> str:
    """Return the answer as one JSON object; `null` is unknown."""
    told: dict[str, Any] = {
        "schema": SCHEMA,
        "run_id": run_id,
        "exit_code": code,
        "question": QUESTION,
        "cards": [_card(answer) for answer in answers],
        "advice": [asdict(one) for one in advice],
        "notes": list(notes),
    }
    return summary_text(told)


def _card(answer: CardAnswer) -> dict[str, Any]:
    card, busy = answer.card, answer.division.busy
    return {
        "node": card.node,
        "gpu_name": card.name,
        "gpu_uuid": card.uuid,
        "slots": [slot.slot for slot in card.slots],
        "seen_s": answer.division.seen_s,
        "busy_pct": None if busy is None else 100 * busy,
        "unknown": answer.unknown,
        "causes": [
            {"cause": found.cause.value, "share_pct": 100 * found.share, "text": found.text} for found in answer.causes
        ],
    }


def answer_lines(
    run_id: str | None, answers: Sequence[CardAnswer], advice: Sequence[Advice], notes: Sequence[str], glyphs: Glyphs
) -> Iterator[str]:
    """Yield the answer, line by line: each card with its causes, then what to do."""
    yield f"{QUESTION}" + ("" if run_id is None else f" (run {glyphs.clean(run_id)})")
    for answer in answers:
        yield ""
        yield from _card_lines(answer, glyphs)
    if advice:
        yield ""
        yield "What to change:"
    for number, one in enumerate(advice, start=1):
        key = "" if one.key is None else f"{one.key}: {one.value}. "
        yield f"{number:3}  {glyphs.clean(key + one.text)}"
        gain = _gain(one)
        yield f"     expected: {gain} (source: {glyphs.clean(one.source)})"
        yield f"     type: {glyphs.clean(one.command)}"
        if one.measure is not None:
            yield f"     measure: {glyphs.clean(one.measure)}"
    if not advice and any(answer.unknown is None for answer in answers):
        yield ""
        yield "Nothing to change."
    if notes:
        yield ""
        yield from (glyphs.clean(note) for note in notes)


def _card_lines(answer: CardAnswer, glyphs: Glyphs) -> Iterator[str]:
    card, busy = answer.card, answer.division.busy
    title = glyphs.clean(f"{card.node}, {card.name}, {counted(len(card.slots), 'worker')}")
    if answer.unknown is not None:
        yield f"{title}: cannot tell, because {glyphs.clean(answer.unknown)}"
        return
    yield f"{title}: {'busy share unknown' if busy is None else f'busy {100 * busy:.0f} % of the time'}"
    for found in answer.causes:
        yield f"  {100 * found.share:3.0f} %  {found.cause.value:<11}  {glyphs.clean(found.text)}"
    if not answer.causes:
        yield "  no cause took 5 % of the time"


def _gain(one: Advice) -> str:
    if one.gain_high is None:
        return "cannot be said"
    if one.gain_low is None or one.gain_low == 1.0:
        return f"at most {one.gain_high:.2f} x"
    return f"{one.gain_low:.2f} to {one.gain_high:.2f} x"
