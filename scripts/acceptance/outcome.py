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

from benches.common import print_figures, short, table

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

    def show(self) -> None:
        print(f"\n{self.check}: {self.word}  ({self.must_hold})", file=sys.stderr)
        print_figures({**self.figures, "rows": self.rows})
        told = {"BROKEN": self.broken, "note": self.notes, "skipped": [self.skipped]}
        for label, sentences in told.items():
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


def page(host: Row, outcomes: Sequence[Outcome]) -> str:
    return "\n".join(_lines(host, outcomes)) + "\n"


def _lines(host: Row, outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield from (f"# Acceptance on {host['card']}, {str(host['date']).split(maxsplit=1)[0]}", "")
    yield from (_facts(host, outcomes), "")
    yield from _markdown(["what", "value"], _cells(host, without="command"))
    yield from (f"| command | `{host['command']}` |", "", "## Checks", "")
    verdicts = ([each.check, each.word, each.must_hold] for each in outcomes)
    yield from _markdown(["check", "verdict", "must hold"], verdicts)
    for each in outcomes:
        yield from ("", f"## {each.check}: {each.word}", "")
        if each.figures:
            yield from _markdown(["figure", "value"], _cells(each.figures))
        if each.rows:
            heads, *rows = table(each.rows)
            yield from ("", *_markdown(heads, rows))
        sentences = [*each.broken, *each.notes, *([each.skipped] if each.skipped else [])]
        if sentences:
            yield from ("", *(f"- {sentence}" for sentence in sentences))


def _facts(host: Row, outcomes: Sequence[Outcome]) -> str:
    kept, broken, skipped = (
        [each.check for each in outcomes if each.ok is ok] for ok in (True, False, None)
    )
    where = "{card}, driver {}, torch {torch}, Python {python}, {date}"
    words = [where.format(short(host["driver"]), **host)]
    words[0] += f": {len(kept)} of {len(outcomes)} checks hold"
    words += [f"broken: {', '.join(broken)}"] * bool(broken)
    words += [f"skipped: {', '.join(skipped)}"] * bool(skipped)
    return "; ".join(words) + "."


def _cells(figures: Row, *, without: str = "") -> Iterator[Sequence[str]]:
    return ([key, short(value)] for key, value in figures.items() if key != without)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate((heads, *rows)):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
        if number == 0:
            yield f"|{' --- |' * len(heads)}"
