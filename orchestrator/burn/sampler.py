"""Watches a run and keeps what its verdict needs: samples of every worker, and its last snapshot.

A watcher beside the one that shows the run. Does not judge, and sees nothing that the snapshot does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from orchestrator.burn.verdict import Measured, Sample
from orchestrator.watch.model import Row, Snapshot

#: Samples of a long run with a thousand workers must fit into memory.
_SAMPLES_MOST: Final = 600

_SAMPLE_EVERY_S: Final = 1.0


class Sampler:
    """Takes samples of one run."""

    def __init__(self, length_s: float) -> None:
        """Prepare.

        Args:
            length_s: Planned, of the run.
        """
        self._length_s = length_s
        self._every_s = max(_SAMPLE_EVERY_S, length_s / _SAMPLES_MOST)
        self._due_s = 0.0
        self._samples: dict[str, list[Sample]] = {}
        self.last: Snapshot | None = None
        """The latest picture of the run; `None` if it never came to one."""

    def update(self, snapshot: Snapshot) -> None:
        """Take a sample of every worker, if one is due and the planned time has begun."""
        self.last = snapshot
        if 0.0 < snapshot.elapsed_s < snapshot.duration_s and snapshot.elapsed_s >= self._due_s:
            self._due_s = snapshot.elapsed_s + self._every_s
            for row in snapshot.rows:
                self._samples.setdefault(row.slot, []).append(_sample(row, snapshot.elapsed_s))

    def close(self, snapshot: Snapshot) -> None:
        """Take the run as it ended."""
        self.last = snapshot

    def measured(self, alarms: Mapping[str, Sequence[str]], unchecked: Mapping[str, str]) -> tuple[Measured, ...]:
        """Return what was seen of every worker.

        Args:
            alarms: Of each slot, the names of those that were raised.
            unchecked: Of each slot whose results were checked no more, why.
        """
        rows = () if self.last is None else self.last.rows
        return tuple(
            Measured(
                row=row,
                length_s=self._length_s,
                samples=tuple(self._samples.get(row.slot, ())),
                alarms=tuple(dict.fromkeys(alarms.get(row.slot, ()))),
                unchecked=unchecked.get(row.slot),
            )
            for row in rows
        )


def _sample(row: Row, at_s: float) -> Sample:
    return Sample(
        at_s=at_s,
        state=row.state,
        tflops=row.tflops,
        reserved_bytes=row.reserved_bytes,
        # Temperatures that are hot for a card are normal for a processor.
        temperature_c=row.temperature_c if row.temperature_of == "card" else None,
        throttle_pct=row.throttle_pct,
    )
