"""From frames to alerts that fire: one that holds is pending, fires after a while, and is over
after another. Pure.

As Prometheus does it with `for` and `keep_firing_for`. Does not say what is wrong (`catalogue.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from orchestrator.config.schema import Severity
from orchestrator.record.archive import Frame
from orchestrator.view.alerts.catalogue import (
    ALERTS,
    SEVEREST_FIRST,
    WATCHER_DOWN,
    Alert,
    Firing,
    History,
    Subject,
)

_Key: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertWatch:
    """What is known of one run between two judgements."""

    alerts: tuple[Alert, ...] = tuple(alert for alert in ALERTS if not alert.opt_in)
    run_id: str | None = None
    history: History = field(default_factory=History)
    active: Mapping[_Key, Firing] = field(default_factory=dict)


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
        held = tuple(
            (alert, subject) for alert in watch.alerts for subject in alert.holds(frame, history)
        )
    active = _active_after(watch.active, held, now_unix_s)
    watch = replace(watch, history=history, active=active)
    return watch, tuple(firing for firing in active.values() if firing.fires)


def _active_after(
    active: Mapping[_Key, Firing], held: Iterable[tuple[Alert, Subject]], now_unix_s: float
) -> dict[_Key, Firing]:
    after = {}
    for alert, subject in held:
        key = alert.name, subject.name
        before = active.get(key)
        since_unix_s = now_unix_s if before is None else before.since_unix_s
        fires = (before is not None and before.fires) or now_unix_s - since_unix_s >= alert.for_s
        after[key] = Firing(alert=alert, subject=subject, since_unix_s=since_unix_s, fires=fires)

    for key, before in active.items():
        if key not in after and before.fires:
            over_unix_s = now_unix_s if before.over_unix_s is None else before.over_unix_s
            if now_unix_s - over_unix_s < before.alert.keep_s:
                after[key] = replace(before, over_unix_s=over_unix_s)
    return after


@dataclass(frozen=True, slots=True, kw_only=True)
class Badge:
    """One alert that fires, for one subject or several."""

    name: str
    severity: Severity
    subjects: tuple[str, ...]
    since_unix_s: float
    """When it began to hold for the first of them."""
    text: str
    """What is wrong with that one."""
    what_to_do: str

    @property
    def words(self) -> str:
        """What stands on it: what is wrong with the first subject, and how many others there are."""
        return (
            self.text
            if len(self.subjects) == 1
            else f"{self.text} (and {len(self.subjects) - 1} more)"
        )


def badges(firing: Iterable[Firing]) -> tuple[Badge, ...]:
    """Return a badge for each alert that fires, the severest and then the oldest first."""
    by_name: dict[str, list[Firing]] = {}
    for one in firing:
        if one.alert.severity != "info":
            by_name.setdefault(one.alert.name, []).append(one)
    made = [
        _badge(sorted(of_alert, key=lambda one: one.since_unix_s)) for of_alert in by_name.values()
    ]
    made.sort(key=lambda one: (SEVEREST_FIRST.index(one.severity), one.since_unix_s, one.name))
    return tuple(made)


def _badge(firing: list[Firing]) -> Badge:
    first = firing[0]
    return Badge(
        name=first.alert.name,
        severity=first.alert.severity,
        subjects=tuple(one.subject.name for one in firing),
        since_unix_s=first.since_unix_s,
        # The person looks at this very run.
        text=first.text.replace(f"run {first.subject.name}", "the run")
        if first.alert.scope == "run"
        else first.text,
        what_to_do=first.alert.what_to_do,
    )
