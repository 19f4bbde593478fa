"""A member of a team that divides the samples of each step: it leads or follows as the head says,
and tells how it stands.

The head names who leads by orders with a generation, which is a fencing number: a member obeys no
smaller one, and takes in no member that obeys another. A member that has lost its leader keeps its
state, tells it, and does no update until it follows one again, or leads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from workers.messages import TeamOrders, TeamState, TeamStatus
from workers.settings import TeamSpec
from workers.team import wire
from workers.team.desk import Desk, LeftError, Stepped
from workers.team.door import Door, Serve
from workers.team.following import Following
from workers.team.leader import Leader
from workers.team.place import AGAIN_S, STEPS
from workers.team.wire import LostError


class Member(Desk):
    """Leads or follows, in threads of its own."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        """Listen, and neither lead nor follow yet.

        Raises:
            OSError: The address cannot be listened at.
        """
        super().__init__(spec, slot, tell)
        self._steps: deque[Stepped] = deque(maxlen=STEPS)
        self._acting: Leader | Following | None = None
        self._generation: int | None = None
        self._reached: int | None = None
        """The step at which it followed last in this generation."""
        self._since_s = 0.0
        """When it got its orders."""
        self._acts = False
        self.listens = Door(self, self._admits).address
        for target, name in ((self._ping, "team-ping"), (self._live, "team")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def leave(self) -> None:
        """Share none until `open`; wait until none of its tensors is used."""
        with self.changed:
            self.trainer = self.sums = self._work = None
            self.is_computing = False
            self.changed.notify_all()
            while self._acts:
                self.changed.wait()

    def close(self) -> None:
        """Wait a moment until the others have read that all is done."""
        until_s = time.monotonic() + 2 * wire.SILENT_S
        with self.changed:
            while not self._is_over and time.monotonic() < until_s:
                self.changed.wait(wire.PING_EVERY_S)

    @property
    def share(self) -> float:  # type: ignore[override]
        """Of the rows of the last steps, those that were computed here, 0 to 1."""
        steps = list(self._steps)
        return sum(each.share for each in steps) / len(steps) if steps else 1.0

    def status(self) -> TeamStatus:
        """Say how this member stands."""
        trainer, steps = self.trainer, list(self._steps)
        self._told = state, lost = self.stands, self._lost
        return TeamStatus(
            state=state,
            listens=self.listens,
            generation=self._generation,
            step=None if trainer is None else self.version[0],
            lost=lost,
            members=steps[-1].members if steps else 1,
            share_pct=100 * self.share if steps else None,
            wire_s=median(each.wire_s for each in steps) if steps else None,
            pace=None if trainer is None else self._pace.told(trainer.settings.batch),
        )

    def _reordered(self) -> None:
        if isinstance(following := self._acting, Following):
            following.ping()  # which ends it

    def _admits(self) -> tuple[TeamOrders, Serve] | None:
        """Let members in while this one leads."""
        leads = self._acting
        return (leads.orders, leads.serve) if isinstance(leads, Leader) else None

    def _ping(self) -> None:
        """Tell the others that this one lives."""
        while True:
            time.sleep(wire.PING_EVERY_S)
            if (acting := self._acting) is not None:
                acting.ping()

    def _live(self) -> None:
        """Lead or follow, generation after generation."""
        while not self._is_over:
            with self.changed:
                while (orders := self._orders()) is None:
                    self.changed.wait(wire.PING_EVERY_S)
                self._acts = True
            if orders.generation != self._generation:
                self._generation, self._lost = orders.generation, None
                self.stands = TeamState.REJOINING
                self._reached, self._since_s = None, time.monotonic()
            try:
                self._act(orders)
                self._is_over = True
            except (LostError, LeftError) as error:
                self._left(orders, str(error))
            with self.changed:
                self._acts = False
                self.changed.notify_all()
            time.sleep(AGAIN_S)

    def _orders(self) -> TeamOrders | None:
        """Return the orders to obey, if the computing thread is there. With the lock."""
        orders = self.orders
        if orders is None or self.trainer is None or not self.is_attended():
            return None
        # Who has led a generation, and could no more, leads another one at the earliest.
        has_led = orders.leader == self.slot and orders.generation == self._lost
        return None if has_led else orders

    def _act(self, orders: TeamOrders) -> None:
        """Lead or follow to the end of the training.

        Raises:
            LostError, LeftError: It ends before.
        """
        acting: Leader | Following
        if orders.leader == self.slot:
            acting, self.stands = Leader(self, orders), TeamState.ALONE
        else:
            acting = Following(self, orders)
        self._acting = acting
        try:
            if isinstance(acting, Following):
                acting.join(self._reached or 0)
                self._lost, self.stands = None, TeamState.TOGETHER
            acting.train(self._stepped)
        finally:
            self._acting = None
            acting.close()
            if self.stands is TeamState.TOGETHER:
                self._reached = self.version[0]

    def _left(self, orders: TeamOrders, why: str) -> None:
        """Take note that this member neither leads nor follows any more."""
        was_in, self.stands = self.stands is not TeamState.REJOINING, TeamState.REJOINING
        is_late = time.monotonic() - self._since_s > wire.SILENT_S
        if self.orders is orders and (was_in or is_late):
            if self._lost != orders.generation:
                self.event(
                    "team_left", generation=orders.generation, leader=orders.leader, reason=why
                )
            self._lost = orders.generation

    def _stepped(self, step: Stepped) -> None:
        if self._steps and self._steps[-1].members != step.members:
            self._steps.clear()
            self._pace.clear()
        self._steps.append(step)
        self.stands = TeamState.TOGETHER if step.members > 1 else TeamState.ALONE
