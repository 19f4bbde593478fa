"""From frames to alerts that fire: one that holds is pending, fires after a while, and is over
after another. Pure.

As Prometheus does it with `for` and `keep_firing_for`. Does not say what is wrong (`catalogue.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from orchestrator.record.follow import Frame
from orchestrator.view.alerts.catalogue import ALERTS, WATCHER_DOWN
from orchestrator.view.alerts.history import History
from orchestrator.view.alerts.model import Alert, Firing, Sight, Subject

_Key: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Active:
    """An alert that is pending or fires."""

    alert: Alert
    subject: Subject
    since_unix_s: float
    fires: bool = False
    over_since_unix_s: float | None = None
    """Since when it does not hold any more, while it still fires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertWatch:
    """What is known of one run between two judgements."""

    alerts: tuple[Alert, ...] = tuple(alert for alert in ALERTS if not alert.opt_in)
    run_id: str | None = None
    history: History = field(default_factory=History)
    active: Mapping[_Key, _Active] = field(default_factory=dict)


def judge(
    watch: AlertWatch, frame: Frame | None, now_unix_s: float, *, failed_notifications: int = 0
) -> tuple[AlertWatch, tuple[Firing, ...]]:
    """Take in how the run is now, and return what fires.

    `frame` is `None` if the run cannot be read.
    """
    if frame is not None and frame.run.facts.run_id != watch.run_id:
        watch = AlertWatch(alerts=watch.alerts, run_id=frame.run.facts.run_id)
    history, held = watch.history, tuple[tuple[Alert, Subject], ...]()
    if frame is None:
        held = ((WATCHER_DOWN, Subject(watch.run_id or "")),)
    else:
        history = history.after(frame, failed_notifications, now_unix_s)
        sight = Sight(frame=frame, history=history)
        held = tuple((alert, subject) for alert in watch.alerts for subject in alert.holds(sight))
    active = _followed(watch.active, held, now_unix_s)
    firing = (
        Firing(alert=one.alert, subject=one.subject, since_unix_s=one.since_unix_s)
        for one in active.values()
        if one.fires
    )
    return replace(watch, history=history, active=active), tuple(firing)


def _followed(
    active: Mapping[_Key, _Active], held: Iterable[tuple[Alert, Subject]], now_unix_s: float
) -> dict[_Key, _Active]:
    followed = {}
    for alert, subject in held:
        key = alert.name, subject.name
        before = active.get(key)
        since_unix_s = now_unix_s if before is None else before.since_unix_s
        fires = (before is not None and before.fires) or now_unix_s - since_unix_s >= alert.for_s
        followed[key] = _Active(
            alert=alert, subject=subject, since_unix_s=since_unix_s, fires=fires
        )
    for key, before in active.items():
        if key not in followed and before.fires:
            over_since_unix_s = (
                now_unix_s if before.over_since_unix_s is None else before.over_since_unix_s
            )
            if now_unix_s - over_since_unix_s < before.alert.keep_s:
                followed[key] = replace(before, over_since_unix_s=over_since_unix_s)
    return followed
