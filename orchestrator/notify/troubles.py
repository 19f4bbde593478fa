"""What is wrong with a run, as troubles with the place that each belongs to: those that are told at once.

Judges one frame after the other. Does not decide what is told of it (`digest.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from orchestrator.config.schema import Severity
from orchestrator.core.slot import HeadState
from orchestrator.notify.digest import Trouble
from orchestrator.watch.follow import Frame, Freshness
from orchestrator.watch.model import Row
from workers.messages import WorkerState

_NODE_MISSING: Final = "NodeMissing"
_SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
_WRONG_FOR_S: Final = 3600.0
"""A wrong result counts for so long."""


class Judge:
    """What is wrong with one run, and since when."""

    def __init__(self) -> None:
        self._missing: frozenset[str] = frozenset()
        self._is_gone = False
        self._nodes: dict[str, str] = {}
        self._since: dict[tuple[str, str], float] = {}
        self._wrong: dict[str, tuple[int, float | None]] = {}
        """Slot -> wrong results so far, and when the last one was found; `None` before this process looked."""

    def troubles(self, frame: Frame, unix_s: float, at_least: Severity) -> tuple[Trouble, ...]:
        """Return what is wrong now, without what is less severe than `at_least`."""
        if frame.run.updated_at_unix_s is None:
            return ()  # it has not begun to work, and says nothing of its nodes yet
        snapshot = frame.snapshot
        self._is_gone = frame.freshness is Freshness.HEAD_GONE
        self._missing = frozenset(snapshot.nodes_planned) - frozenset(snapshot.nodes_seen)
        self._nodes = {row.slot: row.node for row in snapshot.rows}
        least = _SEVERITIES.index(at_least)
        found = [one for one in self._found(frame, unix_s) if _SEVERITIES.index(one.severity) >= least]
        self._since = {one.key: one.since_unix_s for one in found}
        return tuple(found)

    def is_unknown(self, trouble: Trouble) -> bool:
        """Say whether the present state of a trouble cannot be known: its node is missing, or the head is gone."""
        is_of_missing = trouble.alert != _NODE_MISSING and self._nodes.get(trouble.subject) in self._missing
        return self._is_gone or is_of_missing

    def _found(self, frame: Frame, unix_s: float) -> Iterator[Trouble]:
        def trouble(alert: str, severity: Severity, about: Row | str, text: str, what_to_do: str) -> Trouble:
            subject, place = (
                (about, about) if isinstance(about, str) else (about.slot, f"{about.node} {about.gpu_uuid}")
            )
            return Trouble(
                alert=alert,
                severity=severity,
                subject=subject,
                place=place,
                since_unix_s=self._since.get((alert, subject), unix_s),
                text=text,
                what_to_do=what_to_do,
            )

        for node in sorted(self._missing):
            why = "the node has not joined the cluster, or has left it"
            yield trouble(_NODE_MISSING, "critical", node, why, f"on {node}: python -m orchestrator up {node} --exec")
        for row in frame.snapshot.rows:
            if row.state is HeadState.QUARANTINED:
                yield trouble("SlotQuarantined", "critical", row, row.reason, "see docs/troubleshooting.md#quarantined")
            if self._is_wrong(row, unix_s):
                yield trouble(
                    "WrongResults", "critical", row, row.reason, "lower the clocks of the card, the memory's first"
                )
            if row.state is WorkerState.PAUSED:
                yield trouble("CardPaused", "warning", row, row.reason, "check dust, airflow and fan curve")

    def _is_wrong(self, row: Row, unix_s: float) -> bool:
        count = row.counts.verify_errors
        before, at_unix_s = self._wrong.get(row.slot, (count, None))
        if count > before:
            at_unix_s = unix_s
        self._wrong[row.slot] = count, at_unix_s
        is_recent = at_unix_s is not None and unix_s < at_unix_s + _WRONG_FOR_S
        return is_recent or row.state is WorkerState.CORRUPT
