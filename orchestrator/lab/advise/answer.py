"""The verb `advise`: says why the cards of a run were not busy, and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from orchestrator.errors import NothingStoredError, one_line
from orchestrator.lab.advise.advice import Recommendation, advice, notes
from orchestrator.lab.advise.causes import CardAnswer, answers
from orchestrator.lab.advise.facts import facts_of
from orchestrator.lab.tune.results import read_results
from orchestrator.record.archive import read_run
from orchestrator.record.folders import LATEST, find_run, list_runs
from orchestrator.record.summary import SCHEMA, summary_text
from orchestrator.view.cells import clean
from orchestrator.view.phrases import counted

_REST = "work, and causes that took less than 5 % each"

QUESTION = "Why is the card not busy?"


def answer_json(
    run_id: str | None,
    code: int,
    answers: Sequence[CardAnswer],
    advice: Sequence[Recommendation],
    notes: Sequence[str],
) -> str:
    """Return the answer as one JSON object; `null` is unknown."""
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "run_id": run_id,
        "exit_code": code,
        "question": QUESTION,
        "cards": [_card(one) for one in answers],
        "advice": [asdict(one) for one in advice],
        "notes": list(notes),
    }
    return summary_text(answer)


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
            {"cause": cause.cause.value, "share_pct": 100 * cause.share, "text": cause.text}
            for cause in answer.causes
        ],
    }


def answer_lines(
    run_id: str | None,
    answers: Sequence[CardAnswer],
    advice: Sequence[Recommendation],
    notes: Sequence[str],
    width: int | None = None,
) -> Iterator[str]:
    """Yield the answer, line by line: each card with its causes, then what to do.

    Words are broken at a width, commands are not: they are there to be copied. `None`: nothing is
    broken.
    """
    yield f"{QUESTION}" + ("" if run_id is None else f" (run {clean(run_id)})")
    for answer in answers:
        yield ""
        yield from _card_lines(answer, width)
    if advice:
        yield ""
        yield "What to change:"
    for number, one in enumerate(advice, start=1):
        key = "" if one.key is None else f"{one.key}: {one.value}. "
        yield from _wrapped(f"{number:3}  ", clean(key + one.text), width)
        yield from _wrapped(" " * 5, f"expected: {_gain(one)} (source: {clean(one.source)})", width)
        yield f"     type: {clean(one.command)}"
        if one.measure is not None:
            yield f"     measure: {clean(one.measure)}"
    if not advice and any(answer.unknown is None for answer in answers):
        yield ""
        yield "Nothing to change."
    if notes:
        yield ""
    for note in notes:
        words, _, command = clean(note).partition("; type: ")
        yield from _wrapped("", f"{words}." if command else words, width)
        if command:
            yield f"     type: {command}"


def _wrapped(head: str, words: str, width: int | None) -> list[str]:
    """Return words behind a head, in lines of a width that begin below each other."""
    if width is None:
        return [head + words]
    indent = " " * len(head)
    return wrap(
        head + words,
        max(width, 40),
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _card_lines(answer: CardAnswer, width: int | None) -> Iterator[str]:
    card, busy = answer.card, answer.division.busy
    title = clean(f"{card.node}, {card.name}, {counted(len(card.slots), 'worker')}")
    if answer.unknown is not None:
        yield from _wrapped("", f"{title}: cannot tell, because {clean(answer.unknown)}", width)
        return
    share = "busy share unknown" if busy is None else f"busy {100 * busy:.0f} % of the time"
    yield from _wrapped("", f"{title}: {share}", width)
    causes = [(cause.cause.value, clean(cause.text)) for cause in answer.causes]
    percents = _percents([cause.share for cause in answer.causes])
    for percent, (name, text) in zip(percents, [*causes, ("the rest", _REST)], strict=True):
        yield from _wrapped(f"  {percent:3} %  {name:<11}  ", text, width)


def _percents(shares: Sequence[float]) -> list[int]:
    """Return shares of the time, and then what they leave, as whole percents that add up to 100.

    Rounded down, and up those of the largest remainders. Shares of more than all of the time are
    scaled down to it.
    """
    exact = [100 * share / max(1.0, sum(shares)) for share in (*shares, max(0.0, 1 - sum(shares)))]
    whole = [math.floor(percent) for percent in exact]
    largest = sorted(range(len(exact)), key=lambda at: whole[at] - exact[at])[: 100 - sum(whole)]
    return [percent + (at in largest) for at, percent in enumerate(whole)]


def _gain(one: Recommendation) -> str:
    if one.gain_high is None:
        return "cannot be said"
    if one.gain_low is None or one.gain_low == 1.0:
        return f"at most {one.gain_high:.2f} x"
    return f"{one.gain_low:.2f} to {one.gain_high:.2f} x"


NOTHING: Final = 0
ADVICE: Final = 1
CANNOT_TELL: Final = 3


def advise(
    runs_dir: Path,
    run_id: str,
    say: Callable[[str], None],
    *,
    json: bool,
    width: int | None = None,
) -> int:
    """Print the answer for a run and return the exit code: 0 nothing to change, 1 advice, 3 cannot
    tell.

    `width` is that of the terminal; `None`: there is none, and no line is broken.

    Raises:
        UsageError: There is no such run.
        ArchiveError: It cannot be read.
    """
    if run_id == LATEST and not list_runs(runs_dir):
        return _unknown(
            None, f"there is no run in {runs_dir}; type: python -m orchestrator run", say, json=json
        )
    folder = find_run(runs_dir, run_id)
    try:
        facts = facts_of(folder)
    except NothingStoredError as error:
        return _unknown(folder.name, str(error), say, json=json)
    if not facts.cards:
        run = read_run(folder)
        why = (
            f"run {run.facts.run_id} has had no worker yet"
            if run.error is None
            else f"it had no worker: {run.error}"
        )
        return _unknown(folder.name, one_line(why), say, json=json)
    cards = answers(facts)
    tunings = read_results()
    todo, more = advice(facts, cards, tunings), notes(facts, cards, tunings)
    can_tell = any(answer.unknown is None for answer in cards)
    code = ADVICE if todo else NOTHING if can_tell else CANNOT_TELL
    if json:
        say(answer_json(facts.run_id, code, cards, todo, more))
    else:
        for line in answer_lines(facts.run_id, cards, todo, more, width):
            say(line)
    return code


def _unknown(run_id: str | None, reason: str, say: Callable[[str], None], *, json: bool) -> int:
    say(answer_json(run_id, CANNOT_TELL, (), (), (reason,)) if json else f"Cannot tell: {reason}")
    return CANNOT_TELL
