"""Where the threads that speak with the team leave work for the thread that computes.

The engine's loop stays in charge of the latter: it calls `part` with so many samples as fit, again
after an out-of-memory, and looks at its orders while there is nothing to do. So the former never
compute, and the latter sends no tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from workers.messages import TeamOrders
from workers.settings import TeamSpec
from workers.team.pace import Pace
from workers.team.place import Place
from workers.team.shares import Rows
from workers.team.tensors import OwnSums, checksum, split_weights
from workers.training.trainer import MicroBatch, Trainer

#: How long threads sleep that nothing wakes up.
LOOK_S: Final = 0.05


class LeftError(Exception):
    """This member is no longer what it was in the team; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What a step was, for the table."""

    members: int
    share: float
    """Of the rows, those that this member computed."""
    wire_s: float


@dataclass(eq=False, kw_only=True)
class Work:
    """What the computing thread is to do: add the gradients of some rows to the sums, in one part
    or more, or change the state; or only to come.
    """

    rows: Rows | None = None
    change: Callable[[Trainer], None] | None = None
    updates: bool = False
    """Whether the change is that of a step."""
    then: Callable[[int], None] = lambda _: None
    """Called by the computing thread with how many rows it computes at once at most."""
    is_given: bool = False


class Desk(Place):
    """What the threads of a member share that has the whole model; `changed` guards all of it."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        super().__init__(spec, slot, tell)
        self.sums: OwnSums | None = None
        self.version = 0, 0
        """The step of the state, and the checksum of the weights that are trained."""
        self.constant = 0
        """The checksum of those that are not."""
        self.is_computing = False
        """Whether the computing thread has come since the last update: it may save before."""
        self._work: Work | None = None
        self._is_anew = True
        """Whether the sums are of another generation, or of none."""
        self._pace = Pace()

    def open(self, trainer: Trainer) -> None:
        """Share this training from now on."""
        with self.changed:
            self.sums = OwnSums(trainer)
            self._weigh(trainer)
            super().open(trainer)

    def attend(self) -> None:
        """Do nothing: the others compute the samples of a member that rests."""

    def part(self, most_rows: int, level: int) -> MicroBatch | None:
        """Do a part of the work, of at most so many samples; `None`: it was of no samples."""
        began_s = time.monotonic()
        done = super().part(most_rows, level)
        if done is not None:
            ended_s = time.monotonic()
            self._pace.did(done.rows, updated=done.updated, began_s=began_s, ended_s=ended_s)
        return done

    def change(self, change: Callable[[Trainer], None], *, updates: bool = False) -> None:
        """Have the state changed: what is decided counts, whichever member leads by then.

        Raises:
            LeftError: It is not computed.
        """
        work = Work(change=change, updates=updates)
        with self.changed:
            self.give(work)
            while self._work is work:
                self._attended()
                self.changed.wait(LOOK_S)

    def update(
        self,
        total: tuple[float, list[bool]] | None,
        agreed: Callable[[float, float], tuple[float, float]],
    ) -> None:
        """Have an update done with the sums of all, or with the own ones where no other has some.

        `total`: the loss, and which parameters have a gradient; `agreed`: see `Accumulator.finish`.
        Raises as `change`.
        """

        def update(trainer: Trainer) -> None:
            if total is not None and self.sums is not None:
                trainer.write_sums(self.sums.total, *total)
            trainer.finish(agreed)

        self.change(update, updates=True)

    def give(self, work: Work | None) -> None:
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
            self._is_anew = True

    def check(self, orders: TeamOrders) -> tuple[Trainer, OwnSums]:
        """Return the training and its sums, as long as these orders hold and it is computed.

        Raises:
            LeftError: One of both is no longer so.
        """
        if self.orders is not orders:
            raise LeftError("there are newer orders")
        return self._attended()

    def wait_for_news(self, orders: TeamOrders) -> None:
        """Sleep until something happens. With the lock; raises as `check`."""
        self.check(orders)
        self.changed.wait(LOOK_S)

    def _is_ready(self, seconds: float) -> bool:
        began_s = time.monotonic()
        with self.changed:
            if not self.is_computing:
                self.is_computing = True
                self.changed.notify_all()
            if self._work is None:
                self._seen_s = time.monotonic()
                self.changed.wait(seconds)
            self._pace.waited_s += time.monotonic() - began_s
            return self._work is not None

    def _part(self, most_rows: int, level: int, /) -> MicroBatch | None:
        work, trainer = self._work, self.trainer
        if work is None or trainer is None:
            return None
        done: MicroBatch | None = None
        if self._is_anew and (work.change or work.rows):
            trainer.drop_sums()
            self._is_anew = False
        if work.change is not None:
            work.change(trainer)
            done = MicroBatch(rows=0, level=level, updated=work.updates)
            self._weigh(trainer, updated=work.updates)
            self.is_computing = False
        elif work.rows is not None:
            # With `exact` each range has sums of its own, whichever member computes it.
            keep = self.sums if trainer.settings.exact else None
            if not work.is_given:
                if keep is not None:
                    trainer.drop_sums()
                trainer.give(work.rows.first, work.rows.rows)
                work.is_given = True
            done = trainer.micro_batch(most_rows, level)
            if trainer.has_rows:
                return done
            if keep is not None:
                keep.take(work.rows.unit)
        with self.changed:
            if self._work is work:
                self._work = None
        work.then(most_rows)
        return done

    def _weigh(self, trainer: Trainer, *, updated: bool = False) -> None:
        """Take note of the state; an update leaves alone what is not trained, another state brings
        its own.
        """
        self.version = trainer.step, checksum(trainer.parameters)
        if not updated:
            self.constant = checksum(split_weights(trainer)[1].values())

    def _attended(self) -> tuple[Trainer, OwnSums]:
        """Return the training and its sums, as long as it is computed.

        Raises:
            LeftError: It is not.
        """
        if self.trainer is None or self.sums is None:
            raise LeftError("its training is not open")
        if self._work is not None and not self.is_attended():
            raise LeftError("it computes nothing: it is held, or has no memory")
        return self.trainer, self.sums
