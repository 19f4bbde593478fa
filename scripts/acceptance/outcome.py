"""What a check found, as a value: JSON, and lines for people."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benches.common import print_figures

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
