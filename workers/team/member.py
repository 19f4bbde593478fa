"""A member of a team that divides the samples of each step: it leads or follows as the head orders,
and reports its state.

The head names the leader in orders with a generation, which is a fencing number: a member obeys no
smaller generation, and admits no member of another one. A member that has lost its leader keeps its
state, reports the loss, and makes no update until it follows a leader again, or leads.
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
from workers.team.desk import Desk, RoleEndedError, StepSummary
from workers.team.door import Door, Serve
from workers.team.following import Follower
from workers.team.leader import Leader
from workers.team.place import RETRY_S, STEPS
from workers.team.wire import LostError


class DataMember(Desk):
    """Leads or follows, in its own threads."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        """Listen, and neither lead nor follow yet.

        Raises:
            OSError: The address cannot be listened at.
        """
        super().__init__(spec, slot, tell)
        self._steps: deque[StepSummary] = deque(maxlen=STEPS)
        self._acting: Leader | Follower | None = None
        self._generation: int | None = None
        self._reached: int | None = None
        """The last step that it reached as a follower in this generation."""
        self._began_s = 0.0
        """Monotonic time at which it first acted on this generation."""
        self._is_acting = False
        self.listens = Door(self, self._admits).address
        for target, name in ((self._ping, "team-ping"), (self._run, "team")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def leave(self) -> None:
        """Share no training until `open`; wait until no thread uses its tensors."""
        with self.changed:
            self.trainer = self.sums = self._work = None
            self.is_computing = False
            self.changed.notify_all()
            while self._is_acting:
                self.changed.wait()

    def close(self) -> None:
        """Wait until the other members have read that all is done, up to `2 * SILENT_S`."""
        until_s = time.monotonic() + 2 * wire.SILENT_S
        with self.changed:
            while not self._is_over and time.monotonic() < until_s:
                self.changed.wait(wire.PING_EVERY_S)

    @property
    def share(self) -> float:  # type: ignore[override]
        """Share of the rows of the last steps that this member computed, 0 to 1."""
        steps = list(self._steps)
        return sum(each.share for each in steps) / len(steps) if steps else 1.0

    def status(self) -> TeamStatus:
        """Return the state of this member for the head."""
        trainer, steps = self.trainer, list(self._steps)
        self._reported = state, lost = self.team_state, self._lost
        return TeamStatus(
            state=state,
            listens=self.listens,
            generation=self._generation,
            step=None if trainer is None else self.version[0],
            lost=lost,
            members=steps[-1].members if steps else 1,
            share_pct=100 * self.share if steps else None,
            wire_s=median(each.wire_s for each in steps) if steps else None,
            pace=None if trainer is None else self._pace.summary(trainer.settings.batch),
        )

    def _orders_changed(self) -> None:
        if isinstance(following := self._acting, Follower):
            following.ping()  # closes the connection: its orders are old

    def _admits(self) -> tuple[TeamOrders, Serve] | None:
        """Return the orders and who serves a new member while this one leads."""
        leads = self._acting
        return (leads.orders, leads.serve) if isinstance(leads, Leader) else None

    def _ping(self) -> None:
        """Tell the other members, again and again, that this one lives."""
        while True:
            time.sleep(wire.PING_EVERY_S)
            if (acting := self._acting) is not None:
                acting.ping()

    def _run(self) -> None:
        """Lead or follow, one generation after another."""
        while not self._is_over:
            with self.changed:
                while (orders := self._current_orders()) is None:
                    self.changed.wait(wire.PING_EVERY_S)
                self._is_acting = True
            if orders.generation != self._generation:
                self._generation, self._lost = orders.generation, None
                self.team_state = TeamState.REJOINING
                self._reached, self._began_s = None, time.monotonic()
            try:
                self._act(orders)
                self._is_over = True
            except (LostError, RoleEndedError) as error:
                self._role_ended(orders, str(error))
            with self.changed:
                self._is_acting = False
                self.changed.notify_all()
            time.sleep(RETRY_S)

    def _current_orders(self) -> TeamOrders | None:
        """Return the orders to act on; `None`: none, or no computing thread. Hold the lock."""
        orders = self.orders
        if orders is None or self.trainer is None or not self.is_attended():
            return None
        # A member that could not go on leading a generation does not lead that generation again.
        has_led = orders.leader == self.slot and orders.generation == self._lost
        return None if has_led else orders

    def _act(self, orders: TeamOrders) -> None:
        """Lead or follow until the training is done.

        Raises:
            LostError, RoleEndedError: The role ended before.
        """
        acting: Leader | Follower
        if orders.leader == self.slot:
            acting, self.team_state = Leader(self, orders), TeamState.ALONE
        else:
            acting = Follower(self, orders)
        self._acting = acting
        try:
            if isinstance(acting, Follower):
                acting.join(self._reached or 0)
                self._lost, self.team_state = None, TeamState.TOGETHER
            acting.train(self._record_step)
        finally:
            self._acting = None
            acting.close()
            if self.team_state is TeamState.TOGETHER:
                self._reached = self.version[0]

    def _role_ended(self, orders: TeamOrders, why: str) -> None:
        """Record that this member has stopped leading or following."""
        was_in, self.team_state = self.team_state is not TeamState.REJOINING, TeamState.REJOINING
        is_late = time.monotonic() - self._began_s > wire.SILENT_S
        if self.orders is orders and (was_in or is_late):
            if self._lost != orders.generation:
                self.event(
                    "team_left", generation=orders.generation, leader=orders.leader, reason=why
                )
            self._lost = orders.generation

    def _record_step(self, step: StepSummary) -> None:
        if self._steps and self._steps[-1].members != step.members:
            self._steps.clear()
            self._pace.clear()
        self._steps.append(step)
        self.team_state = TeamState.TOGETHER if step.members > 1 else TeamState.ALONE
