"""Decides what is told, and when: alerts that fire and the time in, messages out. Pure.

At most one message a minute, one story an hour about what comes and goes, and a digest at its
interval. Nothing is lost: what may not be told yet is told later. Does not judge a run, word a
message (`message`) or send it (`sender`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from orchestrator.view.alerts import Firing

_Key: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast is told, in seconds."""

    between_s: float = 60.0
    """The least time between two messages."""
    gather_s: float = 5.0
    """What begins or ends meanwhile is one message: a PC takes its slots along."""
    flapping_s: float = 3600.0
    """What comes again so soon after it was told of is told of once in that time."""
    wait_most_s: float = 600.0
    """Between two tries while no address takes anything."""
    head_back_s: float = 30.0
    """A head that is gone for so long is told of; `run --resume` may bring it back before."""


USUAL_PACE = Pace()


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is told of one alert about one subject."""

    firing: Firing
    is_there: bool
    """Else it is over."""
    times: int
    """How often it began since it was told of last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is told at once."""

    news: tuple[News, ...]
    there: tuple[Firing, ...]
    """Everything that is there, told before or now."""
    is_digest: bool
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tracked:
    """One alert about one subject, and what has been told of it."""

    firing: Firing
    is_there: bool = True
    told_there: bool = False
    times: int = 1
    changed_at_s: float
    told_at_s: float = -math.inf
    """When its beginning was told."""
    quiet_until_s: float = -math.inf

    @property
    def has_news(self) -> bool:
        return self.times > 0 or self.is_there != self.told_there

    @property
    def place(self) -> _Key:
        return self.firing.alert.name, self.firing.subject.place

    def sent(self, now_s: float, flapping_s: float) -> _Tracked:
        """Return it after its news was told."""
        if self.times == 0:  # it is over
            quiet_until_s = max(self.quiet_until_s, self.told_at_s + flapping_s)
        else:
            is_first = self.times == 1 and self.is_there and not self.told_there
            came_alone = is_first and self.changed_at_s >= self.quiet_until_s
            quiet_until_s = self.quiet_until_s if came_alone else now_s + flapping_s
        told_at_s = now_s if self.times else self.told_at_s
        return replace(
            self,
            told_there=self.is_there,
            times=0,
            told_at_s=told_at_s,
            quiet_until_s=quiet_until_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Everything that decides on the next message."""

    every_s: float | None
    """Between two digests; `None` for none."""
    due_at_s: float
    """Of the next digest."""
    tracked: Mapping[_Key, _Tracked] = field(default_factory=dict)
    sent_at_s: float = -math.inf
    wait_s: float
    """Since then, until the next message."""
    pace: Pace


def new_digest(every_s: float | None, now_s: float, pace: Pace = USUAL_PACE) -> Digest:
    """Return the state in which nothing has been seen or told."""
    due_at_s = math.inf if every_s is None else now_s + every_s
    return Digest(every_s=every_s, due_at_s=due_at_s, wait_s=pace.between_s, pace=pace)


def after_look(
    digest: Digest,
    firing: Iterable[Firing],
    now_s: float,
    is_unknown: Callable[[Firing], bool] = lambda _: False,
) -> Digest:
    """Take in what is there now.

    What is unknown, because its node or the head is gone, stays as it was.
    """
    tracked = dict(digest.tracked)
    there = {one.key: one for one in firing if not is_unknown(one)}
    there |= {
        key: one.firing for key, one in tracked.items() if one.is_there and is_unknown(one.firing)
    }
    for key, one in there.items():
        before = tracked.get(key)
        if before is None:
            tracked[key] = _Tracked(firing=one, changed_at_s=now_s)
        elif before.is_there:
            tracked[key] = replace(before, firing=one)
        else:
            changed_at_s = before.changed_at_s if before.has_news else now_s
            tracked[key] = replace(
                before, firing=one, is_there=True, times=before.times + 1, changed_at_s=changed_at_s
            )
    for key, before in digest.tracked.items():
        if key not in there and before.is_there:
            changed_at_s = before.changed_at_s if before.has_news else now_s
            tracked[key] = replace(before, is_there=False, changed_at_s=changed_at_s)
        elif key not in there and not before.has_news and now_s >= before.quiet_until_s:
            del tracked[key]
    return replace(digest, tracked=tracked)


def due(digest: Digest, now_s: float, *, is_last: bool = False) -> Message | None:
    """Return what is to be told now. The last message tells everything that is left."""
    if now_s < digest.sent_at_s + digest.wait_s:
        return None
    waiting = [tracked for tracked in digest.tracked.values() if tracked.has_news]
    ready = [tracked for tracked in waiting if is_last or now_s >= tracked.quiet_until_s]
    is_digest = is_last or now_s >= digest.due_at_s
    is_gathered = any(now_s >= tracked.changed_at_s + digest.pace.gather_s for tracked in ready)
    if not (is_digest or is_gathered):
        return None
    places = {tracked.place for tracked in ready}
    return Message(
        news=tuple(
            News(firing=tracked.firing, is_there=tracked.is_there, times=tracked.times)
            for tracked in waiting
            if tracked.place in places
        ),
        there=tuple(tracked.firing for tracked in digest.tracked.values() if tracked.is_there),
        is_digest=is_digest,
        is_last=is_last,
    )


def after_sending(digest: Digest, message: Message, now_s: float) -> Digest:
    """Return the state after an address has taken the message."""
    tracked = dict(digest.tracked)
    for news in message.news:
        tracked[news.firing.key] = tracked[news.firing.key].sent(now_s, digest.pace.flapping_s)
    due_at_s = _next_due_at_s(digest, message, now_s)
    return replace(
        digest, tracked=tracked, sent_at_s=now_s, wait_s=digest.pace.between_s, due_at_s=due_at_s
    )


def after_failure(digest: Digest, message: Message, now_s: float) -> Digest:
    """Return the state after no address has taken the message: its news is tried again, later each
    time.
    """
    wait_s = min(2 * digest.wait_s, digest.pace.wait_most_s)
    return replace(
        digest, sent_at_s=now_s, wait_s=wait_s, due_at_s=_next_due_at_s(digest, message, now_s)
    )


def _next_due_at_s(digest: Digest, message: Message, now_s: float) -> float:
    if digest.every_s is None or not message.is_digest or now_s < digest.due_at_s:
        return digest.due_at_s
    return digest.due_at_s + digest.every_s * (1 + (now_s - digest.due_at_s) // digest.every_s)
