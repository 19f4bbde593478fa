"""A slot's place in its team, as the training of the slot sees it: of samples or of a model.

Says how a member takes orders, tells events, and shows that its computing thread is there.
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

#: A computing thread that has not come for so long is elsewhere: held, or without memory.
AWAY_S: Final = 10.0

#: Between two attempts to reach a leader.
AGAIN_S: Final = 0.1

#: Steps that figures are of.
STEPS: Final = 20

#: Events that wait for the computing thread; older ones are forgotten.
_MOST_EVENTS: Final = 100


class Place(ABC):
    """What all members have in common. Without underscore is what the slot, or a part of it here,
    may use.
    """

    #: Whether it computes for another one, and has neither samples nor checkpoints.
    lends = False

    #: Whether the training is not over where its last step is done.
    is_needed = False

    #: Whether a step is under way: what follows the one before it is done.
    is_computing = False

    #: Of the rows of the last steps, those that were computed here, 0 to 1.
    share = 1.0

    #: Which part of the model is here; `None`: all of it.
    portion: Portion | None = None

    #: Whether another member is to rest, and waits until this one has saved.
    wants_save = False

    #: Whether this member is asked for its state before it may rest.
    save_due = False

    #: Without whom nothing is computed, and what to type; empty: all are there, or were just now.
    waits_for = ""

    #: `host:port`, at which it takes in others where it leads.
    listens = ""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        """`tell` gets events in the computing thread."""
        self.spec, self.slot, self._tell = spec, slot, tell
        self.changed = threading.Condition(threading.RLock())
        """Guards what threads share."""
        self.orders: TeamOrders | None = None
        """The newest."""
        self.trainer: Trainer | None = None
        """`None`: it is not open, or was closed."""
        self.identity = ""
        """Equal for members that can share a training."""
        self.stands = TeamState.REJOINING
        self._lost: int | None = None
        """The generation whose leader it has lost, as `TeamStatus.lost`."""
        self._told: tuple[TeamState, int | None] = self.stands, None
        self._events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MOST_EVENTS)
        self._is_busy, self._seen_s = False, 0.0
        self._is_over = False

    def open(self, trainer: Trainer) -> None:
        """Share this training from now on."""
        plain = json.dumps([trainer.identity.plain(), self.spec.members], sort_keys=True)
        with self.changed:
            self.identity = hashlib.sha256(plain.encode()).hexdigest()
            self.trainer, self._seen_s = trainer, time.monotonic()
            self.changed.notify_all()

    @abstractmethod
    def leave(self) -> None:
        """Share none until `open`; wait until none of its tensors is used."""

    def close(self) -> None:  # noqa: B027 - one kind has nothing to do
        """Take note that all is done, and that this process ends."""

    def obey(self, orders: TeamOrders | None) -> None:
        """Take orders; smaller generations change nothing."""
        with self.changed:
            if not orders or (self.orders and orders.generation <= self.orders.generation):
                return
            self.orders = orders
            self.changed.notify_all()
        self._reordered()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for something to compute; say whether there is something."""
        while self._events:
            name, figures = self._events.popleft()
            self._tell(name, **figures)
        return self._is_ready(seconds)

    def part(self, most_rows: int, level: int) -> MicroBatch | None:
        """Compute something, of at most so many samples; `None`: nothing is to do."""
        with self.busy():  # which may be left early: then the answer is `None`
            return self._part(most_rows, level)

    def attend(self) -> None:
        """Take note that the slot is at work, also while it rests."""
        self._seen_s = time.monotonic()

    def is_attended(self) -> bool:
        """Say whether the computing thread is there."""
        return self._is_busy or time.monotonic() - self._seen_s < AWAY_S

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Have the others wait for the computing thread, which does what may take long."""
        with self.changed:
            self._is_busy = True
        try:
            yield
        finally:
            with self.changed:
                self._is_busy, self._seen_s = False, time.monotonic()
                self.changed.notify_all()

    def can_save(self, saved_step: int | None) -> bool:  # noqa: ARG002 - see `layers`
        """Say whether a checkpoint may follow that of this step."""
        return True

    def save_soon(self) -> None:  # noqa: B027 - as above
        """Take note that this member is to rest once there is a checkpoint."""

    def saved(self) -> None:  # noqa: B027 - as above
        """Take note that there is a checkpoint of this step."""

    @property
    def has_news(self) -> bool:
        """Whether the head should hear at once how this member stands."""
        return self._told != (self.stands, self._lost)

    @abstractmethod
    def status(self) -> TeamStatus:
        """Say how this member stands."""

    def event(self, name: str, **figures: Any) -> None:  # noqa: ANN401 - of an event
        """Have an event told by the computing thread."""
        self._events.append((name, figures))

    @abstractmethod
    def _reordered(self) -> None:
        """Take note that there are newer orders."""

    @abstractmethod
    def _is_ready(self, seconds: float) -> bool:
        """Wait at most so long; say whether there is something to compute."""

    @abstractmethod
    def _part(self, most_rows: int, level: int, /) -> MicroBatch | None:
        """Compute something, as `part`."""
