"""The result of a check, as a value, as JSON, and as lines for people."""

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
    """The result of one check. The suite fills in `check`, its name, and `must_hold`."""

    check: str = ""  # the name for `--only`
    must_hold: str = ""  # a sentence with the limits that were applied
    figures: Row = field(default_factory=dict)  # flat; numbers with a unit suffix
    rows: Sequence[Row] = ()  # a table; all rows have the same keys
    broken: Sequence[str] = ()  # one sentence for each violated requirement
    notes: Sequence[str] = ()
    """Facts that a reader needs to interpret the figures, such as a scaled budget, or a claim that
    was not met.
    """
    skipped: str | None = None  # why the check could not be made; then it is neither ok nor broken

    @property
    def ok(self) -> bool | None:
        return None if self.skipped is not None else not self.broken

    @property
    def word(self) -> str:
        return {None: "SKIPPED", True: "OK", False: "BROKEN"}[self.ok]

    def as_json(self) -> dict[str, Any]:
        """Return plain data; infinite numbers and NaN become `None`."""
        return dict(_plain({**dataclasses.asdict(self), "ok": self.ok}))

    def show(self) -> None:
        print(f"\n{self.check}: {self.word}  ({self.must_hold})", file=sys.stderr)
        print_figures({**self.figures, "rows": self.rows})
        by_label = {"BROKEN": self.broken, "note": self.notes, "skipped": [self.skipped]}
        for label, sentences in by_label.items():
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
