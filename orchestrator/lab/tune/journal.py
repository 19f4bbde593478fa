"""What a tuning has measured so far, one JSON object a line, so that one that was killed can go on.

Each line is written as soon as it is known. The last one may be cut off by a kill, and is then left
out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from workers.tuning.messages import Opened

FILE: Final = "rounds.jsonl"


@dataclass(slots=True, kw_only=True)
class PassData:
    """The measurements of one pass."""

    rounds: list[Mapping[str, float]] = field(default_factory=list)
    """Seconds a sample of each arm, of the rounds that count."""
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason."""
    lost: dict[str, str] = field(default_factory=dict)
    """Arms that refused or died, with the reason."""
    clocks_mhz: list[float] = field(default_factory=list)
    """Of the card, one of each round that counts; empty without a card."""
    later: dict[str, dict[int, float]] = field(default_factory=dict)
    """Validation losses after so many turns. Those of two arms after equally many are those at
    equal time.
    """
    over_at_s: float = -1.0
    """The budget with which the pass came to its end; a larger one continues it."""


class Journal:
    """The measurements, in memory and in the file."""

    def __init__(self, folder: Path) -> None:
        """Read what is there."""
        self._path = folder / FILE
        self.opened: dict[str, Opened] = {}
        """First steps of each arm, of all passes."""
        self.passes: dict[str, PassData] = {}
        self.steps: int | None = None
        """Of the comparison; `None` until the baseline's speed is known."""
        self.elapsed_s = 0.0
        """That earlier processes have spent."""
        if self._path.exists():
            text = self._path.read_text(encoding="utf-8")
            if not text.endswith("\n"):
                with self._path.open("a", encoding="utf-8") as file:
                    file.write("\n")
            for line in text.splitlines():
                try:
                    self._take(json.loads(line))
                except ValueError:
                    continue  # the line that a kill cut off

    def data(self, name: str) -> PassData:
        """Return the measurements of a pass."""
        return self.passes.setdefault(name, PassData())

    def note(self, kind: str, elapsed_s: float, **detail: Any) -> None:  # noqa: ANN401 - whatever JSON holds
        """Take in a measurement, and write it."""
        entry = {"kind": kind, "elapsed_s": round(elapsed_s, 3), **detail}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._take(entry)

    def note_opened(self, name: str, opened: Opened, elapsed_s: float) -> None:
        """Take in the first steps of an arm."""
        self.note("opened", elapsed_s, arm=name, opened=asdict(opened))

    def _take(self, entry: Mapping[str, Any]) -> None:
        self.elapsed_s = max(self.elapsed_s, float(entry["elapsed_s"]))
        kind = entry["kind"]
        if kind == "steps":
            self.steps = int(entry["steps"])
            return
        if kind == "opened":
            plain = entry["opened"]
            self.opened[entry["arm"]] = Opened(**{**plain, "losses": tuple(plain["losses"])})
            return
        data = self.data(entry["pass_name"])
        if kind == "round":
            if entry["dropped"] is None:
                data.rounds.append(entry["seconds"])
                if entry.get("clock_mhz"):
                    data.clocks_mhz.append(entry["clock_mhz"])
            else:
                data.dropped[entry["dropped"]] = data.dropped.get(entry["dropped"], 0) + 1
        elif kind == "lost":
            data.lost[entry["arm"]] = entry["reason"]
        elif kind == "later":
            data.later.setdefault(entry["arm"], {})[entry["turns"]] = entry["loss"]
        elif kind == "over":
            data.over_at_s = entry["budget_s"]
