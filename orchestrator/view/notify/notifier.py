"""Follows one run until it ends, and sends what `outbox.py` decides on to all addresses at once,
through apprise.

A process of its own, so that a dead head is told of, too. Reads the run folder and nothing else;
writes nothing but its lock. Neither results nor logs hold a secret of an address.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.record.archive import Frame, Freshness, head_of
from orchestrator.view.alerts import SEVEREST_FIRST, Alert, is_up
from orchestrator.view.look import Watch
from orchestrator.view.notify.outbox import (
    USUAL_PACE,
    Message,
    MessageText,
    Outbox,
    Pace,
    message_text,
)
from orchestrator.view.phrases import counted
from workers.files import locked

LOCK_NAME: Final = "notify.lock"
_LOOK_EVERY_S: Final = 2.0
_LAST_TRIES: Final = 3
Say: TypeAlias = Callable[[str], None]
DEADLINE_S: Final = 20.0

#: Severity -> what apprise calls it.
_TYPES: Final = {"critical": "failure", "warning": "warning", "info": "info"}
_REASON_MOST: Final = 200

# Without a handler, Python prints their warnings, which may hold addresses.
for _name in ("apprise", "urllib3"):
    logging.getLogger(_name).addHandler(logging.NullHandler())


def send_test(urls: Sequence[str], say: Say) -> int:
    """Send one message to all addresses; return the exit code."""
    body = "Messages about runs will come here."
    sent = deliver(urls, MessageText(title="orchestrator: test", body=body, severity="info"))
    for number, one in enumerate(sent, start=1):
        say(f"{number}  {one}")
    return 1 if any(one.reason for one in sent) else 0


@dataclass(kw_only=True)
class Notifier:
    """Tells of one run."""

    folder: Path
    settings: NotifyConfig
    urls: Sequence[str]
    say: Say
    pace: Pace = USUAL_PACE
    sleep: Callable[[float], None] = time.sleep
    lock_patience_s: float = 90.0
    """So long a process that tells of a head's end may stay when the next head has begun."""

    def __post_init__(self) -> None:
        self._watch = Watch(self.folder)
        self._gone_since_s: float | None = None
        self._outbox = Outbox(self.settings.every_s, time.monotonic(), self.pace)

    def once(self) -> int:
        """Send one status; return the exit code. `ArchiveError` if there is nothing to tell."""
        look = self._watch.look()
        there = Message(still=tuple(filter(self._is_wanted, look.alerts)))
        return 0 if self._send(there, look.frame) else 1

    def follow(self) -> int:
        """Tell of the run until it has ended; return the exit code.

        `UsageError`: another process tells of this run; `ArchiveError`: the run folder is gone.
        """
        lock, run_id = self.folder / LOCK_NAME, self.folder.name
        where = counted(len(self.urls), "address", "addresses")
        self.say(f"telling of run {run_id} at {where}, once no other process does")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(lock, self.lock_patience_s))
            except TimeoutError as late:
                why = f"another process tells of run {run_id} already; end it first"
                raise UsageError(why) from late
            except OSError as failure:
                why = f"{lock} cannot be made: {failure.strerror}"
                raise UsageError(one_line(why)) from failure
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            return self._until_the_end()

    def _until_the_end(self) -> int:
        look, tries_left = None, _LAST_TRIES
        while tries_left:
            try:
                look = self._watch.look()
            except ArchiveError:
                # While a head is at work, the next look may succeed.
                if head_of(self.folder) is None and (look is not None or not self.folder.is_dir()):
                    raise
            now_s = time.monotonic()
            if look is not None:
                # While no head works, only the last message says what is wrong.
                if is_up(look.frame):
                    self._outbox.look(filter(self._is_wanted, look.alerts), now_s)
                is_last = self._is_over(look.frame, now_s)
                has_begun = is_last or look.frame.run.updated_at_unix_s is not None
                message = self._outbox.due(now_s, is_last=is_last) if has_begun else None
                if message is not None:
                    is_taken = self._send(message, look.frame)
                    self._outbox.sent(now_s, is_taken=is_taken)
                    if is_taken and is_last:
                        return 0
                    tries_left -= is_last
            elif head_of(self.folder) is None:
                return 0  # it ended before its work began, and its terminal has the reason
            self.sleep(_LOOK_EVERY_S)
        return 1

    def _is_wanted(self, alert: Alert) -> bool:
        return SEVEREST_FIRST.index(alert.severity) <= SEVEREST_FIRST.index(self.settings.severity)

    def _is_over(self, frame: Frame, now_s: float) -> bool:
        if frame.freshness is not Freshness.HEAD_GONE:
            self._gone_since_s = None
            return frame.freshness is Freshness.ENDED
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        return now_s >= self._gone_since_s + self.pace.head_back_s

    def _send(self, message: Message, frame: Frame) -> bool:
        """Have a message sent; say whether an address has taken it."""
        text = message_text(message, frame, time.time())
        sent = deliver(self.urls, text)
        for one in sent:
            self.say(f"{text.title}: {one}")
        return any(one.reason is None for one in sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What became of a message at one address."""

    name: str
    """Service and host, without user, password, token or path."""
    reason: str | None
    """Why it was not taken; `None`: it was."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.name}  {'taken' if self.reason is None else f'not taken: {self.reason}'}"


def deliver(
    urls: Sequence[str], message: MessageText, deadline_s: float = DEADLINE_S
) -> tuple[Delivery, ...]:
    """Return what became of the message at each address, after `deadline_s` at the latest."""
    import apprise  # noqa: PLC0415 - an extra, and it takes half a second

    # In memory: else some services keep what they know of an address in files.
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
    # What stands before the first slash: apprise shows paths and parameters of some services as
    # they are.
    shown = re.match(r"[^:]+://[^/?]*", str(result.url))
    name = shown.group() if shown else str(result.name)
    reasons = [entry.message for entry in result.logs()]
    return Delivery(name=name, reason=None if result else _harmless(reasons, url, name))


def _harmless(reasons: Sequence[str], url: str, name: str) -> str:
    """Return the last reason without any word of the address that is not in its name."""
    text = reasons[-1] if reasons else "it was not taken"
    words = set(re.split(r"[\s/:@?&=+,]+", f"{url} {unquote(url)}"))
    for word in sorted(words, key=len, reverse=True):
        if len(word) > 2 and word not in name:
            text = text.replace(word, "***")
    return text[:_REASON_MOST]
