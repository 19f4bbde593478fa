"""A slot's place in its team: it leads or follows as the head says, and tells how it stands.

The head names who leads by orders with a generation, which is a fencing number: a member obeys no
smaller one, and takes in no member that obeys another. A member that has lost its leader keeps its
state, tells it, and does no update until it follows one again, or leads.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, Final

from workers.messages import TeamOrders, TeamState, TeamStatus
from workers.settings import TeamSpec
from workers.team import wire
from workers.team.desk import Desk, LeftError
from workers.team.door import Admission, Door
from workers.team.following import Following
from workers.team.leader import Leader, Stepped
from workers.team.pace import Pace
from workers.team.wire import LostError
from workers.training.trainer import MicroBatch, Trainer

_OUT: Final = TeamState.REJOINING

#: Between two attempts to reach a leader.
_AGAIN_S: Final = 0.1

#: Steps that figures are of.
_STEPS: Final = 20


class Member:
    """The team as a training's slot sees it, where members divide the samples of each step."""

    #: As `layers.Place` has them: each member has the whole model, and is done after the last step.
    lends = is_needed = wants_save = save_due = False
    portion = None

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        """Listen, and neither lead nor follow yet. `tell` gets events in the computing thread.

        Raises:
            OSError: The address cannot be listened at.
        """
        self._spec, self._slot, self._tell = spec, slot, tell
        self._desk = Desk()
        self._events: deque[tuple[str, dict[str, Any]]] = deque()
        self._steps: deque[Stepped] = deque(maxlen=_STEPS)
        self._pace = Pace()
        self._leader: Leader | None = None
        self._following: Following | None = None
        self._state = TeamState.REJOINING
        self._generation: int | None = None
        self._lost: int | None = None
        self._reached: int | None = None
        """The step at which it followed last in this generation."""
        self._since_s = 0.0
        """When it got its orders."""
        self._told: tuple[TeamState, int | None] = self._state, None
        self._acts = self._is_over = False
        self._identity = ""
        """Equal for members that can share a training."""
        self._listens = Door(spec.listen, self._admits, self._event).address
        for target, name in ((self._ping, "team-ping"), (self._live, "team")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def open(self, trainer: Trainer) -> None:
        """Share this training from now on."""
        plain = json.dumps([trainer.identity.plain(), self._spec.members], sort_keys=True)
        self._identity = hashlib.sha256(plain.encode()).hexdigest()
        self._desk.open(trainer)

    def leave(self) -> None:
        """Share none until `open`; wait until none of its tensors is used."""
        self._desk.close()
        with self._desk.changed:
            while self._acts:
                self._desk.changed.wait()

    def close(self) -> None:
        """Wait a moment until the others have read that all is done."""
        until_s = time.monotonic() + 2 * wire.SILENT_S
        with self._desk.changed:
            while not self._is_over and time.monotonic() < until_s:
                self._desk.changed.wait(wire.PING_EVERY_S)

    def obey(self, orders: TeamOrders | None) -> None:
        """Take orders; smaller generations change nothing."""
        if self._desk.obey(orders) and (following := self._following) is not None:
            following.ping()  # which ends it

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for something to compute; say whether there is something."""
        while self._events:
            name, figures = self._events.popleft()
            self._tell(name, **figures)
        began_s = time.monotonic()
        has_work = self._desk.wait(seconds)
        self._pace.waited_s += time.monotonic() - began_s
        return has_work

    def part(self, most_rows: int, level: int) -> MicroBatch | None:
        """Compute some of the rows that this member holds, or update; `None`: nothing is to do."""
        began_s = time.monotonic()
        done = self._desk.part(most_rows, level)
        if done is not None:
            ended_s = time.monotonic()
            self._pace.did(done.rows, updated=done.updated, began_s=began_s, ended_s=ended_s)
        return done

    def can_save(self, saved_step: int | None) -> bool:  # noqa: ARG002 - as `Place.can_save`
        """Say whether a checkpoint may follow: each member has all of the state."""
        return True

    def attend(self) -> None:
        """Do nothing: the others compute the samples of a member that rests."""

    def save_soon(self) -> None:
        """Do nothing: each member saves by itself."""

    def saved(self) -> None:
        """Do nothing, as above."""

    def busy(self) -> AbstractContextManager[None]:
        """Return the region in which the computing thread saves, or judges itself."""
        return self._desk.busy()

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way: what follows the one before it is done."""
        return self._desk.is_here

    @property
    def share(self) -> float:
        """Of the rows of the last steps, those that were computed here, 0 to 1."""
        steps = list(self._steps)
        return sum(each.share for each in steps) / len(steps) if steps else 1.0

    @property
    def has_news(self) -> bool:
        """Whether the head should hear at once how this member stands."""
        return self._told != (self._state, self._lost)

    def status(self) -> TeamStatus:
        """Say how this member stands."""
        trainer, steps = self._desk.trainer, list(self._steps)
        self._told = state, lost = self._state, self._lost
        return TeamStatus(
            state=state,
            listens=self._listens,
            generation=self._generation,
            step=None if trainer is None else self._desk.version[0],
            lost=lost,
            members=steps[-1].members if steps else 1,
            share_pct=100 * self.share if steps else None,
            wire_s=median(each.wire_s for each in steps) if steps else None,
            pace=None if trainer is None else self._pace.told(trainer.settings.batch),
        )

    def _event(self, name: str, **figures: Any) -> None:  # noqa: ANN401 - of an event
        self._events.append((name, figures))

    def _admits(self) -> Admission | None:
        """Let members in while this one leads."""
        leader = self._leader
        return None if leader is None else Admission(leader.orders.secret, leader.serve)

    def _ping(self) -> None:
        """Tell the others that this one lives."""
        while True:
            time.sleep(wire.PING_EVERY_S)
            acting = self._leader or self._following
            if acting is not None:
                acting.ping()

    def _live(self) -> None:
        """Lead or follow, generation after generation."""
        desk = self._desk
        while not self._is_over:
            with desk.changed:
                while (orders := self._orders()) is None:
                    desk.changed.wait(wire.PING_EVERY_S)
                self._acts = True
            if orders.generation != self._generation:
                self._generation, self._lost, self._state = orders.generation, None, _OUT
                self._reached, self._since_s = None, time.monotonic()
            try:
                if orders.leader == self._slot:
                    self._lead(orders)
                else:
                    self._follow(orders)
                self._is_over = True
            except (LostError, LeftError) as error:
                self._left(orders, str(error))
            with desk.changed:
                self._acts = False
                desk.changed.notify_all()
            time.sleep(_AGAIN_S)

    def _orders(self) -> TeamOrders | None:
        """Return the orders to obey, if the computing thread is there. With the lock."""
        orders, desk = self._desk.orders, self._desk
        if orders is None or desk.trainer is None or not desk.is_attended:
            return None
        # Who has led a generation, and could no more, leads another one at the earliest.
        has_led = orders.leader == self._slot and orders.generation == self._lost
        return None if has_led else orders

    def _lead(self, orders: TeamOrders) -> None:
        self._leader = Leader(
            self._desk, self._slot, self._spec.members, orders, self._identity, self._event
        )
        self._state = TeamState.ALONE
        try:
            self._leader.lead(self._stepped)
        finally:
            self._leader = None
            self._desk.clear()

    def _follow(self, orders: TeamOrders) -> None:
        following = Following(self._desk, self._slot, orders, self._identity)
        self._following = following
        try:
            following.join(self._reached or 0)
            self._lost, self._state = None, TeamState.TOGETHER
            following.follow(self._stepped)
        finally:
            self._following = None
            following.close()
            if self._state is TeamState.TOGETHER:
                self._reached = self._desk.version[0]

    def _left(self, orders: TeamOrders, why: str) -> None:
        """Take note that this member neither leads nor follows any more."""
        was_in, self._state = self._state is not _OUT, _OUT
        is_late = time.monotonic() - self._since_s > wire.SILENT_S
        if self._desk.orders is orders and (was_in or is_late):
            if self._lost != orders.generation:
                self._event(
                    "team_left", generation=orders.generation, leader=orders.leader, reason=why
                )
            self._lost = orders.generation

    def _stepped(self, step: Stepped) -> None:
        if self._steps and self._steps[-1].members != step.members:
            self._steps.clear()
            self._pace.clear()
        self._steps.append(step)
        self._state = TeamState.TOGETHER if step.members > 1 else TeamState.ALONE
