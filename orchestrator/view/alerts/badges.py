"""What fires, as a person is shown it: each alert once, with what it is about. Pure.

What is only worth knowing is left out: that a run has ended stands above its table anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, get_args

from orchestrator.config.schema import Severity
from orchestrator.view.alerts.model import Firing

_ORDER: Final[tuple[Severity, ...]] = get_args(Severity)


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
    found: dict[str, list[Firing]] = {}
    for one in firing:
        if one.alert.severity != "info":
            found.setdefault(one.alert.name, []).append(one)
    made = [
        _badge(sorted(together, key=lambda one: one.since_unix_s)) for together in found.values()
    ]
    return tuple(
        sorted(
            made, key=lambda badge: (_ORDER.index(badge.severity), badge.since_unix_s, badge.name)
        )
    )


def _badge(together: list[Firing]) -> Badge:
    first = together[0]
    return Badge(
        name=first.alert.name,
        severity=first.alert.severity,
        subjects=tuple(one.subject.name for one in together),
        since_unix_s=first.since_unix_s,
        # The person looks at this very run.
        text=first.text.replace(f"run {first.subject.name}", "the run")
        if first.alert.scope == "run"
        else first.text,
        what_to_do=first.alert.what_to_do,
    )
