"""Sends messages about one run by mail or chat, through apprise, until the run ends.

`Outbox` decides when to send, and `message_text` what; neither reads a clock. Alerts that begin or
end within 5 s of each other share a message. At most one message a minute is sent, besides the last
one; later news waits. Text from a run is untrusted: messages have clean lines of bounded length.
`Notifier` runs in its own process, so that it can report a dead head; it reads the run folder and
writes only its lock. Results and logs contain no secret of an address.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import NotifyConfig, Severity
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.record.archive import head_of
from orchestrator.record.folders import go_on_command
from orchestrator.record.model import Snapshot
from orchestrator.view.alerts import (
    HEAD_GONE,
    NODE_MISSING,
    SEVEREST_FIRST,
    Alert,
    Frame,
    Freshness,
)
from orchestrator.view.cells import MISSING, clean, shorten
from orchestrator.view.look import Watch
from orchestrator.view.phrases import counted, totals
from orchestrator.view.slots import cards_table, headline
from workers.files import locked

LOCK_NAME: Final = "notify.lock"
_READ_EVERY_S: Final = 2.0
_LAST_TRIES: Final = 3
#: News of this time shares a message: if a PC goes missing, all of its slots do.
GATHER_S = 5.0
#: The least time between two messages.
BETWEEN_S = 60.0
#: An alert is over after this time without it: a hot card pauses and continues many times.
OVER_S = 120.0
#: The notifier of an ended head may still run for this long after the next head has started.
LOCK_PATIENCE_S = 90.0
DEADLINE_S: Final = 20.0

#: Severity -> apprise's name for it.
_TYPES: Final = {"critical": "failure", "warning": "warning", "info": "info"}
_REASON_MOST: Final = 200

_LINES_MOST = 24
"""Most lines of a block. Some services accept only 4,000 characters."""
_CELLS_MOST = 200
_TITLE_CELLS = 120

Say: TypeAlias = Callable[[str], None]
_Key: TypeAlias = tuple[str, str]

# Without a handler, Python prints their warnings, which may contain addresses.
for _name in ("apprise", "urllib3"):
    logging.getLogger(_name).addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The content of one message."""

    begun: tuple[Alert, ...] = ()
    over: tuple[Alert, ...] = ()
    still: tuple[Alert, ...] = ()
    """Alerts of an earlier message that are still present."""
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageText:
    """A message in the form in which it is sent."""

    title: str
    """Contains the most important news, for a locked phone."""
    body: str
    severity: Severity


class Outbox:
    """Decides when the next message is due, and its content. The first message is a status."""

    def __init__(self, every_s: float | None, now_s: float) -> None:
        """`every_s` is the time between two statuses; with `None` there is only the first one."""
        self._present: dict[_Key, Alert] = {}
        """Alerts that are present, or have been absent for less than `OVER_S`."""
        self._every_s = every_s
        self._seen_at_s: dict[_Key, float] = {}
        self._sent: dict[_Key, Alert] = {}
        """Alerts that accepted messages have reported, and not yet reported as over."""
        self._news_since_s: float | None = None
        """When the oldest unsent change occurred."""
        self._status_at_s = now_s
        self._sent_at_s = -math.inf
        self._was_accepted = True
        """Whether an address has accepted the last message."""

    def update(self, alerts: Iterable[Alert], now_s: float) -> None:
        """Record the alerts of the present moment.

        The state of a missing node is unknown: alerts on it stay as they were.
        """
        now = {alert.key: alert for alert in alerts}
        missing = {alert.node for alert in now.values() if alert.name == NODE_MISSING}
        for key, alert in {**self._present, **now}.items():
            self._present[key] = alert
            if key in now or (alert.node in missing and alert.name != NODE_MISSING):
                self._seen_at_s[key] = now_s
            elif now_s - self._seen_at_s[key] >= OVER_S:
                del self._present[key]
        if self._present.keys() == self._sent.keys():
            self._news_since_s = None
        elif self._news_since_s is None:
            self._news_since_s = now_s

    def due(self, now_s: float, *, is_last: bool = False) -> Message | None:
        """Return the message to send now, if any.

        The last message waits for `BETWEEN_S` only if the one before was not accepted.
        """
        is_soon = now_s < self._sent_at_s + BETWEEN_S
        if is_soon and not (is_last and self._was_accepted):
            return None
        since_s = self._news_since_s
        is_gathered = since_s is not None and now_s >= since_s + GATHER_S
        if not (is_last or is_gathered or now_s >= self._status_at_s):
            return None
        present, sent = self._present, self._sent
        begun = (alert for key, alert in present.items() if key not in sent)
        return Message(
            begun=tuple(sorted(begun, key=lambda one: SEVEREST_FIRST.index(one.severity))),
            over=tuple(alert for key, alert in sent.items() if key not in present),
            still=tuple(alert for key, alert in present.items() if key in sent),
            is_last=is_last,
        )

    def mark_sent(self, now_s: float, *, is_accepted: bool) -> None:
        """Record that the due message was sent; its news stays due if no address accepted it."""
        if now_s >= self._status_at_s:
            self._status_at_s = math.inf if self._every_s is None else now_s + self._every_s
        self._sent_at_s, self._was_accepted = now_s, is_accepted
        if is_accepted:
            self._sent, self._news_since_s = dict(self._present), None


