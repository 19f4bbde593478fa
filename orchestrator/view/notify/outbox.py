"""Decides what is told, and when: alerts and the time in, messages out. Pure.

What begins or ends within 5 s is one message, and there is one message a minute at most, besides
the last. What may not be told yet is told later. Does not word a message (`message`) or send it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from orchestrator.view.alerts import NODE_MISSING, Alert

_Key: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast is told, in seconds."""

    gather_s: float = 5.0
    """What comes within this time is one message: a PC takes its slots along."""
    between_s: float = 60.0
    """The least time between two messages."""
    over_s: float = 120.0
    """An alert is over when it was away for so long: a hot card pauses and goes on, again and
    again.
    """
    head_back_s: float = 30.0
    """A head that is gone for so long is told of; `run --resume` may bring it back before."""


USUAL_PACE = Pace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is told at once."""

    begun: tuple[Alert, ...] = ()
    over: tuple[Alert, ...] = ()
    still: tuple[Alert, ...] = ()
    """What was told before and goes on."""
    is_first: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """Everything that decides on the next message."""

    every_s: float | None
    """Between two statuses; `None` for none."""
    status_at_s: float
    """When the next one is due; the first is the message that telling begins."""
    pace: Pace = USUAL_PACE
    there: Mapping[_Key, tuple[Alert, float]] = field(default_factory=dict)
    """What is wrong, and when it was seen last."""
    told: Mapping[_Key, Alert] = field(default_factory=dict)
    """What is wrong as the user was told."""
    news_since_s: float | None = None
    """When the first of what is not told came up."""
    sent_at_s: float = -math.inf
    was_taken: bool = True
    """Whether an address has taken the last message."""

    def after_look(self, alerts: Iterable[Alert], now_s: float) -> Outbox:
        """Take in what is wrong now.

        What is on a node that is missing cannot be known, and stays as it was.
        """
        there = {**self.there, **{alert.key: (alert, now_s) for alert in alerts}}
        missing = {alert.node for alert, _ in there.values() if alert.name == NODE_MISSING}
        for key, (alert, _) in self.there.items():
            if alert.node in missing and alert.name != NODE_MISSING:
                there[key] = alert, now_s
        there = {
            key: (alert, seen_at_s)
            for key, (alert, seen_at_s) in there.items()
            if now_s - seen_at_s < self.pace.over_s
        }
        has_news = there.keys() != self.told.keys()
        since_s = now_s if self.news_since_s is None else self.news_since_s
        return replace(self, there=there, news_since_s=since_s if has_news else None)

    def due(self, now_s: float, *, is_last: bool = False) -> Message | None:
        """Return what is to be told now; the last message follows at once on one that was taken."""
        if now_s < self.sent_at_s + self.pace.between_s and not (is_last and self.was_taken):
            return None
        is_gathered = self.news_since_s is not None and (
            now_s >= self.news_since_s + self.pace.gather_s
        )
        if not (is_last or is_gathered or now_s >= self.status_at_s):
            return None
        return Message(
            begun=tuple(alert for key, (alert, _) in self.there.items() if key not in self.told),
            over=tuple(alert for key, alert in self.told.items() if key not in self.there),
            still=tuple(alert for key, (alert, _) in self.there.items() if key in self.told),
            is_first=math.isinf(self.sent_at_s),
            is_last=is_last,
        )

    def after_sending(self, now_s: float, *, is_taken: bool) -> Outbox:
        """Return the state after the message that was due; one that no address has taken is tried
        again.
        """
        status_at_s = self.status_at_s
        if now_s >= status_at_s:
            status_at_s = math.inf if self.every_s is None else now_s + self.every_s
        sent = replace(self, sent_at_s=now_s, status_at_s=status_at_s, was_taken=is_taken)
        told = {key: alert for key, (alert, _) in self.there.items()}
        return replace(sent, told=told, news_since_s=None) if is_taken else sent
