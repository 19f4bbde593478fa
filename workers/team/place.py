"""A member of a team, as the training of its slot uses it, whether the team divides samples or a
model: its orders, its events, and whether its computing thread is at work. Opens no connection.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from workers.messages import TeamOrders, TeamState, TeamStatus
from workers.settings import TeamSpec
from workers.training.cut import Portion
from workers.training.trainer import MicroBatch, Trainer

#: A computing thread that has not called for so long is away: its slot is held, or has no memory.
AWAY_S: Final = 10.0

#: Time between two attempts to reach a leader.
RETRY_S: Final = 0.1

#: Number of last steps over which a status averages.
STEPS: Final = 20

#: Most events that wait for the computing thread; the oldest are dropped.
_MOST_EVENTS: Final = 100


class TeamMember(ABC):
    """What all members have in common. Public names are for the slot and the rest of this
    package.
    """

    #: Whether it only computes blocks for another member, without samples and checkpoints.
    lends = False

    #: Whether the team still needs this member after the last step of its training.
    is_needed = False

    #: Whether the computing thread has come for the next step, after all work of the last one.
    is_computing = False

    #: Share of the rows of the last steps that this member computed, 0 to 1.
    share = 1.0

    #: The part of the model that this member has; `None`: the whole model.
    portion: Portion | None = None

    #: Whether another member must rest, and waits until this one has saved a checkpoint.
    wants_save = False

    #: Whether the leader must still save this member's state before this member may rest.
    save_due = False

    #: The missing member that holds up all steps, and what to type; empty: none for `AWAY_S`.
    waits_for = ""

    #: `host:port` at which this member accepts the others while it leads.
    listens = ""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        """`tell` is called with each event, by the computing thread."""
        self.spec, self.slot, self._tell = spec, slot, tell
        self.changed = threading.Condition(threading.RLock())
        """Guards all state that threads share."""
        self.orders: TeamOrders | None = None
        """The newest orders; `None`: there are none yet."""
        self.trainer: Trainer | None = None
        """The training; `None`: it is not open, or was closed."""
        self.identity = ""
        """A hash of the training and of the members' names, equal for all that can share it."""
        self.team_state = TeamState.REJOINING
        self._lost: int | None = None
        """The generation whose leader this member has lost; see `TeamStatus.lost`."""
        self._reported: tuple[TeamState, int | None] = self.team_state, None
        self._events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MOST_EVENTS)
        self._is_busy, self._attended_s = False, 0.0
        self._is_over = False

    def open(self, trainer: Trainer) -> None:
        """Share this training with the team from now on."""
        plain = json.dumps([trainer.identity.plain(), self.spec.members], sort_keys=True)
        with self.changed:
            self.identity = hashlib.sha256(plain.encode()).hexdigest()
            self.trainer, self._attended_s = trainer, time.monotonic()
            self.changed.notify_all()

    @abstractmethod
    def leave(self) -> None:
        """Share no training until `open`; wait until no thread uses its tensors."""

    def close(self) -> None:  # noqa: B027 - one kind has nothing to do
        """Note that the training is done and that this process will end."""

    def obey(self, orders: TeamOrders | None) -> None:
        """Obey `orders` unless their generation is no larger than that of the present orders."""
        with self.changed:
            if not orders or (self.orders and orders.generation <= self.orders.generation):
                return
            self.orders = orders
            self.changed.notify_all()
        self._orders_changed()

    def wait(self, seconds: float) -> bool:
        """Report queued events; wait up to `seconds` for work, and return whether there is some."""
        while self._events:
            name, figures = self._events.popleft()
            self._tell(name, **figures)
        return self._is_ready(seconds)

    def part(self, most_rows: int, level: int) -> MicroBatch | None:
        """Do the next work with at most `most_rows` samples; `None`: there was none."""
        with self.busy():  # a subclass may suppress an error here; then this returns `None`
            return self._part(most_rows, level)

    def attend(self) -> None:
        """Record that the slot is at work, also while it rests."""
        self._attended_s = time.monotonic()

    def is_attended(self) -> bool:
        """Return whether the computing thread is busy, or has called in the last `AWAY_S`."""
        return self._is_busy or time.monotonic() - self._attended_s < AWAY_S

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark the computing thread as busy: other threads then wait however long it takes."""
        with self.changed:
            self._is_busy = True
        try:
            yield
        finally:
            with self.changed:
                self._is_busy, self._attended_s = False, time.monotonic()
                self.changed.notify_all()

    def can_save(self, saved_step: int | None) -> bool:  # noqa: ARG002 - see `layers`
        """Return whether a checkpoint newer than that of `saved_step` may still be written."""
        return True

    def save_soon(self) -> None:  # noqa: B027 - as above
        """Note that this member must rest once a checkpoint is saved."""

    def saved(self) -> None:  # noqa: B027 - as above
        """Note that a checkpoint of this step is saved."""

    @property
    def has_news(self) -> bool:
        """Whether the state of this member has changed since the last `status`."""
        return self._reported != (self.team_state, self._lost)

    @abstractmethod
    def status(self) -> TeamStatus:
        """Return the state of this member for the head."""

    def event(self, name: str, **figures: Any) -> None:  # noqa: ANN401 - of an event
        """Queue an event, which the computing thread reports."""
        self._events.append((name, figures))

    @abstractmethod
    def _orders_changed(self) -> None:
        """React to newer orders."""

    @abstractmethod
    def _is_ready(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether there is work for `part`."""

    @abstractmethod
    def _part(self, most_rows: int, level: int, /) -> MicroBatch | None:
        """Do the work of `part`."""
