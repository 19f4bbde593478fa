"""The values of alerts: one alert of the catalogue, what it looks at, and one that fires. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from orchestrator.config.schema import Severity
from orchestrator.record.follow import Frame
from orchestrator.view.alerts.history import History

Scope: TypeAlias = Literal["run", "node", "slot", "card"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What an alert is about."""

    name: str
    """The run, node or slot, or the UUID of the card."""
    node: str = ""
    card: str = ""
    text: str = ""
    """Why, in the words of the run."""

    @property
    def place(self) -> str:
        """The card or node that it belongs to: what befalls a card befalls all of its slots."""
        return f"{self.node} {self.card}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What alerts are judged from."""

    frame: Frame
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that can be wrong with a run, for people and for Prometheus."""

    name: str
    severity: Severity
    scope: Scope
    for_s: float = 0.0
    """It fires when it has held for so long."""
    keep_s: float = 0.0
    """It is over when it has not held for so long."""
    summary: str
    """One line, with `{subject}` in it."""
    what_to_do: str
    promql: str
    """Gives a series for each subject while the alert holds."""
    holds: Callable[[Sight], Iterable[Subject]]
    """The subjects for which it holds."""
    opt_in: bool = False
    """Whether only those get it who ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """An alert that fires."""

    alert: Alert
    subject: Subject
    since_unix_s: float
    """When it began to hold."""

    @property
    def text(self) -> str:
        """What is wrong, in one line."""
        told = self.alert.summary.format(subject=self.subject.name)
        return f"{told}: {self.subject.text}" if self.subject.text else told
