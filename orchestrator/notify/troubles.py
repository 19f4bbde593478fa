"""What is wrong with a run, as troubles with the place that each belongs to: the alerts, some of them without delay.

Judges one frame after the other. `alerts/catalogue.py` has what counts as wrong; `digest.py` decides what is told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from orchestrator.alerts.catalogue import ALERTS
from orchestrator.alerts.judge import AlertWatch, judge
from orchestrator.config.schema import Severity
from orchestrator.notify.digest import Trouble
from orchestrator.watch.follow import Frame, Freshness

_NODE_MISSING: Final = "NodeMissing"
_SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
_AT_ONCE: Final = frozenset({_NODE_MISSING, "CardPaused"})
"""Told without waiting whether it lasts."""
_LEFT_OUT: Final = frozenset({"HeadGone", "RunEnded", "RunDegraded", "NotifyFailing"})
"""The end of a run is told of by the last message, and failing messages by none."""
_TOLD: Final = tuple(
    replace(alert, for_s=0.0) if alert.name in _AT_ONCE else alert
    for alert in ALERTS
    if not alert.opt_in and alert.name not in _LEFT_OUT
)


class Judge:
    """What is wrong with one run, and since when."""

    def __init__(self) -> None:
        self._watch = AlertWatch(alerts=_TOLD)
        self._missing: frozenset[str] = frozenset()
        self._is_gone = False
        self._nodes: dict[str, str] = {}

    def troubles(self, frame: Frame, unix_s: float, at_least: Severity) -> tuple[Trouble, ...]:
        """Return what is wrong now, without what is less severe than `at_least`."""
        if frame.run.updated_at_unix_s is None:
            return ()  # it has not begun to work, and says nothing of its nodes yet
        snapshot = frame.snapshot
        self._is_gone = frame.freshness is Freshness.HEAD_GONE
        self._missing = frozenset(snapshot.nodes_planned) - frozenset(snapshot.nodes_seen)
        self._nodes = {row.slot: row.node for row in snapshot.rows}
        # What was wrong at last is told of although no head works on the run any more.
        self._watch, firing = judge(self._watch, _as_if_live(frame), unix_s)
        least = _SEVERITIES.index(at_least)
        return tuple(
            Trouble(
                alert=one.alert.name,
                severity=one.alert.severity,
                subject=one.subject.name,
                place=one.subject.place,
                since_unix_s=one.since_unix_s,
                text=one.subject.text or one.text,
                what_to_do=one.alert.what_to_do,
            )
            for one in firing
            if _SEVERITIES.index(one.alert.severity) >= least
        )

    def is_unknown(self, trouble: Trouble) -> bool:
        """Say whether the present state of a trouble cannot be known: its node is missing, or the head is gone."""
        is_of_missing = trouble.alert != _NODE_MISSING and self._nodes.get(trouble.subject) in self._missing
        return self._is_gone or is_of_missing


def _as_if_live(frame: Frame) -> Frame:
    late_s = 0.0 if frame.freshness in {Freshness.HEAD_GONE, Freshness.ENDED} else frame.late_s
    return replace(frame, freshness=Freshness.LIVE, late_s=late_s)
