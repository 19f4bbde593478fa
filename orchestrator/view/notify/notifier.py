"""Follows one run until it ends, and has the messages sent that `outbox.py` decides on.

A process of its own, so that a dead head is told of, too. Reads the run folder and nothing else;
writes nothing but its lock.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.record.archive import Follower, Frame, Freshness, head_of
from orchestrator.view.alerts import SEVEREST_FIRST, Since, alerts, is_up
from orchestrator.view.jobs import with_jobs
from orchestrator.view.notify.message import MessageText, message_text
from orchestrator.view.notify.outbox import USUAL_PACE, Message, Outbox, Pace
from orchestrator.view.notify.sender import deliver
from orchestrator.view.phrases import counted
from workers.files import locked

LOCK_NAME: Final = "notify.lock"
_LOOK_EVERY_S: Final = 2.0
_LAST_TRIES: Final = 3
Say: TypeAlias = Callable[[str], None]


def send_test(urls: Sequence[str], say: Say) -> int:
    """Send one message to all addresses; return the exit code."""
    body = "Messages about runs will come here."
    sent = deliver(urls, MessageText(title="orchestrator: test", body=body, severity="info"))
    for one in sent:
        say(f"{one.number}  {one}")
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
        self._follower = Follower(self.folder)
        self._since: Since = {}
        self._gone_since_s: float | None = None
        self._outbox = Outbox(
            every_s=self.settings.every_s, status_at_s=time.monotonic(), pace=self.pace
        )

    def once(self) -> int:
        """Send one status; return the exit code. `ArchiveError` if there is nothing to tell."""
        frame = self._follower.look()
        self._take(frame, time.monotonic())
        there = tuple(alert for alert, _ in self._outbox.there.values())
        return 0 if self._send(Message(still=there), frame) else 1

    def follow(self) -> int:
        """Tell of the run until it has ended; return the exit code.

        Raises:
            UsageError: Another process tells of this run.
            ArchiveError: The run folder is gone.
        """
        lock, run_id = self.folder / LOCK_NAME, self.folder.name
        self.say(
            f"telling of run {run_id} at {counted(len(self.urls), 'address', 'addresses')}, once "
            "no other process does"
        )
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(lock, self.lock_patience_s))
            except TimeoutError as late:
                raise UsageError(
                    f"another process tells of run {run_id} already; end it first"
                ) from late
            except OSError as failure:
                why = f"{lock} cannot be made: {failure.strerror}"
                raise UsageError(one_line(why)) from failure
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            return self._until_the_end()

    def _until_the_end(self) -> int:
        frame, tries_left = None, _LAST_TRIES
        while tries_left:
            frame, now_s = self._look(frame), time.monotonic()
            if frame is not None:
                self._take(frame, now_s)
                is_last = self._is_over(frame, now_s)
                has_begun = is_last or frame.run.updated_at_unix_s is not None
                message = self._outbox.due(now_s, is_last=is_last) if has_begun else None
                if message is not None:
                    is_taken = self._send(message, frame)
                    self._outbox = self._outbox.after_sending(now_s, is_taken=is_taken)
                    if is_taken and is_last:
                        return 0
                    tries_left -= is_last
            elif head_of(self.folder) is None:
                return 0  # it ended before its work began, and its terminal has the reason
            self.sleep(_LOOK_EVERY_S)
        return 1

    def _look(self, before: Frame | None) -> Frame | None:
        """Return the run as it is, or where it cannot be read just now, as it was; `None`: nothing
        has been stored yet.
        """
        try:
            return self._follower.look()
        except ArchiveError:
            if not self.folder.is_dir():
                raise
        if before is not None and head_of(self.folder) is None:
            return replace(before, freshness=Freshness.HEAD_GONE)
        return before

    def _take(self, frame: Frame, now_s: float) -> None:
        """Take in what is wrong; while no head works, only the last message says that."""
        found, self._since = alerts(frame, time.time(), self._since)
        wanted = SEVEREST_FIRST[: SEVEREST_FIRST.index(self.settings.severity) + 1]
        if is_up(frame):
            found = tuple(one for one in found if one.severity in wanted)
            self._outbox = self._outbox.after_look(found, now_s)

    def _is_over(self, frame: Frame, now_s: float) -> bool:
        if frame.freshness is not Freshness.HEAD_GONE:
            self._gone_since_s = None
            return frame.freshness is Freshness.ENDED
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        return now_s >= self._gone_since_s + self.pace.head_back_s

    def _send(self, message: Message, frame: Frame) -> bool:
        """Have a message sent; say whether an address has taken it."""
        frame = replace(frame, snapshot=with_jobs(frame.snapshot, frame.queue))
        text = message_text(message, frame, time.time())
        sent = deliver(self.urls, text)
        for one in sent:
            self.say(f"{text.title}: {one}")
        return any(one.reason is None for one in sent)