def message_text(message: Message, frame: Frame, unix_s: float) -> MessageText:
    """Return a message as text, with the severest new alert in its title."""
    run, snapshot = frame.run, frame.snapshot
    words = [cell.text for cell in headline(snapshot)]
    states = ", ".join(f"{count} {state}" for state, count in snapshot.state_counts.items())
    news = [_named(alert) for alert in message.begun]
    news += [f"over: {_named(alert)}" for alert in message.over]
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
        new_lines += [f"{alert.severity}: {_named(alert)}: {alert.text}", f"  {alert.what_to_do}"]
    new_lines += [f"over: {_named(alert)}, after {_age(alert, unix_s)}" for alert in message.over]
    still = [f"still: {_named(alert)}, for {_age(alert, unix_s)}" for alert in message.still]
    status = [f"run {snapshot.run_id}: {', '.join(words)}", ", ".join(totals(snapshot))]
    status += [*snapshot.notices, *_cards(snapshot)]
    blocks = [_cut(block) for block in (end, new_lines, still, status) if block]
    return MessageText(
        title=shorten(clean(f"{run.facts.run_id[-4:]}: {'; '.join(essence)}"), _TITLE_CELLS),
        body="\n\n".join("\n".join(block) for block in blocks),
        severity=severity,
    )


def _named(alert: Alert) -> str:
    return f"{alert.name} {alert.subject}"


def _age(alert: Alert, unix_s: float) -> str:
    return format_duration(max(0.0, unix_s - alert.since_unix_s))


def _end(frame: Frame) -> str:
    run = frame.run
    if run.exit_code is not None:
        return f"the run has ended: {run.outcome}, exit code {run.exit_code}"
    return f"the head is gone; `{go_on_command(run.folder)}` continues the run"


def _cards(snapshot: Snapshot) -> Iterator[str]:
    """Yield a line for each card, with its values from the table of cards."""
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
    """Return the first lines, cleaned and cut to `_CELLS_MOST`; an indent of two blanks stays."""
    more = [f"and {len(lines) - _LINES_MOST} lines more"] if len(lines) > _LINES_MOST else []
    return [
        "  " * line.startswith("  ") + shorten(clean(line), _CELLS_MOST)
        for line in (*lines[:_LINES_MOST], *more)
    ]


def send_test(urls: Sequence[str], say: Say) -> int:
    """Send a test message to all addresses; return the exit code."""
    body = "Messages about runs will come here."
    sent = deliver(urls, MessageText(title="orchestrator: test", body=body, severity="info"))
    for number, one in enumerate(sent, start=1):
        say(f"{number}  {one}")
    return 1 if any(one.reason for one in sent) else 0


