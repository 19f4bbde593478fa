"""What a check found, as a value: JSON, lines for people, and a section of a results page can be made of it.

Does not measure and does not judge.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benches.common import print_table, short

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One check."""

    check: str = ""
    """Its name, as `--only` takes it. This and what must hold are the suite's to fill in."""
    must_hold: str = ""
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
        plain: dict[str, Any] = _plain({**dataclasses.asdict(self), "ok": self.ok})
        return plain


def show(outcome: Outcome) -> None:
    """Print one check for people, to standard error."""
    print(f"\n{outcome.check}: {outcome.word}  ({outcome.must_hold})", file=sys.stderr)
    for key, value in outcome.figures.items():
        print(f"{key:>32}  {short(value)}", file=sys.stderr)
    if outcome.rows:
        print_table(outcome.rows)
    for label, sentences in (("BROKEN", outcome.broken), ("note", outcome.notes), ("skipped", [outcome.skipped])):
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
