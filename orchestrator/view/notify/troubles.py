"""What fires in a run, as troubles with the place that each belongs to.

The alerts are those of `orchestrator.view.alerts`; what a person is told of at once fires without
its pause. Does not decide what is told of it (`digest.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, get_args

from orchestrator.config.schema import Severity
from orchestrator.record.follow import Frame
from orchestrator.view.alerts.catalogue import ALERTS, WATCHER_DOWN
from orchestrator.view.alerts.facts import is_up
from orchestrator.view.alerts.judge import AlertWatch, judge
from orchestrator.view.alerts.model import Firing
from orchestrator.view.notify.digest import Trouble

_NODE_MISSING: Final = "NodeMissing"
_AT_ONCE: Final = frozenset({_NODE_MISSING, "CardPaused"})
#: The last message tells of the first three, and every digest of the last.
_TOLD_ANYWAY: Final = frozenset({"HeadGone", "RunEnded", "RunDegraded", "NotifyFailing"})
SEVEREST_FIRST: Final[tuple[Severity, ...]] = get_args(Severity)


class Judge:
    """Judges one frame of a run after the other."""

    def __init__(self, at_least: Severity) -> None:
        """Prepare for alerts that are `at_least` so severe."""
        told = SEVEREST_FIRST[: SEVEREST_FIRST.index(at_least) + 1]
        self._watch = AlertWatch(
            alerts=tuple(
                replace(alert, for_s=0.0) if alert.name in _AT_ONCE else alert
                for alert in ALERTS
                if alert.severity in told and alert.name not in _TOLD_ANYWAY and not alert.opt_in
            )
        )
        self._is_blind = False
        self._missing: frozenset[str] = frozenset()

    def troubles(self, frame: Frame | None, unix_s: float) -> tuple[Trouble, ...]:
        """Return what fires now; `frame` is `None` where the run cannot be read."""
        self._is_blind = frame is None or not is_up(frame)
        self._watch, firing = judge(self._watch, frame, unix_s)
        self._missing = frozenset(
            one.subject.node for one in firing if one.alert.name == _NODE_MISSING
        )
        return tuple(map(_trouble, firing))

    def is_unknown(self, trouble: Trouble) -> bool:
        """Say whether it cannot be known how a trouble stands: its node is missing, no head works,
        nothing is read.
        """
        if trouble.alert == WATCHER_DOWN.name:
            return False
        return self._is_blind or (trouble.alert != _NODE_MISSING and trouble.node in self._missing)


def _trouble(firing: Firing) -> Trouble:
    alert, subject = firing.alert, firing.subject
    return Trouble(
        alert=alert.name,
        severity=alert.severity,
        subject=subject.name,
        node=subject.node,
        place=subject.place,
        since_unix_s=firing.since_unix_s,
        text=firing.text,
        what_to_do=alert.what_to_do,
    )
