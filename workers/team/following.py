"""A member that follows the leader: it computes the rows that it is given, hands over its sums, and
does the update that all do. Decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workers.messages import TeamOrders
from workers.team import tensors, wire
from workers.team.desk import Desk, LeftError, Stepped, Work
from workers.team.shares import Rows
from workers.team.wire import Frame, Kind, LostError


class Following:
    """One connection to a leader; one thread reads it and does what it asks for."""

    def __init__(self, desk: Desk, orders: TeamOrders) -> None:
        """Connect; `close` is to follow.

        Raises:
            LostError: There is no leader.
            LeftError: There are newer orders, or the computing thread is away.
        """
        self._desk, self._orders = desk, orders
        self._trainer, self._sums = desk.check(orders)
        self._unit: int | None = None
        """Of the rows that were computed last in this step; `None`: none were."""
        self._round = 0
        """Of the sums that were wanted last."""
        self._received = 0
        """Chunks of the total."""
        self._sender: threading.Thread | None = None
        self._connection = wire.connect(orders.address, orders.secret)

    def join(self, least_step: int) -> None:
        """Take the leader's state, which must not be before this step.

        Raises:
            LostError, LeftError: As above.
        """
        desk = self._desk
        self._connection.tell(
            Kind.HELLO, slot=desk.slot, generation=self._orders.generation,
            identity=desk.identity, version=desk.version, constant=desk.constant,
        )  # fmt: skip
        frame = self._connection.frame()
        said = frame.said
        if frame.kind is not Kind.WELCOME:
            raise LostError(str(said.get("reason")))
        if said["step"] < least_step:
            raise LostError(f"it is at step {said['step']}, and was at {least_step}")
        if said["state"] is not None:
            state = tensors.receive(self._connection, said["state"])
            desk.change(partial(tensors.load, state=state))
        # What the others have added up since, until this member has missed nothing.
        while not self._trainer.finished:
            frame = self._connection.frame()
            if frame.kind is Kind.VOID:
                self._begin(frame.round)
                return
            self._obey(frame)

    def train(self, stepped: Callable[[Stepped], None]) -> None:
        """Train to the end.

        Raises:
            LostError, LeftError: As above.
        """
        while not self._desk.check(self._orders)[0].finished:
            frame = self._connection.frame()
            if (step := self._obey(frame)) is not None:
                self._begin(frame.round)
                stepped(step)

    def _obey(self, frame: Frame) -> Stepped | None:
        """Do what a frame says; return the step that it ends, if any."""
        match frame.kind:
            case Kind.CHUNK:
                self._take_total(frame)
            case Kind.COMMIT:
                return self._update(frame.said)
            case Kind.ROWS:
                rows = Rows(**frame.said)
                ask = partial(self._ask, self._round, {"done": True})
                self._desk.give(Work(rows=rows, then=ask))
                self._unit = rows.unit
            case Kind.SUMS:
                self._hand_over(frame.round)
            case Kind.VOID:
                self._round = frame.round
                self._stop_sending()
                self._claim()
            case _:
                raise LostError(f"it sent {frame.kind.name}")
        return None

    def ping(self) -> None:
        """Tell the leader that this process lives, as long as it obeys and computes. Called every
        half second or so.
        """
        try:
            self._desk.check(self._orders)
            self._connection.ping()
        except (LostError, LeftError) as error:
            self._connection.close(str(error))

    def close(self) -> None:
        """Leave, and do nothing more for this leader."""
        self._connection.close("this member leaves")
        self._stop_sending()
        self._connection.release()
        self._desk.clear()

    def _begin(self, round_: int) -> None:
        self._sums.clear()
        self._round, self._unit = round_, None
        self._claim(version=self._desk.version)

    def _claim(self, **said: object) -> None:
        """Claim rows once the computing thread is there."""
        self._desk.give(Work(then=partial(self._ask, self._round, said)))

    def _ask(self, round_: int, said: Mapping[str, object], most_rows: int) -> None:
        try:
            self._connection.tell(Kind.CLAIM, round_, most=most_rows, **said)
        except LostError as error:
            self._connection.close(str(error))

    def _hand_over(self, round_: int) -> None:
        """Send the own sums; those of all come meanwhile."""
        self._desk.give(None)  # the claim of a computing thread that saves
        self._round, self._received = round_, 0
        if self._unit is not None and not self._trainer.settings.exact:
            self._sums.take(self._unit, in_total=True)
        self._connection.tell(Kind.SUMS, round_, units=self._sums.said())
        self._sender = threading.Thread(target=self._send, args=(round_,), name="team-sums")
        self._sender.start()

    def _send(self, round_: int) -> None:
        own = [tensors.pieces(each.flat) for each in self._sums.in_order]
        try:
            for pieces in zip(*own, strict=True):
                for piece in pieces:
                    if self._round != round_:
                        return
                    self._connection.send(Kind.CHUNK, round_, tensors.bytes_of(piece))
        except LostError as error:
            self._connection.close(str(error))

    def _stop_sending(self) -> None:
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    def _take_total(self, frame: Frame) -> None:
        size = wire.CHUNK_BYTES // self._sums.total.element_size()
        piece = self._sums.total[size * self._received : size * (self._received + 1)]
        self._connection.into(tensors.bytes_of(piece), frame)
        self._received += 1

    def _update(self, said: Mapping[str, Any]) -> Stepped:
        if self._sums.total.nbytes > self._received * wire.CHUNK_BYTES:
            raise LostError("a part of the sums is lacking")
        self._stop_sending()
        own_rows = sum(each.rows for each in self._sums.units.values())
        total, agreed = (said["loss"], said["used"]), (said["loss"], said["norm"])
        self._desk.update(total, lambda *_: agreed)
        self._received = 0
        return Stepped(
            members=said["members"], wire_s=said["wire_s"],
            share=own_rows / self._trainer.settings.batch,
        )  # fmt: skip
