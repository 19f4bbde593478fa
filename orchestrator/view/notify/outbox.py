"""Decides what is told of a run, when, and in which words: alerts and the time in, texts out. Pure.

What begins or ends within 5 s is one message, and there is one message a minute at most, besides
the last. What may not be told yet is told later. Text from a run may be hostile: it comes out as
harmless lines of bounded length. Does not send a message (`notifier`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Severity
from orchestrator.record.archive import Frame
from orchestrator.record.folders import go_on_command
from orchestrator.record.model import Snapshot
from orchestrator.view.alerts import NODE_MISSING, SEVEREST_FIRST, Alert
from orchestrator.view.cells import MISSING, clean, shorten
from orchestrator.view.phrases import totals
from orchestrator.view.slots import cards_table, headline

_LINES_MOST = 24
"""Of one kind. Some services take only 4,000 characters."""
_CELLS_MOST = 200
_TITLE_CELLS = 120

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
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageText:
    """A message as it is sent."""

    title: str
    """It says enough on a locked phone."""
    body: str
    severity: Severity


class Outbox:
    """All that decides on the next message. The first one is a status."""

    def __init__(self, every_s: float | None, now_s: float, pace: Pace = USUAL_PACE) -> None:
        """`every_s` is the time between two statuses; `None` is for none."""
        self._there: dict[_Key, Alert] = {}
        """What is wrong."""
        self._every_s, self._pace = every_s, pace
        self._seen_at_s: dict[_Key, float] = {}
        self._told: dict[_Key, Alert] = {}
        """What is wrong as the user was told."""
        self._news_since_s: float | None = None
        """When the first of what is not told came up."""
        self._status_at_s = now_s
        self._sent_at_s = -math.inf
        self._was_taken = True
        """Whether an address has taken the last message."""

    def look(self, alerts: Iterable[Alert], now_s: float) -> None:
        """Take in what is wrong now.

        What is on a node that is missing cannot be known, and stays as it was.
        """
        now = {alert.key: alert for alert in alerts}
        missing = {alert.node for alert in now.values() if alert.name == NODE_MISSING}
        for key, alert in {**self._there, **now}.items():
            self._there[key] = alert
            if key in now or (alert.node in missing and alert.name != NODE_MISSING):
                self._seen_at_s[key] = now_s
            elif now_s - self._seen_at_s[key] >= self._pace.over_s:
                del self._there[key]
        if self._there.keys() == self._told.keys():
            self._news_since_s = None
        elif self._news_since_s is None:
            self._news_since_s = now_s

    def due(self, now_s: float, *, is_last: bool = False) -> Message | None:
        """Return what is to be told now; the last message follows at once on one that was taken."""
        is_soon = now_s < self._sent_at_s + self._pace.between_s
        if is_soon and not (is_last and self._was_taken):
            return None
        since_s = self._news_since_s
        is_gathered = since_s is not None and now_s >= since_s + self._pace.gather_s
        if not (is_last or is_gathered or now_s >= self._status_at_s):
            return None
        there, told = self._there, self._told
        begun = (alert for key, alert in there.items() if key not in told)
        return Message(
            begun=tuple(sorted(begun, key=lambda one: SEVEREST_FIRST.index(one.severity))),
            over=tuple(alert for key, alert in told.items() if key not in there),
            still=tuple(alert for key, alert in there.items() if key in told),
            is_last=is_last,
        )

    def sent(self, now_s: float, *, is_taken: bool) -> None:
        """Know that what was due was sent; what no address has taken is sent again."""
        if now_s >= self._status_at_s:
            self._status_at_s = math.inf if self._every_s is None else now_s + self._every_s
        self._sent_at_s, self._was_taken = now_s, is_taken
        if is_taken:
            self._told, self._news_since_s = dict(self._there), None


def message_text(message: Message, frame: Frame, unix_s: float) -> MessageText:
    """Return the words of a message about a run, the severest new alert in its title."""
    run, snapshot = frame.run, frame.snapshot
    words = [cell.text for cell in headline(snapshot)]
    states = ", ".join(f"{count} {state}" for state, count in snapshot.state_counts.items())
    news = [_name(alert) for alert in message.begun]
    news += [f"over: {_name(alert)}" for alert in message.over]
    more = f", {len(news) - 1} more" if len(news) > 1 else ""
    essence = [f"{news[0]}{more}"] if news else [states or "no workers yet"]
    severity: Severity = message.begun[0].severity if message.begun else "info"
    end: list[str] = []
    if message.is_last:
        essence = [_end(frame), *news[:1]]
        end = [_end(frame), *([] if run.error is None else [run.error]), *frame.missed]
        if run.exit_code != 0 and severity != "critical":
            severity = "critical" if run.exit_code is None else "warning"
    new_lines = []
    for alert in message.begun:
        new_lines += [f"{alert.severity}: {_name(alert)}: {alert.text}", f"  {alert.what_to_do}"]
    new_lines += [f"over: {_name(alert)}, after {_age(alert, unix_s)}" for alert in message.over]
    still = [f"still: {_name(alert)}, for {_age(alert, unix_s)}" for alert in message.still]
    status = [f"run {snapshot.run_id}: {', '.join(words)}", ", ".join(totals(snapshot))]
    status += [*snapshot.notices, *_cards(snapshot)]
    blocks = [_cut(block) for block in (end, new_lines, still, status) if block]
    return MessageText(
        title=shorten(clean(f"{run.facts.run_id[-4:]}: {'; '.join(essence)}"), _TITLE_CELLS),
        body="\n\n".join("\n".join(block) for block in blocks),
        severity=severity,
    )


def _name(alert: Alert) -> str:
    return f"{alert.name} {alert.subject}"


def _age(alert: Alert, unix_s: float) -> str:
    return format_duration(max(0.0, unix_s - alert.since_unix_s))


def _end(frame: Frame) -> str:
    run = frame.run
    if run.exit_code is not None:
        return f"the run has ended: {run.outcome}, exit code {run.exit_code}"
    return f"the head is gone; `{go_on_command(run.folder)}` continues the run"


def _cards(snapshot: Snapshot) -> Iterator[str]:
    """Yield a line for each card, with the columns of the table of cards that have a value."""
    table = cards_table(snapshot)
    for row in table.rows:
        node, card, *others = row.cells
        words = [
            f"{column.title} {column.unit} {cell.text}"
            for column, cell in zip(table.columns[2:], others, strict=True)
            if cell.text != MISSING
        ]
        yield f"{node.text} {card.text}: {', '.join(words)}"


def _cut(lines: Sequence[str]) -> list[str]:
    """Return the first of these lines, harmless and not too long; two blanks before one stay."""
    more = [f"and {len(lines) - _LINES_MOST} lines more"] if len(lines) > _LINES_MOST else []
    return [
        "  " * line.startswith("  ") + shorten(clean(line), _CELLS_MOST)
        for line in (*lines[:_LINES_MOST], *more)
    ]
