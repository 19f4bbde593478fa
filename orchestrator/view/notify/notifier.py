"""Follows one run until it ends, and has the messages sent that `digest.py` decides on.

A process of its own, so that a dead head is told of, too. Reads the run folder and nothing else;
writes only how many messages were taken, and no address anywhere.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from orchestrator.config.schema import NotifyConfig, Severity
from orchestrator.errors import ArchiveError, NothingStoredError, UsageError, one_line
from orchestrator.record.archive import Follower, Frame, Freshness, head_of
from orchestrator.record.folders import Deliveries, read_deliveries, write_deliveries
from orchestrator.view.alerts import (
    ALERTS,
    SEVEREST_FIRST,
    WATCHER_DOWN,
    AlertWatch,
    Firing,
    is_up,
    judge,
)
from orchestrator.view.jobs import with_jobs
from orchestrator.view.notify import digest, sender
from orchestrator.view.notify.digest import USUAL_PACE, Message, Pace
from orchestrator.view.notify.message import message_text
from orchestrator.view.phrases import counted
from workers.files import locked

_NODE_MISSING: Final = "NodeMissing"
_AT_ONCE: Final = frozenset({_NODE_MISSING, "CardPaused"})

#: The last message tells of the first three, and every digest of the last.
_TOLD_ANYWAY: Final = frozenset({"HeadGone", "RunEnded", "RunDegraded", "NotifyFailing"})

LOCK_NAME: Final = "notify.lock"
_LOOK_EVERY_S: Final = 2.0
_LAST_TRIES: Final = 3
_LOCK_SOON_S: Final = 0.5
Say = Callable[[str], None]


class Judge:
    """Judges one frame of a run after the other."""

    def __init__(self, at_least: Severity) -> None:
        """Prepare for alerts that are `at_least` so severe."""
        severities = SEVEREST_FIRST[: SEVEREST_FIRST.index(at_least) + 1]
        self._watch = AlertWatch(
            alerts=tuple(
                replace(alert, for_s=0.0) if alert.name in _AT_ONCE else alert
                for alert in ALERTS
                if alert.severity in severities
                and alert.name not in _TOLD_ANYWAY
                and not alert.opt_in
            )
        )
        self._is_blind = False
        self._missing: frozenset[str] = frozenset()

    def firing(self, frame: Frame | None, unix_s: float) -> tuple[Firing, ...]:
        """Return what fires now; `frame` is `None` where the run cannot be read."""
        self._is_blind = frame is None or not is_up(frame)
        self._watch, firing = judge(self._watch, frame, unix_s)
        self._missing = frozenset(
            one.subject.node for one in firing if one.alert.name == _NODE_MISSING
        )
        return firing

    def is_unknown(self, one: Firing) -> bool:
        """Say whether it cannot be known how an alert stands.

        Its node is missing, no head works, or nothing is read.
        """
        if one.alert.name == WATCHER_DOWN.name:
            return False
        return self._is_blind or (
            one.alert.name != _NODE_MISSING and one.subject.node in self._missing
        )


def send_test(urls: Sequence[str], say: Say) -> int:
    """Send one message to all addresses; return the exit code."""
    sent = sender.deliver(urls, "orchestrator: test", "Messages about runs will come here.", "info")
    for one in sent:
        say(f"{one.number}  {one.name}  {'taken' if one.taken else f'not taken: {one.reason}'}")
    return 0 if all(one.taken for one in sent) else 1


@dataclass(kw_only=True)
class Notifier:
    """Tells of one run."""

    folder: Path
    settings: NotifyConfig
    urls: Sequence[str]
    say: Say
    pace: Pace = USUAL_PACE
    deadline_s: float = sender.DEADLINE_S
    lock_patience_s: float = 90.0
    """So long a process that tells of a head's end may stay when the next head has begun."""

    def __post_init__(self) -> None:
        self._follower, self._judge = Follower(self.folder), Judge(self.settings.severity)
        self._state = digest.new_digest(self.settings.every_s, time.monotonic(), self.pace)
        self._gone_since_s: float | None = None

    def once(self) -> int:
        """Send one digest; return the exit code. `ArchiveError` if there is nothing to tell."""
        frame = self._follower.look()
        self._take(frame, time.monotonic())
        there = tuple(one.firing for one in self._state.tracked.values())
        message = Message(news=(), there=there, is_digest=True, is_last=False)
        return 0 if self._send(message, frame) else 1

    def follow(self) -> int:
        """Tell of the run until it has ended; return the exit code.

        Raises:
            UsageError: Another process tells of this run.
            ArchiveError: The run folder is gone.
        """
        lock, run_id = self.folder / LOCK_NAME, self.folder.name
        for patience_s in (_LOCK_SOON_S, self.lock_patience_s):
            with ExitStack() as stack:
                try:
                    stack.enter_context(locked(lock, patience_s))
                except TimeoutError:
                    self.say(
                        f"another process tells of run {run_id}; this one begins if that ends soon"
                    )
                    continue
                except OSError as failure:
                    raise UsageError(
                        one_line(f"{lock} cannot be made: {failure.strerror}")
                    ) from failure
                self.say(
                    f"telling of run {run_id} at {counted(len(self.urls), 'address', 'addresses')}"
                )
                signal.signal(signal.SIGTERM, signal.default_int_handler)
                return self._until_the_end()
        raise UsageError(f"another process tells of run {run_id} already; end it first")

    def _until_the_end(self) -> int:
        tries, last = 0, None
        while tries < _LAST_TRIES:
            frame, now_s = self._look(), time.monotonic()
            last = frame or last
            if last is None and head_of(self.folder) is None:
                return 0  # it ended before its work began, and its terminal has the reason
            if last is not None:
                self._take(frame, now_s)
                is_last = self._is_over(frame, now_s)
                message = digest.due(self._state, now_s, is_last=is_last)
                if message is not None:
                    is_taken = self._send(message, last)
                    self._state = (digest.after_sending if is_taken else digest.after_failure)(
                        self._state, message, now_s
                    )
                    if is_taken and is_last:
                        return 0
                    tries += is_last
            time.sleep(min(_LOOK_EVERY_S, self.pace.between_s))
        return 1

    def _look(self) -> Frame | None:
        """Return the run as it is.

        `None` if nothing has been stored yet, or it cannot be read just now.
        """
        try:
            return self._follower.look()
        except NothingStoredError:
            return None
        except ArchiveError:
            if not self.folder.is_dir():
                raise
            return None

    def _is_over(self, frame: Frame | None, now_s: float) -> bool:
        is_gone = (
            head_of(self.folder) is None
            if frame is None
            else frame.freshness is Freshness.HEAD_GONE
        )
        if not is_gone:
            self._gone_since_s = None
            return frame is not None and frame.freshness is Freshness.ENDED
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        return now_s >= self._gone_since_s + self.pace.head_back_s

    def _take(self, frame: Frame | None, now_s: float) -> None:
        firing = self._judge.firing(frame, time.time())
        self._state = digest.after_look(self._state, firing, now_s, self._judge.is_unknown)

    def _send(self, message: Message, frame: Frame) -> bool:
        """Have a message sent; say whether an address has taken it."""
        before = read_deliveries(self.folder)
        snapshot = with_jobs(frame.snapshot, frame.queue)
        text = message_text(message, frame.run, snapshot, before, time.time(), frame.missed)
        sent = sender.deliver(self.urls, text.title, text.body, text.severity, self.deadline_s)
        taken = sum(one.taken for one in sent)
        for one in sent:
            self.say(
                f"{text.title}: {one.name}: "
                + ("taken" if one.taken else f"not taken: {one.reason}")
            )
        try:
            write_deliveries(
                self.folder, Deliveries(before.taken + taken, before.failed + len(sent) - taken)
            )
        except OSError as failure:
            self.say(f"how many messages were taken cannot be written: {failure}")
        return taken > 0
