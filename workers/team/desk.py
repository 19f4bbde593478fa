"""Hands work from the network threads of a member to the thread that computes.

The engine's loop stays in control of the computing thread: it calls `part` with the number of
samples that fit, again after an out-of-memory, and reads its orders while there is no work. So
network threads never compute, and the computing thread never sends a tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from workers.messages import TeamOrders
from workers.settings import TeamSpec
from workers.team.pace import Pace
from workers.team.place import TeamMember
from workers.team.shares import Rows
from workers.team.tensors import OwnSums, checksum, split_weights
from workers.training.trainer import MicroBatch, Trainer

#: How long threads sleep if nothing wakes them up.
POLL_S: Final = 0.05


class RoleEndedError(Exception):
    """This member can no longer lead or follow under its present orders; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One finished step, for the table."""

    members: int
    share: float
    """Share of the rows that this member computed, 0 to 1."""
    wire_s: float


@dataclass(eq=False, kw_only=True)
class Work:
    """Work for the computing thread: add the gradients of rows to the sums, in one part or more;
    apply a change to the training; or just call `then`.
    """

    rows: Rows | None = None
    change: Callable[[Trainer], None] | None = None
    updates: bool = False
    """Whether the change is the update of a step."""
    then: Callable[[int], None] = lambda _: None
    """Called by the computing thread after the work, with the most rows it computes at once."""
    is_begun: bool = False


class Desk(TeamMember):
    """State that the threads of a member with the whole model share; `changed` guards all of it."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        super().__init__(spec, slot, tell)
        self.sums: OwnSums | None = None
        self.version = 0, 0
        """Step of the training, and checksum of its trained weights."""
        self.constant = 0
        """Checksum of the weights that are not trained."""
        self.is_computing = False
        """Whether the computing thread has come since the last update; it saves before."""
        self._work: Work | None = None
        self._must_drop_sums = True
        """Whether the sums may be left from an earlier generation, and must be dropped."""
        self._pace = Pace()

    def open(self, trainer: Trainer) -> None:
        """Share this training with the team from now on."""
        with self.changed:
            self.sums = OwnSums(trainer)
            self._record_state(trainer)
            super().open(trainer)

    def attend(self) -> None:
        """Do nothing: the other members compute the samples of a member that rests."""

    def part(self, most_rows: int, level: int) -> MicroBatch | None:
        """Do part of the work with at most `most_rows` samples; `None`: the work had no samples."""
        began_s = time.monotonic()
        done = super().part(most_rows, level)
        if done is not None:
            ended_s = time.monotonic()
            self._pace.record_part(
                done.rows, updated=done.updated, began_s=began_s, ended_s=ended_s
            )
        return done

    def change(self, change: Callable[[Trainer], None], *, updates: bool = False) -> None:
        """Make the computing thread apply `change` to the training, and wait until it has. Newer
        orders do not end the wait.

        Raises:
            RoleEndedError: The training is closed, or its computing thread is away.
        """
        work = Work(change=change, updates=updates)
        with self.changed:
            self.give(work)
            while self._work is work:
                self._attended_training()
                self.changed.wait(POLL_S)

    def update(
        self,
        total: tuple[float, list[bool]] | None,
        agreed: Callable[[float, float], tuple[float, float]],
    ) -> None:
        """Make the computing thread update the weights by `sums.total`, and wait until it has.

        `total`: the loss of all, and which parameters have a gradient; `None`: no other member has
        sums, and its own are used. `agreed`: see `Accumulator.finish`. Raises as `change`.
        """

        def update(trainer: Trainer) -> None:
            if total is not None and self.sums is not None:
                trainer.write_sums(self.sums.total, *total)
            trainer.finish(agreed)

        self.change(update, updates=True)

    def give(self, work: Work | None) -> None:
        """Give the computing thread this work instead of any that it has not finished."""
        with self.changed:
            self._work = work
            self.changed.notify_all()

    def clear(self) -> None:
        """Withdraw unfinished work, and wait until the computing thread is not busy with it."""
        with self.changed:
            self._work = None
            while self._is_busy:
                self.changed.wait()
            self._must_drop_sums = True

    def check(self, orders: TeamOrders) -> tuple[Trainer, OwnSums]:
        """Return the training and its sums if these orders are still the newest.

        Raises:
            RoleEndedError: There are newer orders, or the training is closed or not computed.
        """
        if self.orders is not orders:
            raise RoleEndedError("there are newer orders")
        return self._attended_training()

    def wait_for_news(self, orders: TeamOrders) -> None:
        """Sleep until another thread notifies, 0.05 s at most. Hold the lock; raises as `check`."""
        self.check(orders)
        self.changed.wait(POLL_S)

    def _is_ready(self, seconds: float) -> bool:
        began_s = time.monotonic()
        with self.changed:
            if not self.is_computing:
                self.is_computing = True
                self.changed.notify_all()
            if self._work is None:
                self._attended_s = time.monotonic()
                self.changed.wait(seconds)
            self._pace.waited_s += time.monotonic() - began_s
            return self._work is not None

    def _part(self, most_rows: int, level: int, /) -> MicroBatch | None:
        work, trainer = self._work, self.trainer
        if work is None or trainer is None:
            return None
        done: MicroBatch | None = None
        if self._must_drop_sums and (work.change or work.rows):
            trainer.drop_sums()
            self._must_drop_sums = False
        if work.change is not None:
            work.change(trainer)
            done = MicroBatch(rows=0, level=level, updated=work.updates)
            self._record_state(trainer, updated=work.updates)
            self.is_computing = False
        elif work.rows is not None:
            # With `train.exact` each range has its own sum, whichever member computes it.
            range_sums = self.sums if trainer.settings.exact else None
            if not work.is_begun:
                if range_sums is not None:
                    trainer.drop_sums()
                trainer.add_rows(work.rows.first, work.rows.rows)
                work.is_begun = True
            done = trainer.micro_batch(most_rows, level)
            if trainer.has_rows:
                return done
            if range_sums is not None:
                range_sums.take(work.rows.unit)
        with self.changed:
            if self._work is work:
                self._work = None
        work.then(most_rows)
        return done

    def _record_state(self, trainer: Trainer, *, updated: bool = False) -> None:
        """Record step and checksums. An update does not change the untrained weights."""
        self.version = trainer.step, checksum(trainer.parameters)
        if not updated:
            self.constant = checksum(split_weights(trainer)[1].values())

    def _attended_training(self) -> tuple[Trainer, OwnSums]:
        """Return the training and its sums.

        Raises:
            RoleEndedError: The training is closed, or has work while its computing thread is away.
        """
        if self.trainer is None or self.sums is None:
            raise RoleEndedError("its training is not open")
        if self._work is not None and not self.is_attended():
            raise RoleEndedError("it computes nothing: it is held, or has no memory")
        return self.trainer, self.sums