@dataclass(kw_only=True)
class Notifier:
    """Sends the messages about one run."""

    folder: Path
    settings: NotifyConfig
    urls: Sequence[str]
    say: Say
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._watch = Watch(self.folder)
        self._outbox = Outbox(self.settings.every_s, time.monotonic())

    def once(self) -> int:
        """Send one status; return the exit code. `ArchiveError`: the folder cannot be read."""
        frame = self._watch.read()
        status = Message(still=tuple(filter(self._is_wanted, frame.alerts)))
        return 0 if self._send(status, frame) else 1

    def follow(self) -> int:
        """Send messages until the run has ended; return the exit code.

        `UsageError`: another process does so for this run; `ArchiveError`: the folder is gone.
        """
        lock, run_id = self.folder / LOCK_NAME, self.folder.name
        where = counted(len(self.urls), "address", "addresses")
        self.say(f"sending messages about run {run_id} to {where}, once no other process does")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(lock, LOCK_PATIENCE_S))
            except TimeoutError as late:
                why = f"another process sends messages about run {run_id}; end it first"
                raise UsageError(why) from late
            except OSError as failure:
                why = f"{lock} cannot be made: {failure.strerror}"
                raise UsageError(one_line(why)) from failure
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            return self._until_the_end()

    def _until_the_end(self) -> int:
        frame, tries_left = None, _LAST_TRIES
        while tries_left:
            try:
                frame = self._watch.read()
            except ArchiveError:
                # While a head works, the next attempt to read may succeed.
                if head_of(self.folder) is None and (frame is not None or not self.folder.is_dir()):
                    raise
            now_s = time.monotonic()
            if frame is not None:
                # Without a head, the alerts of the run stay as they were.
                if frame.is_up:
                    self._outbox.update(filter(self._is_wanted, frame.alerts), now_s)
                is_last = _is_over(frame)
                has_begun = is_last or frame.run.updated_at_unix_s is not None
                message = self._outbox.due(now_s, is_last=is_last) if has_begun else None
                if message is not None:
                    is_accepted = self._send(message, frame)
                    self._outbox.mark_sent(now_s, is_accepted=is_accepted)
                    if is_accepted and is_last:
                        return 0
                    tries_left -= is_last
            elif head_of(self.folder) is None:
                return 0  # the run ended before its work began; its terminal shows the reason
            self.sleep(_READ_EVERY_S)
        return 1

    def _is_wanted(self, alert: Alert) -> bool:
        return SEVEREST_FIRST.index(alert.severity) <= SEVEREST_FIRST.index(self.settings.severity)

    def _send(self, message: Message, frame: Frame) -> bool:
        """Send a message; return whether an address has accepted it."""
        text = message_text(message, frame, time.time())
        sent = deliver(self.urls, text)
        for one in sent:
            self.say(f"{text.title}: {one}")
        return any(one.reason is None for one in sent)


def _is_over(frame: Frame) -> bool:
    """Return whether a run has ended, or its head has been gone long enough for an alert.

    Before that, `run --resume` may continue it.
    """
    is_gone = frame.freshness is Freshness.HEAD_GONE and any(
        alert.name == HEAD_GONE for alert in frame.alerts
    )
    return is_gone or frame.freshness is Freshness.ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The result of sending a message to one address."""

    name: str
    """Service and host, without user, password, token or path."""
    reason: str | None
    """Why the address did not accept the message; `None`: it did."""

    def __str__(self) -> str:
        """Return the result as text."""
        return f"{self.name}  {'accepted' if self.reason is None else f'failed: {self.reason}'}"


def deliver(
    urls: Sequence[str], message: MessageText, deadline_s: float = DEADLINE_S
) -> tuple[Delivery, ...]:
    """Send a message; return the result of each address, after `deadline_s` at the latest."""
    import apprise  # noqa: PLC0415 - an extra, and the import takes half a second

    # In memory: otherwise some services write data of an address to files.
    asset = apprise.AppriseAsset(
        storage_mode=apprise.PersistentStoreMode.MEMORY, secure_logging=True
    )
    services = [
        apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True) for url in urls
    ]
    known = apprise.Apprise([service for service in services if service is not None], asset=asset)
    sent = known.notify(
        title=message.title,
        body=message.body,
        notify_type=_TYPES[message.severity],
        body_format="text",
        timeout=deadline_s,
    )
    results = iter(sent.results)
    return tuple(
        Delivery(name=f"address {number}", reason="it is no address that apprise knows")
        if service is None
        else _delivery(url, next(results))
        for number, (url, service) in enumerate(zip(urls, services, strict=True), start=1)
    )


def _delivery(url: str, result: Any) -> Delivery:  # noqa: ANN401 - a class of apprise
    # Only the part before the first slash: for some services apprise masks neither path nor
    # parameters.
    shown = re.match(r"[^:]+://[^/?]*", str(result.url))
    name = shown.group() if shown else str(result.name)
    reasons = [entry.message for entry in result.logs()]
    return Delivery(name=name, reason=None if result else _harmless(reasons, url, name))


def _harmless(reasons: Sequence[str], url: str, name: str) -> str:
    """Return the last reason, with `***` for each word of the address that is not in its name."""
    text = reasons[-1] if reasons else "it was not accepted"
    words = set(re.split(r"[\s/:@?&=+,]+", f"{url} {unquote(url)}"))
    for word in sorted(words, key=len, reverse=True):
        if len(word) > 2 and word not in name:
            text = text.replace(word, "***")
    return text[:_REASON_MOST]
