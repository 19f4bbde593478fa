"""Where the thread that speaks with the team leaves work for the thread that computes.

The engine's loop stays in charge of the latter: it calls `part` with so many samples as fit, again
after an out-of-memory, and looks at its orders while there is nothing to do. So the former never
computes, and the latter never waits for a socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from workers.messages import TeamOrders
from workers.team.shares import Rows
from workers.team.tensors import OwnSums, checksum, split_weights
from workers.training.trainer import MicroBatch, Trainer

#: A computing thread that has not come for so long is elsewhere: held, or without memory.
AWAY_S: Final = 10.0


class LeftError(Exception):
    """This member is no longer what it was in the team; the text says why."""


@dataclass(eq=False)
class Work:
    """What the computing thread is to do, in one part or more."""

    is_done: bool = False

    def part(self, trainer: Trainer, most_rows: int, level: int, /) -> MicroBatch:
        """Do a part; raises whatever the training does."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class ComputeRows(Work):
    """Add the gradients of some rows to the sums."""

    rows: Rows
    anew: bool
    """Whether they are the first of this step."""
    keep: OwnSums | None
    """Takes their sums, which are then of nothing else; `None`: others may be added."""
    _is_given: bool = False

    def part(self, trainer: Trainer, most_rows: int, level: int, /) -> MicroBatch:
        """Compute some of the rows."""
        if not self._is_given:
            if self.anew or self.keep is not None:
                trainer.drop_sums()
            trainer.give(self.rows.first, self.rows.rows)
            self._is_given = True
        done = trainer.micro_batch(most_rows, level)
        if not trainer.has_rows:
            if self.keep is not None:
                self.keep.take(self.rows.unit)
            self.is_done = True
        return done


@dataclass(eq=False, kw_only=True)
class Finish(Work):
    """Update, with the sums of all in the place of the own ones where others have some."""

    total: tuple[float, list[bool]] | None = None
    """The loss, and which parameters have a gradient; the gradients are in `OwnSums.total`."""
    sums: OwnSums
    agreed: Callable[[float, float], tuple[float, float]] = lambda *own: own
    """See `Accumulator.finish`."""

    def part(self, trainer: Trainer, _: int, level: int, /) -> MicroBatch:
        """Update."""
        if self.total is not None:
            trainer.write_sums(self.sums.total, *self.total)
        trainer.finish(self.agreed)
        self.is_done = True
        return MicroBatch(rows=0, level=level, updated=True)


@dataclass(eq=False, kw_only=True)
class Load(Work):
    """Go on from the state of the leader."""

    state: Mapping[str, Any]

    def part(self, trainer: Trainer, _: int, level: int, /) -> MicroBatch:
        """Load it."""
        weights = {**trainer.model.state_dict(), **self.state["weights"]}
        trainer.load({**self.state, "weights": weights})
        self.is_done = True
        return MicroBatch(rows=0, level=level, updated=False)


class Desk:
    """What both threads share; `changed` guards all of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.orders: TeamOrders | None = None
        """The newest."""
        self.trainer: Trainer | None = None
        """`None`: it is not open, or was closed."""
        self.sums: OwnSums | None = None
        self.version = 0, 0
        """The step of the state, and the checksum of the weights that are trained."""
        self.constant = 0
        """The checksum of those that are not."""
        self.most_rows = 1
        """As many samples as were computed at once last, at most."""
        self.is_here = False
        """Whether the computing thread has come since the last update: it may save before."""
        self._work: Work | None = None
        self._is_busy = False
        self._seen_s = 0.0

    def open(self, trainer: Trainer) -> None:
        """Have this training from now on."""
        with self.changed:
            self.sums, self.trainer = OwnSums(trainer), trainer
            self.constant = checksum(split_weights(trainer)[1].values())
            self.version = trainer.step, checksum(trainer.parameters)
            self._seen_s = time.monotonic()
            self.changed.notify_all()

    def close(self) -> None:
        """Have no training."""
        with self.changed:
            self.trainer = self.sums = self._work = None
            self.is_here = False
            self.changed.notify_all()

    def obey(self, orders: TeamOrders | None) -> None:
        """Take newer orders; older ones change nothing."""
        with self.changed:
            if orders and (self.orders is None or orders.generation > self.orders.generation):
                self.orders = orders
                self.changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for work; say whether there is some. For the computing thread."""
        with self.changed:
            if not self.is_here:
                self.is_here = True
                self.changed.notify_all()
            if self._work is None:
                self._seen_s = time.monotonic()
                self.changed.wait(seconds)
            return self._work is not None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Have the computing thread do something else that may take long, such as to save."""
        with self.changed:
            self._is_busy = True
        try:
            yield
        finally:
            with self.changed:
                self._is_busy, self._seen_s = False, time.monotonic()
                self.changed.notify_all()

    def part(self, most_rows: int, level: int) -> MicroBatch | None:
        """Do a part of the work, of at most so many samples; `None`: there is none any more."""
        with self.busy():
            work, trainer, self.most_rows = self._work, self.trainer, most_rows
            if work is None or trainer is None:
                return None
            done = work.part(trainer, most_rows, level)
            if work.is_done and not isinstance(work, ComputeRows):
                self.version = trainer.step, checksum(trainer.parameters)
                self.is_here = False
            if work.is_done and self._work is work:
                self._work = None
            return done

    def do(self, work: Work, wait: Callable[[], None]) -> None:
        """Have it done. `wait` waits for `changed`, and may raise."""
        with self.changed:
            self.give(work)
            while self._work is work:
                wait()

    def give(self, work: Work) -> None:
        """Leave work for the computing thread. With the lock."""
        self._work = work
        self.changed.notify_all()

    def clear(self) -> None:
        """Take back what is not done, and wait until nothing of it is being done."""
        with self.changed:
            self._work = None
            while self._is_busy:
                self.changed.wait()

    @property
    def is_attended(self) -> bool:
        """Whether the computing thread is there."""
        return self._is_busy or time.monotonic() - self._seen_s < AWAY_S

    def check(self, orders: TeamOrders) -> tuple[Trainer, OwnSums]:
        """Return the training and its sums, as long as these orders hold and it is computed.

        Raises:
            LeftError: One of both is no longer so.
        """
        if self.orders is not orders:
            raise LeftError("there are newer orders")
        return self.attended()

    def attended(self) -> tuple[Trainer, OwnSums]:
        """Return the training and its sums, as long as it is computed.

        Raises:
            LeftError: It is not.
        """
        if self.trainer is None or self.sums is None:
            raise LeftError("its training is not open")
        if self._work is not None and not self.is_attended:
            raise LeftError("it computes nothing: it is held, or has no memory")
        return self.trainer, self.sums
