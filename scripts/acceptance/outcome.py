"""What a check found, as a value: JSON, lines for people, and a results page as Markdown for
docs/results.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benches.common import print_table, short, table

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One check. Its name, as `--only` takes it, and what must hold are the suite's to fill in."""

    check: str = ""
    must_hold: str = ""  # in words, with the limits that were applied
    figures: Row = field(default_factory=dict)  # flat; numbers with a unit suffix
    rows: Sequence[Row] = ()  # a table, all rows with the same keys
    broken: Sequence[str] = ()  # what does not hold
    notes: Sequence[str] = ()
    """What a reader must know to read the figures right: what was scaled, what claim did not come
    true.
    """
    skipped: str | None = None  # why the check could not be made here; then it counts neither way

    @property
    def ok(self) -> bool | None:
        return None if self.skipped is not None else not self.broken

    @property
    def word(self) -> str:
        return {None: "SKIPPED", True: "OK", False: "BROKEN"}[self.ok]

    def as_json(self) -> dict[str, Any]:
        """Return plain data; numbers that JSON does not have become `None`."""
        return dict(_plain({**dataclasses.asdict(self), "ok": self.ok}))


def show(outcome: Outcome) -> None:
    print(f"\n{outcome.check}: {outcome.word}  ({outcome.must_hold})", file=sys.stderr)
    for key, value in outcome.figures.items():
        print(f"{key:>32}  {short(value)}", file=sys.stderr)
    if outcome.rows:
        print_table(outcome.rows)
    for label, sentences in (
        ("BROKEN", outcome.broken),
        ("note", outcome.notes),
        ("skipped", [outcome.skipped]),
    ):
        for sentence in filter(None, sentences):
            print(f"{label}: {sentence}", file=sys.stderr)
    sys.stderr.flush()


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a check measured
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def page(host: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    return "\n".join(_lines(host, outcomes)) + "\n"


def _lines(host: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield from (f"# Acceptance on {host['card']}, {str(host['date']).split(maxsplit=1)[0]}", "")
    yield from (_facts(host, outcomes), "")
    yield from _markdown(
        ["what", "value"], ([key, short(value)] for key, value in host.items() if key != "command")
    )
    yield from (f"| command | `{host['command']}` |", "", "## Checks", "")
    yield from _markdown(
        ["check", "verdict", "must hold"],
        ([each.check, each.word, each.must_hold] for each in outcomes),
    )
    for each in outcomes:
        yield from ("", f"## {each.check}: {each.word}", "")
        if each.figures:
            yield from _markdown(
                ["figure", "value"], ([key, short(value)] for key, value in each.figures.items())
            )
        if each.rows:
            heads, *rows = table(each.rows)
            yield from ("", *_markdown(heads, rows))
        sentences = [*each.broken, *each.notes, *([each.skipped] if each.skipped else [])]
        if sentences:
            yield from ("", *(f"- {sentence}" for sentence in sentences))


def _facts(host: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    by_verdict = {
        ok: [each.check for each in outcomes if each.ok is ok] for ok in (True, False, None)
    }
    where = (
        f"{host['card']}, driver {short(host['driver'])}, torch {host['torch']}, Python "
        f"{host['python']}"
    )
    words = [f"{where}, {host['date']}: {len(by_verdict[True])} of {len(outcomes)} checks hold"]
    words += [f"broken: {', '.join(by_verdict[False])}"] if by_verdict[False] else []
    words += [f"skipped: {', '.join(by_verdict[None])}"] if by_verdict[None] else []
    return "; ".join(words) + "."


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (heads, None, *rows):
        yield (
            f"|{' --- |' * len(heads)}"
            if row is None
            else f"| {' | '.join(c.replace('|', '/') for c in row)} |"
        )
