"""What is wrong with a run, as troubles with the place that each belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import Severity
from orchestrator.core.slot import HeadState
from orchestrator.notify.digest import Trouble
from orchestrator.watch.follow import Frame, Freshness
from workers.messages import WorkerState

_SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")


class Judge:
    """Judges one frame after the other."""

    def __init__(self) -> None:
        self._missing: frozenset[str] = frozenset()
        self._is_gone = False
        self._nodes: dict[str, str] = {}
        self._since: dict[tuple[str, str], float] = {}

    def troubles(self, frame: Frame, unix_s: float, at_least: Severity) -> tuple[Trouble, ...]:
        """Return what is wrong now, without what is less severe than `at_least`."""
        self._is_gone = frame.freshness is Freshness.HEAD_GONE
        snapshot = frame.snapshot
        self._missing = frozenset(set(snapshot.nodes_planned) - set(snapshot.nodes_seen))
        self._nodes = {row.slot: row.node for row in snapshot.rows}
        least = _SEVERITIES.index(at_least)
        found = [one for one in self._found(frame, unix_s) if _SEVERITIES.index(one.severity) >= least]
        self._since = {one.key: one.since_unix_s for one in found}
        return tuple(found)

    def is_unknown(self, trouble: Trouble) -> bool:
        """Say whether the present state of a trouble cannot be known: its node is missing, or the head is gone."""
        if trouble.alert in {"HeadGone", "NodeMissing"}:
            return self._is_gone and trouble.alert == "NodeMissing"
        return self._is_gone or self._nodes.get(trouble.subject) in self._missing

    def _found(self, frame: Frame, unix_s: float) -> Iterator[Trouble]:
        def trouble(alert: str, severity: Severity, subject: str, place: str, text: str) -> Trouble:
            since = self._since.get((alert, subject), unix_s)
            return Trouble(alert=alert, severity=severity, subject=subject, place=place, since_unix_s=since, text=text)

        if self._is_gone:
            yield trouble("HeadGone", "critical", frame.run.facts.run_id, "", "the process of the run has ended")
        for node in sorted(self._missing):
            yield trouble("NodeMissing", "critical", node, node, "the node is not in the cluster")
        for row in frame.snapshot.rows:
            place = f"{row.node} {row.gpu_uuid}"
            if row.state is HeadState.QUARANTINED:
                yield trouble("SlotQuarantined", "critical", row.slot, place, row.reason)
            if row.state is WorkerState.CORRUPT:
                yield trouble("WrongResults", "critical", row.slot, place, row.reason)
            if row.state is WorkerState.PAUSED:
                yield trouble("CardPaused", "warning", row.slot, place, row.reason)
