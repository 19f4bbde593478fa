"""Where the threads that speak with the team leave work for the thread that computes.

The engine's loop stays in charge of the latter: it calls `part` with so many samples as fit, again
after an out-of-memory, and looks at its orders while there is nothing to do. So the former never
compute, and the latter sends no tensor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from workers.messages import TeamOrders
from workers.team.shares import Rows
from workers.team.tensors import OwnSums, checksum, split_weights
from workers.training.trainer import MicroBatch, Trainer

#: A computing thread that has not come for so long is elsewhere: held, or without memory.
AWAY_S: Final = 10.0

#: How long threads sleep that nothing wakes up.
LOOK_S: Final = 0.05


class LeftError(Exception):
    """This member is no longer what it was in the team; the text says why."""


@dataclass(eq=False, kw_only=True)
class Compute:
    """Add the gradients of some rows to the sums, in one part or more."""

    rows: Rows | None
    """`None`: there are none yet, and only `then` is called."""
    then: Callable[[int], None]
    """Called by the computing thread with how many rows it computes at once at most."""
    anew: bool = False
    """Whether they are the first of this step."""
    keep: OwnSums | None = None
    """Takes their sums, which are then of nothing else; `None`: others may be added."""
    _is_given: bool = False

    def part(self, trainer: Trainer, most_rows: int, level: int) -> MicroBatch | None:
        """Compute some of the rows."""
        if self.rows is None:
            return None
        if not self._is_given:
            if self.anew or self.keep is not None:
                trainer.drop_sums()
            trainer.give(self.rows.first, self.rows.rows)
            self._is_given = True
        done = trainer.micro_batch(most_rows, level)
        if self.keep is not None and not trainer.has_rows:
            self.keep.take(self.rows.unit)
        return done


@dataclass(eq=False)
class Change:
    """Change the state of the training: by an update, or to that of another member."""

    change: Callable[[Trainer], None]
    updates: bool


def update_with(
    sums: OwnSums,
    total: tuple[float, list[bool]] | None,
    agreed: Callable[[float, float], tuple[float, float]],
) -> Change:
    """Return an update with the sums of all, or with the own ones where no other has some.

    `total`: the loss, and which parameters have a gradient; `agreed`: see `Accumulator.finish`.
    """

    def update(trainer: Trainer) -> None:
        if total is not None:
            trainer.write_sums(sums.total, *total)
        trainer.finish(agreed)

    return Change(update, updates=True)


class Desk:
    """What the threads share; `changed` guards all of it."""

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
        self.is_here = False
        """Whether the computing thread has come since the last update: it may save before."""
        self._work: Compute | Change | None = None
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

    def obey(self, orders: TeamOrders | None) -> bool:
        """Take newer orders, and say so; older ones change nothing."""
        with self.changed:
            if not orders or (self.orders and orders.generation <= self.orders.generation):
                return False
            self.orders = orders
            self.changed.notify_all()
            return True

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
        """Do a part of the work, of at most so many samples; `None`: it was of no samples."""
        with self.busy():
            work, trainer = self._work, self.trainer
            done: MicroBatch | None = None
            if work is None or trainer is None:
                return done
            if isinstance(work, Change):
                work.change(trainer)
                done = MicroBatch(rows=0, level=level, updated=work.updates)
                self.version = trainer.step, checksum(trainer.parameters)
                self.is_here = False
            else:
                done = work.part(trainer, most_rows, level)
                if work.rows is not None and trainer.has_rows:
                    return done
            with self.changed:
                if self._work is work:
                    self._work = None
            if isinstance(work, Compute):
                work.then(most_rows)
            return done

    def do(self, change: Change) -> None:
        """Have the state changed: what is decided counts, whichever member leads by then.

        Raises:
            LeftError: It is not computed.
        """
        with self.changed:
            self.give(change)
            while self._work is change:
                self.attended()
                self.changed.wait(LOOK_S)

    def give(self, work: Compute | Change | None) -> None:
        """Leave work for the computing thread in the place of what was there."""
        with self.changed:
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

    def wait_for_news(self, orders: TeamOrders) -> None:
        """Sleep until something happens. With the lock; raises as `check`."""
        self.check(orders)
        self.changed.wait(LOOK_S)

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
