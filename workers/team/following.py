"""A member that follows the leader: it computes the rows that it is given, hands over its sums, and
does the update that all do. Decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from workers.messages import TeamOrders
from workers.team import tensors, wire
from workers.team.desk import ComputeRows, Desk, Finish, LeftError, Load
from workers.team.leader import Stepped
from workers.team.shares import Rows
from workers.team.wire import Head, Kind, LostError


class Following:
    """One connection to a leader."""

    def __init__(self, desk: Desk, slot: str, orders: TeamOrders, identity: str) -> None:
        """Connect; `close` is to follow.

        Raises:
            LostError: There is no leader.
            LeftError: There are newer orders, or the computing thread is away.
        """
        self._desk, self._orders = desk, orders
        self._trainer, self._sums = desk.check(orders)
        self._fixed = self._trainer.settings.exact
        self._frames: deque[tuple[Head, Mapping[str, Any]]] = deque()
        self._failure: Exception | None = None
        self._claim: dict[str, object] | None = None
        """What is to be said with the next claim, once the computing thread is there; `None`: none
        is due."""
        self._unit: int | None = None
        """Of the rows that were computed last in this step; `None`: none were."""
        self._round = 0
        """Of the sums that were wanted last."""
        self._pinged_s = 0.0
        self._is_void = False
        self._received = 0
        """Chunks of the total."""
        self._hello = {
            "slot": slot, "generation": orders.generation, "identity": identity,
            "version": desk.version, "constant": desk.constant,
        }  # fmt: skip
        self._connection = wire.connect(orders.address, orders.secret)
        self._reader = threading.Thread(target=self._read, name="team-leader", daemon=True)
        self._reader.start()

    def join(self, least_step: int) -> None:
        """Take the leader's state, which must not be before this step.

        Raises:
            LostError, LeftError: As above.
        """
        self._connection.tell(Kind.HELLO, 0, **self._hello)
        self._welcome(self._next()[1], least_step)

    def follow(self, stepped: Callable[[Stepped], None]) -> None:
        """Train to the end.

        Raises:
            LostError, LeftError: As above.
        """
        while not self._desk.check(self._orders)[0].finished:
            head, said = self._next()
            match head.kind:
                case Kind.WELCOME:  # its weights were others than the leader's
                    self._welcome(said, 0)
                case Kind.ROWS:
                    self._compute(Rows(**said))
                case Kind.SUMS:
                    self._hand_over(head.round)
                case Kind.VOID:
                    self._claim = {}
                case Kind.COMMIT:
                    stepped(self._update(said))
                case _:
                    raise LostError(f"it sent {head.kind.name}")

    def close(self) -> None:
        """Leave, and do nothing more for this leader."""
        self._connection.close()
        self._reader.join()
        self._desk.clear()

    def _read(self) -> None:
        """Take in what the leader sends, until it is gone."""
        connection, desk = self._connection, self._desk
        try:
            while True:
                head = connection.head()
                if head.kind is Kind.CHUNK:
                    self._take_total(head)
                    continue
                said = connection.said(head) if head.length else {}
                if head.kind is Kind.WELCOME and said["state"] is not None:
                    said = {**said, "loaded": tensors.receive(connection, said["state"])}
                with desk.changed:
                    if head.kind in {Kind.WELCOME, Kind.SUMS, Kind.VOID}:
                        self._round, self._received = head.round, 0
                        self._is_void = head.kind is Kind.VOID
                    self._frames.append((head, said))
                    desk.changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for frames
            with desk.changed:
                self._failure = error
                desk.changed.notify_all()
        finally:
            connection.release()

    def _take_total(self, head: Head) -> None:
        size = wire.CHUNK_BYTES // self._sums.total.element_size()
        piece = self._sums.total[size * self._received : size * (self._received + 1)]
        self._connection.into(tensors.bytes_of(piece), head)
        self._received += 1

    def _next(self) -> tuple[Head, Mapping[str, Any]]:
        """Return the next frame; claim rows meanwhile, if that is due."""
        desk = self._desk
        with desk.changed:
            while not self._frames:
                if self._claim is not None and desk.is_here:
                    claim = {"most": desk.most_rows, **self._claim}
                    self._connection.tell(Kind.CLAIM, self._round, **claim)
                    self._claim = None
                self._wait()
            head, said = self._frames.popleft()
        if head.kind is Kind.REFUSED:
            raise LostError(str(said.get("reason")))
        return head, said

    def _wait(self) -> None:
        """Sleep until something happens. With the lock."""
        self._desk.check(self._orders)
        if self._failure is not None:
            raise LostError(str(self._failure)) from self._failure
        self._desk.changed.wait(wire.PING_EVERY_S)
        if time.monotonic() - self._pinged_s >= wire.PING_EVERY_S:
            self._pinged_s = time.monotonic()
            self._connection.ping()

    def _wait_for_update(self) -> None:
        """As `_wait`, but that a step that is decided is done, whichever member leads by then."""
        self._desk.attended()
        try:
            self._wait()
        except (LostError, LeftError):
            self._desk.changed.wait(wire.PING_EVERY_S)

    def _welcome(self, said: Mapping[str, Any], least_step: int) -> None:
        if said["step"] < least_step:
            raise LostError(f"it is at step {said['step']}, and was at {least_step}")
        if "loaded" in said:
            self._desk.do(Load(state=said["loaded"]), self._wait)
        self._begin()

    def _begin(self) -> None:
        self._sums.clear()
        self._unit, self._claim = None, {"version": self._desk.version}

    def _compute(self, rows: Rows) -> None:
        keep = self._sums if self._fixed else None
        self._desk.do(ComputeRows(rows=rows, anew=self._unit is None, keep=keep), self._wait)
        self._unit, self._claim = rows.unit, {"done": True}

    def _hand_over(self, round_: int) -> None:
        """Send the own sums; those of all come meanwhile."""
        self._claim = None
        if self._unit is not None and not self._fixed:
            self._sums.take(self._unit)
        self._connection.tell(Kind.SUMS, round_, units=self._sums.said())
        own = [tensors.pieces(each.flat) for _, each in sorted(self._sums.units.items())]
        for pieces in zip(*own, strict=True):
            for piece in pieces:
                if self._is_void or self._round != round_:
                    return
                self._connection.send(Kind.CHUNK, round_, tensors.bytes_of(piece))

    def _update(self, said: Mapping[str, Any]) -> Stepped:
        if self._sums.total.nbytes > self._received * wire.CHUNK_BYTES:
            raise LostError("a part of the sums is lacking")
        own_rows = sum(each.rows for each in self._sums.units.values())
        agreed = said["loss"], said["norm"]
        work = Finish(sums=self._sums, total=(said["loss"], said["used"]), agreed=lambda *_: agreed)
        self._desk.do(work, self._wait_for_update)
        self._begin()
        return Stepped(
            members=said["members"], wire_s=said["wire_s"],
            share=own_rows / self._trainer.settings.batch,
        )  # fmt: skip
