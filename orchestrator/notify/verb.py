"""The verb `notify`: follows one run until it ends, and has the messages sent that `digest.py` decides on.

A process of its own, so that a dead head is told of, too. Reads the run folder and nothing else; writes only how many
messages were taken, and no address anywhere.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import ArchiveError, NothingStoredError, UsageError
from orchestrator.notify import courier, digest
from orchestrator.notify.letter import worded
from orchestrator.notify.troubles import Judge
from orchestrator.watch.archive import head_of
from orchestrator.watch.deliveries import Deliveries, read_deliveries, write_deliveries
from orchestrator.watch.follow import Follower, Frame, Freshness
from workers.files import locked

LOCK_NAME: Final = "notify.lock"

_LOOK_EVERY_S: Final = 1.0
_HEAD_BACK_S: Final = 30.0
"""A head that is gone for so long is told of; `run --resume` may bring it back before."""
_LAST_TRIES: Final = 3
_LOCK_PATIENCE_S: Final = 90.0
"""So long a process that tells of a head's end may stay when the next head has begun."""

Say = Callable[[str], None]


def send_test(urls: Sequence[str], say: Say, deadline_s: float = courier.DEADLINE_S) -> int:
    """Send one message to all addresses; return the exit code."""
    sent = courier.deliver(urls, "orchestrator: test", "Messages about runs will come here.", "info", deadline_s)
    for one in sent:
        say(f"{one.number}  {one.name}  {'taken' if one.taken else f'not taken: {one.reason}'}")
    return 0 if all(one.taken for one in sent) else 1


def follow(folder: Path, settings: NotifyConfig, urls: Sequence[str], say: Say, *, once: bool = False) -> int:
    """Tell of a run until it has ended, or only once how it is; return the exit code.

    Raises:
        UsageError: Another process tells of this run.
        ArchiveError: The run folder is gone.
    """
    teller = _Teller(folder=folder, settings=settings, urls=urls, say=say)
    if once:
        return teller.once()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with locked(folder / LOCK_NAME, _LOCK_PATIENCE_S):
            return teller.until_the_end()
    except TimeoutError as failure:
        raise UsageError(f"another process tells of run {folder.name} already; end it first") from failure
    except OSError as failure:
        raise UsageError(f"{folder / LOCK_NAME} cannot be made: {failure.strerror}") from failure


@dataclass(kw_only=True)
class _Teller:
    """Tells of one run."""

    folder: Path
    settings: NotifyConfig
    urls: Sequence[str]
    say: Say
    judge: Judge = field(default_factory=Judge)

    def __post_init__(self) -> None:
        self._follower = Follower(self.folder)
        self._state = digest.new_digest(self.settings.every_s, time.monotonic())

    def once(self) -> int:
        """Send one digest."""
        frame = self._follower.look()
        self._take(frame)
        there = tuple(kept.trouble for kept in self._state.kept.values())
        message = digest.Message(news=(), there=there, is_digest=True, is_last=False)
        return 0 if self._send(message, frame) else 1

    def until_the_end(self) -> int:
        """Look at the run every second, and tell; the last message has how it ended."""
        tries, gone_since_s = 0, None
        while True:
            began_s = time.monotonic()
            frame = self._look()
            if frame is not None:
                is_gone = frame.freshness is Freshness.HEAD_GONE
                gone_since_s = (gone_since_s or began_s) if is_gone else None
                is_over = frame.freshness is Freshness.ENDED or (
                    gone_since_s is not None and began_s >= gone_since_s + _HEAD_BACK_S
                )
                self._take(frame)
                message = digest.due(self._state, began_s, is_last=is_over)
                if message is not None:
                    is_taken = self._send(message, frame)
                    after = digest.told if is_taken else digest.given_up
                    self._state = after(self._state, message, began_s)
                    tries += is_over
                    if is_over and (is_taken or tries == _LAST_TRIES):
                        return 0 if is_taken else 1
            elif head_of(self.folder) is None:
                return 0  # it ended before it had begun to work, and its terminal has the reason
            time.sleep(_LOOK_EVERY_S)

    def _look(self) -> Frame | None:
        """Return the run as it is; `None` if nothing has been stored yet, or it cannot be read just now."""
        try:
            return self._follower.look()
        except NothingStoredError:
            return None
        except ArchiveError:
            if not self.folder.is_dir():
                raise
            return None

    def _take(self, frame: Frame) -> None:
        troubles = self.judge.troubles(frame, time.time(), self.settings.severity)
        self._state = digest.seen(self._state, troubles, time.monotonic(), self.judge.is_unknown)

    def _send(self, message: digest.Message, frame: Frame) -> bool:
        """Have a message sent; say whether an address has taken it."""
        before = read_deliveries(self.folder)
        letter = worded(message, frame.run, frame.snapshot, before, time.time())
        sent = courier.deliver(self.urls, letter.title, letter.body, letter.severity)
        taken = sum(one.taken for one in sent)
        for one in sent:
            self.say(f"{letter.title}: {one.name} " + ("has taken it" if one.taken else f"failed: {one.reason}"))
        try:
            write_deliveries(self.folder, Deliveries(before.taken + taken, before.failed + len(sent) - taken))
        except OSError as failure:
            self.say(f"the count of messages cannot be written: {failure}")
        return taken > 0
