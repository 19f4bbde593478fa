"""What a check found, as a value: JSON, lines for people, and a section of a results page can be made of it.

Does not measure and does not judge.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One check."""

    check: str
    """Its name, as `--only` takes it."""
    must_hold: str
    """In words, with the limits that were applied."""
    figures: Row = field(default_factory=dict)
    """Flat; numbers with a unit suffix."""
    rows: Sequence[Row] = ()
    """A table, all rows with the same keys."""
    broken: Sequence[str] = ()
    """What does not hold."""
    notes: Sequence[str] = ()
    """What a reader must know to read the figures right: what was scaled, what claim did not come true."""
    skipped: str | None = None
    """Why the check could not be made here; then it counts neither way."""

    @property
    def ok(self) -> bool | None:
        """Whether it holds; `None` if it was skipped."""
        return None if self.skipped is not None else not self.broken

    @property
    def word(self) -> str:
        """The verdict for people."""
        return {None: "SKIPPED", True: "OK", False: "BROKEN"}[self.ok]

    def as_json(self) -> dict[str, Any]:
        """Return plain data; numbers that JSON does not have become `None`."""
        plain: dict[str, Any] = _plain(
            {
                "check": self.check,
                "ok": self.ok,
                "must_hold": self.must_hold,
                "figures": dict(self.figures),
                "rows": [dict(row) for row in self.rows],
                "broken": list(self.broken),
                "notes": list(self.notes),
                "skipped": self.skipped,
            }
        )
        return plain


def unmeasured(check: str, must_hold: str, reason: str) -> Outcome:
    """Return the outcome of a check that broke off."""
    return Outcome(check=check, must_hold=must_hold, broken=[reason])


def show(outcome: Outcome) -> None:
    """Print one check for people, to standard error."""
    print(f"\n{outcome.check}: {outcome.word}  ({outcome.must_hold})", file=sys.stderr)
    for key, value in outcome.figures.items():
        print(f"{key:>32}  {short(value)}", file=sys.stderr)
    if outcome.rows:
        cells = list(table(outcome.rows))
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        for line in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), file=sys.stderr)
    for label, sentences in (("BROKEN", outcome.broken), ("note", outcome.notes)):
        for sentence in sentences:
            print(f"{label}: {sentence}", file=sys.stderr)
    if outcome.skipped is not None:
        print(f"skipped: {outcome.skipped}", file=sys.stderr)
    sys.stderr.flush()


def table(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the heads and then the cells of each row."""
    heads = list(rows[0])
    yield heads
    for row in rows:
        yield [short(row[head]) for head in heads]


def short(value: object) -> str:
    """Return a value as people read it; a dash for what is not known."""
    if value is None:
        return "–"  # noqa: RUF001 - as in the health table
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a check measured
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
