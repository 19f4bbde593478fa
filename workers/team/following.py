"""A member that follows a leader: it computes the rows that it is given, sends its sums, and makes
the update of each step. Decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workers.messages import TeamOrders
from workers.team import tensors, wire
from workers.team.desk import Desk, RoleEndedError, StepSummary, Work
from workers.team.shares import Rows
from workers.team.wire import Frame, Kind, LostError


class Follower:
    """A connection to a leader; one thread reads frames from it and handles them."""

    def __init__(self, desk: Desk, orders: TeamOrders) -> None:
        """Connect to the leader; the caller must call `close` in the end.

        Raises:
            LostError: No leader answers.
            RoleEndedError: There are newer orders, or the computing thread is away.
        """
        self._desk, self._orders = desk, orders
        self._trainer, self._sums = desk.check(orders)
        self._unit: int | None = None
        """Unit of the rows computed last in this step; `None`: none were."""
        self._round = 0
        """Number of the leader's present round."""
        self._received = 0
        """Chunks of the total received in this step."""
        self._sender: threading.Thread | None = None
        self._connection = wire.connect(orders.address, orders.secret)

    def join(self, least_step: int) -> None:
        """Take over the leader's state; a leader that is before `least_step` is refused.

        Raises:
            LostError, RoleEndedError: As above.
        """
        desk = self._desk
        self._connection.send_json(
            Kind.HELLO, slot=desk.slot, generation=self._orders.generation,
            identity=desk.identity, version=desk.version, constant=desk.constant,
        )  # fmt: skip
        frame = self._connection.next_frame()
        message = frame.message
        if frame.kind is not Kind.WELCOME:
            raise LostError(str(message.get("reason")))
        if message["step"] < least_step:
            raise LostError(f"it is at step {message['step']}, and was at {least_step}")
        if message["state"] is not None:
            state = tensors.receive(self._connection, message["state"])
            desk.change(partial(tensors.load, state=state))
        # The steps that the others did since; VOID follows when this member has missed none.
        while not self._trainer.finished:
            frame = self._connection.next_frame()
            if frame.kind is Kind.VOID:
                self._begin_step(frame.round)
                return
            self._handle(frame)

    def train(self, on_step: Callable[[StepSummary], None]) -> None:
        """Train to the end; call `on_step` after each step.

        Raises:
            LostError, RoleEndedError: As above.
        """
        while not self._desk.check(self._orders)[0].finished:
            frame = self._connection.next_frame()
            if (step := self._handle(frame)) is not None:
                self._begin_step(frame.round)
                on_step(step)

    def _handle(self, frame: Frame) -> StepSummary | None:
        """Handle a frame; return the step that it ends, if any."""
        match frame.kind:
            case Kind.CHUNK:
                self._receive_total(frame)
            case Kind.COMMIT:
                return self._update(frame.message)
            case Kind.ROWS:
                rows = Rows(**frame.message)
                claim = partial(self._send_claim, self._round, {"done": True})
                self._desk.give(Work(rows=rows, then=claim))
                self._unit = rows.unit
            case Kind.SUMS:
                self._send_sums(frame.round)
            case Kind.VOID:
                self._round = frame.round
                self._stop_sending()
                self._claim()
            case _:
                raise LostError(f"it sent {frame.kind.name}")
        return None

    def ping(self) -> None:
        """Tell the leader that this process lives, or disconnect if it has newer orders or computes
        nothing. Called every half second or so.
        """
        try:
            self._desk.check(self._orders)
            self._connection.ping()
        except (LostError, RoleEndedError) as error:
            self._connection.close(str(error))

    def close(self) -> None:
        """Leave the leader, and do nothing more for it."""
        self._connection.close("this member leaves")
        self._stop_sending()
        self._connection.release()
        self._desk.clear()

    def _begin_step(self, round_: int) -> None:
        """Begin a step, and claim rows of it."""
        self._sums.clear()
        self._round, self._unit = round_, None
        self._claim(version=self._desk.version)

    def _claim(self, **message: object) -> None:
        """Claim rows once the computing thread is there."""
        self._desk.give(Work(then=partial(self._send_claim, self._round, message)))

    def _send_claim(self, round_: int, message: Mapping[str, object], most_rows: int) -> None:
        try:
            self._connection.send_json(Kind.CLAIM, round_, most=most_rows, **message)
        except LostError as error:
            self._connection.close(str(error))

    def _send_sums(self, round_: int) -> None:
        """Send this member's sums from another thread, while chunks of the total are received."""
        self._desk.give(None)  # withdraws the claim of a computing thread that still saves
        self._round, self._received = round_, 0
        if self._unit is not None and not self._trainer.settings.exact:
            self._sums.take(self._unit, in_total=True)
        self._connection.send_json(Kind.SUMS, round_, units=self._sums.describe())
        self._sender = threading.Thread(target=self._send_chunks, args=(round_,), name="team-sums")
        self._sender.start()

    def _send_chunks(self, round_: int) -> None:
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

    def _receive_total(self, frame: Frame) -> None:
        size = wire.CHUNK_BYTES // self._sums.total.element_size()
        piece = self._sums.total[size * self._received : size * (self._received + 1)]
        self._connection.receive_chunk(tensors.bytes_of(piece), frame)
        self._received += 1

    def _update(self, message: Mapping[str, Any]) -> StepSummary:
        """Make the update of a step, which the leader has decided."""
        if self._sums.total.nbytes > self._received * wire.CHUNK_BYTES:
            raise LostError("a part of the sums is missing")
        self._stop_sending()
        own_rows = sum(each.rows for each in self._sums.units.values())
        total, agreed = (message["loss"], message["used"]), (message["loss"], message["norm"])
        self._desk.update(total, lambda *_: agreed)
        self._received = 0
        return StepSummary(
            members=message["members"], wire_s=message["wire_s"],
            share=own_rows / self._trainer.settings.batch,
        )  # fmt: skip
