"""Where a replay of a run stands: which moment is shown instead of now, and whether it plays on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.record import history
from orchestrator.record.archive import StoredRun
from orchestrator.record.model import Snapshot


@dataclass(slots=True)
class Replay:
    """Of one run folder."""

    folder: Path
    at_unix_s: float | None = None
    """The moment that is shown; `None`: now."""
    plays: bool = False

    def seek(self, by_s: float, run: StoredRun) -> Snapshot | None:
        """Go so much later or earlier and return the run as it was then; `None` if nothing was
        sampled yet.

        Raises:
            ArchiveError: The run folder cannot be read.
        """
        known = history.sampled_between(self.folder)
        if known is None:
            return None
        at_unix_s = known[1] if self.at_unix_s is None else self.at_unix_s
        self.at_unix_s = min(max(at_unix_s + by_s, known[0]), known[1])
        self.plays = self.plays and self.at_unix_s < known[1]
        return history.moment(self.folder, self.at_unix_s, run)
