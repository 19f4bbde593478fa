"""The member that leads: it gives out the rows of each step, adds up the sums of all members in the
order of the members, and alone decides that a step is done.

If a helper is lost, other members compute its rows. A helper that joins has its state compared with
the leader's; if it differs, the helper gets a copy, and the totals of the steps done meanwhile,
while the team goes on. A leader without helpers goes on alone.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from workers.messages import TeamOrders
from workers.team import tensors, wire
from workers.team.desk import POLL_S, Desk, RoleEndedError, StepSummary, Work
from workers.team.place import AWAY_S
from workers.team.shares import Rows, Shares
from workers.team.tensors import OwnSums, Sums
from workers.team.wire import Connection, Kind, LostError
from workers.training.batches import tensors_in
from workers.training.checkpoints import HostCopy
from workers.training.host_memory import like

#: At least this much host memory may hold the totals that a joining helper has missed.
_KEPT_BYTES: Final = 1 << 30


@dataclass(eq=False)
class Helper:
    """Another member, as the leader knows it."""

    slot: str
    connection: Connection
    version: tuple[int, int] | None = None
    """Step and checksum that it reported; `None` once they were compared."""
    sums: list[Sums] | None = None
    """The sums that it offers in this round, without their numbers. These come in chunks, which the
    thread of `train` reads until this is `None` again.
    """
    missed: deque[tuple[Tensor, bytes]] = field(default_factory=deque)
    """Steps since the state that it was sent: the total, and the body of `COMMIT`."""
    max_missed: int = -1
    """Updates wait while it has missed more steps than this; -1: its state is being copied."""


_Source: TypeAlias = tuple[Sums, Helper | None]
"""Sums to be added to the total, and the helper that has them; `None`: this member."""


class Leader:
    """Leads one generation of a team."""

    def __init__(self, desk: Desk, orders: TeamOrders) -> None:
        """Prepare to lead; `train` begins.

        Raises:
            RoleEndedError: There are newer orders, or the computing thread is away.
        """
        self._desk, self.orders = desk, orders
        self._slot, self._members, self._event = desk.slot, desk.spec.members, desk.event
        settings = desk.check(orders)[0].settings
        self._batch, self._fixed = settings.batch, settings.exact
        self._helpers: dict[str, Helper] = {}
        self._catching_up: list[Helper] = []
        """Helpers that are being sent the state, and the steps since."""
        self._shares = Shares(settings.batch, self._members, fixed=settings.exact)
        self._shares.join(self._slot)
        self._claims: dict[str, int] = {}
        """Keyed by member: the most rows at once that it asks for."""
        self._is_giving_rows = False
        """Whether rows are given out now; else sums are being added up, and no helper joins."""
        self._round = 0
        self._chunk = torch.empty(wire.CHUNK_BYTES, dtype=torch.uint8)
        self._is_over = False

    def train(self, on_step: Callable[[StepSummary], None]) -> None:
        """Train to the end; call `on_step` after each step.

        Raises:
            RoleEndedError: There are newer orders, or this member cannot lead any more.
        """
        while not self._desk.check(self.orders)[0].finished:
            on_step(self._step())
        self._is_over = True
        for helper in self._present():
            helper.connection.end_sending()
        until_s = time.monotonic() + wire.SILENT_S
        with self._desk.changed:  # until the helpers have read that all is done
            while (self._helpers or self._catching_up) and time.monotonic() < until_s:
                self._desk.changed.wait(POLL_S)

    def close(self) -> None:
        """Drop all helpers and withdraw all work; a part that ends later gets no other."""
        with self._desk.changed:
            self._is_over, self._is_giving_rows = True, False
        for helper in [*self._present(), *self._catching_up]:
            self._drop(helper, "")
        self._desk.clear()

    def ping(self) -> None:
        """Tell all helpers that this process lives. Called every half second or so."""
        for helper in () if self._is_over else [*self._present(), *self._catching_up]:
            try:
                helper.connection.ping()
            except LostError as error:
                self._drop(helper, str(error))

    def serve(self, connection: Connection, message: Mapping[str, Any]) -> None:
        """Admit a helper that has proved the secret, and read its frames until it is gone.

        Raises:
            LookupError, TypeError, ValueError: A field of its message is missing or malformed.
        """
        try:
            step, checksum = message["version"]
            helper, why = Helper(message["slot"], connection), "it could not be read"
            try:
                self._admit(helper, (step, checksum), message["constant"])
                while True:
                    self._handle_frame(helper)
            except (LostError, RoleEndedError, LookupError, TypeError, ValueError) as error:
                why = str(error)
            finally:
                self._drop(helper, why)
        finally:
            connection.release()

    def _present(self) -> list[Helper]:
        with self._desk.changed:
            return sorted(self._helpers.values(), key=lambda each: self._members.index(each.slot))

    def _admit(self, helper: Helper, before: tuple[int, int], constant: int) -> None:
        """Bring a helper to the leader's state, and let it take part. `before`: step and checksum
        of its own state; `constant`: checksum of its untrained weights.

        The state is copied and sent while steps go on, and then the totals of these steps. Without
        memory for a copy, updates wait until the state is sent.
        """
        desk, connection = self._desk, helper.connection
        with desk.changed:
            self._await_giving(helper)
            trainer, sums = desk.check(self.orders)
            is_same, step = before == desk.version, desk.version[0]
            self._catching_up.append(helper)
        state = None if is_same else trainer.state()
        if state is not None:
            if constant == desk.constant:
                state["weights"] = tensors.split_weights(trainer)[0]
            kept_bytes = max(_KEPT_BYTES, sum(each.nbytes for each in tensors_in(state)))
            copy = HostCopy()
            with suppress(RuntimeError, OSError, OverflowError):
                copy.take(state)
                state = copy.state
                helper.max_missed = kept_bytes // max(1, sums.total.nbytes)
        forms = None if state is None else tensors.describe(state)
        connection.send_json(Kind.WELCOME, step=step, state=forms)
        if state is not None:
            tensors.send(connection, state)
        # For every two totals sent, it may miss one more step: so it catches up.
        allowed = len(helper.missed) + 0.5
        while not self._try_join(helper):
            helper.max_missed = max(0, math.floor(allowed))
            total, message = helper.missed[0]
            tensors.send(connection, total)
            connection.send(Kind.COMMIT, 0, message)
            allowed -= 0.5
            with desk.changed:
                helper.missed.popleft()
                desk.changed.notify_all()
        self._event(
            "team_joined",
            member=helper.slot,
            step=desk.version[0],
            from_step=before[0],
            state_sent=not is_same,
        )

    def _try_join(self, helper: Helper) -> bool:
        """Let a helper that has missed no step take part from this one; `False`: it missed some.

        Raises:
            LostError, RoleEndedError: It can no longer join.
        """
        with self._desk.changed:
            while not helper.missed and not self._is_giving_rows:
                self._await_giving(helper)
            if helper.missed:
                return False
            if helper.slot in self._helpers:
                self._drop(self._helpers[helper.slot], "it has connected again")
            self._catching_up.remove(helper)
            self._helpers[helper.slot] = helper
            self._shares.join(helper.slot)
            helper.connection.send_json(Kind.VOID, self._round)
            return True

    def _await_giving(self, helper: Helper) -> None:
        """Wait until rows are given out and the weights are those before the step: validation may
        have others in their place. Hold the lock.
        """
        while not (self._is_giving_rows and self._desk.is_computing):
            self._desk.changed.wait(POLL_S)
            helper.connection.ping()
            if self._is_over:
                raise LostError("the team is over")

    def _handle_frame(self, helper: Helper) -> None:
        """Read one frame of a helper, and handle it."""
        frame = helper.connection.next_frame()
        message = frame.message
        if frame.kind is Kind.CHUNK:  # of a cancelled round
            helper.connection.receive_chunk(memoryview(bytearray(frame.length)), frame)
            return
        with self._desk.changed:
            if frame.round != self._round or self._helpers.get(helper.slot) is not helper:
                return  # it was sent before the round began
            if frame.kind is Kind.CLAIM:
                if message.get("version"):
                    helper.version = (message["version"][0], message["version"][1])
                self._claimed(helper.slot, bool(message.get("done")), max(1, message["most"]))
            elif frame.kind is Kind.SUMS:
                helper.sums = [
                    Sums(unit, torch.empty(0), rows, loss, used)
                    for unit, rows, loss, used in message["units"]
                ]
                self._desk.changed.notify_all()
                while helper.sums is not None and not helper.connection.is_closed:
                    self._desk.changed.wait()

    def _claimed(self, slot: str, is_done: bool, most_rows: int) -> None:
        """Record that a member asks for rows, and whether it has computed those it had."""
        with self._desk.changed:
            if is_done:
                self._shares.done(slot, time.monotonic())
            self._claims[slot] = most_rows
            self._give_out()
            self._desk.changed.notify_all()

    def _give_out(self) -> None:
        """Answer claims as far as there are rows. Hold the lock."""
        for slot in sorted(self._claims, key=self._members.index) if self._is_giving_rows else ():
            helper = self._helpers.get(slot)
            if helper is not None and helper.version not in {None, self._desk.version}:
                self._event("team_differs", member=slot, step=helper.version[0])
                self._drop(helper, "its weights differ after the same updates")
                continue
            rows = self._shares.give(slot, self._claims[slot], time.monotonic())
            if rows is None:
                continue
            del self._claims[slot]
            if helper is None:
                self._compute(rows)
                continue
            helper.version = None
            with suppress(LostError):
                self._send(helper, Kind.ROWS, json.dumps(asdict(rows)).encode())

    def _compute(self, rows: Rows | None) -> None:
        """Let the computing thread of this member compute rows, or claim some once it is there."""
        then = partial(self._claimed, self._slot, rows is not None)
        self._desk.give(Work(rows=rows, then=then))

    def _drop(self, helper: Helper, why: str) -> None:
        """Drop a helper, and take back its rows for other members."""
        with self._desk.changed:
            if helper in self._catching_up:
                self._catching_up.remove(helper)
            if self._helpers.get(helper.slot) is helper:
                del self._helpers[helper.slot]
                self._claims.pop(helper.slot, None)
                rows = self._shares.leave(helper.slot)
                if not self._is_over:
                    self._event("team_lost", member=helper.slot, reason=why, rows_again=rows)
            helper.connection.close(why)
            self._desk.changed.notify_all()

    def _send(self, helper: Helper, kind: Kind, data: Any = b"") -> None:  # noqa: ANN401 - bytes
        """Send a frame of this round. On `LostError` the helper was dropped."""
        try:
            helper.connection.send(kind, self._round, data)
        except LostError as error:
            self._drop(helper, str(error))
            raise

    def _step(self) -> StepSummary:
        """Lead one step, up to its update."""
        desk, shares = self._desk, self._shares
        _, sums = desk.check(self.orders)
        sums.clear()
        with desk.changed:
            shares.begin(desk.version[0], time.monotonic())
            self._claims.pop(self._slot, None)
            self._compute(None)
        while True:
            helpers, began_s = self._await_rows(), time.monotonic()
            try:
                total = self._total_sums(helpers, sums)
                break
            except LostError:
                self._new_round()
                for helper in self._present():
                    with suppress(LostError):
                        self._send(helper, Kind.VOID)
                self._compute(None)
        wire_s = time.monotonic() - began_s if helpers else 0.0
        figures = {"used": total[1] if total else [], "members": 1 + len(helpers), "wire_s": wire_s}
        catching_up, missed = self._missed_by(sums)

        def commit(loss: float, norm: float) -> tuple[float, float]:
            """Send COMMIT to all helpers; from here on the step is decided."""
            message = json.dumps({"loss": loss, "norm": norm, **figures}).encode()
            for helper in helpers:
                with suppress(LostError):
                    self._send(helper, Kind.COMMIT, message)
            for helper in catching_up:
                helper.missed.append((missed, message))
            return loss, norm

        share = shares.rows_of(self._slot) / self._batch
        desk.update(total, commit)
        return StepSummary(members=1 + len(helpers), share=share, wire_s=wire_s)

    def _missed_by(self, sums: OwnSums) -> tuple[list[Helper], Tensor]:
        """Return the helpers that are catching up, and a copy of this step's total for them."""
        with self._desk.changed:
            catching_up = list(self._catching_up)
        if not catching_up:
            return catching_up, sums.total
        try:
            return catching_up, like(sums.total).copy_(sums.total)
        except (RuntimeError, OSError, OverflowError) as error:
            for helper in catching_up:
                self._drop(helper, f"no host memory to keep what it misses: {error}")
        return [], sums.total

    def _await_rows(self) -> list[Helper]:
        """Give out rows until all are computed and the state may change; return the helpers then
        present: rows of one that is lost later are lacking.
        """
        with self._desk.changed:
            self._is_giving_rows = True
            while not self._shares.is_complete or any(
                len(each.missed) > each.max_missed for each in self._catching_up
            ):
                for slot in self._shares.late(wire.SILENT_S, time.monotonic()):
                    if slot in self._helpers:
                        self._drop(self._helpers[slot], "its rows take far longer than before")
                self._give_out()
                self._desk.wait_for_news(self.orders)
            self._is_giving_rows = False
            return self._present()

    def _total_sums(
        self, helpers: Sequence[Helper], sums: OwnSums
    ) -> tuple[float, list[bool]] | None:
        """Compute the total here and at all helpers; return the loss, and which parameters have a
        gradient. `None`: no other member has sums.

        Raises:
            LostError: A helper was lost and dropped; the total is meaningless.
        """
        if not helpers and not self._fixed and not self._catching_up:
            self._check_rows(self._desk.check(self.orders)[0].done_rows)
            return None
        self._new_round()
        for helper in helpers:
            self._send(helper, Kind.SUMS)
        if not self._fixed and self._shares.rows_of(self._slot):
            sums.take(self._members.index(self._slot), in_total=True)
        sources = self._sources(helpers, sums)
        self._check_rows(sum(each.rows for each, _ in sources))
        for piece in self._chunks_of_total(sources, sums.total):
            for helper in helpers:
                self._send(helper, Kind.CHUNK, tensors.bytes_of(piece))
        self._new_round()
        used = [any(each) for each in zip(*(each.used for each, _ in sources), strict=True)]
        return sum(each.loss for each, _ in sources), used

    def _new_round(self) -> None:
        """Begin a new round: drop the offered sums and claims of all helpers."""
        with self._desk.changed:
            self._round += 1
            self._claims.clear()
            for helper in self._helpers.values():
                helper.sums = None
            self._desk.changed.notify_all()

    def _sources(self, helpers: Sequence[Helper], sums: OwnSums) -> list[_Source]:
        """Return all sums in the order of adding: this member's first, or by unit with `exact`."""
        sources: list[_Source] = [(each, None) for each in sums.units.values()]
        until_s = time.monotonic() + AWAY_S
        with self._desk.changed:
            for helper in helpers:
                while helper.sums is None:
                    if helper.connection.is_closed or time.monotonic() > until_s:
                        self._drop(helper, "it sends no sums")
                        raise LostError(helper.slot)
                    self._desk.wait_for_news(self.orders)
                sources += [(each, helper) for each in helper.sums]
        return sorted(sources, key=lambda each: each[0].unit if self._fixed else 0)

    def _chunks_of_total(self, sources: Sequence[_Source], total: Tensor) -> Iterator[Tensor]:
        """Add up all sums in order, and yield each chunk of the total."""
        own = {each.unit: tensors.pieces(each.flat) for each, _ in sources}
        for piece in tensors.pieces(total):
            place = piece  # the first one is received in place
            for sums, helper in sources:
                part = self._received(helper, place) if helper else next(own[sums.unit])
                if place is not piece:
                    piece.add_(part)
                elif part.data_ptr() != piece.data_ptr():
                    piece.copy_(part)
                place = self._chunk[: piece.nbytes].view(piece.dtype)
            yield piece

    def _received(self, helper: Helper, place: Tensor) -> Tensor:
        """Receive a helper's next chunk; skip any claim that its computing thread sent before."""
        try:
            while (frame := helper.connection.next_frame()).kind is Kind.CLAIM:
                pass
            helper.connection.receive_chunk(tensors.bytes_of(place), frame)
        except LostError as error:
            self._drop(helper, str(error))
            raise
        return place

    def _check_rows(self, rows: int) -> None:
        """Refuse the step unless every row of the batch was summed exactly once."""
        if rows != self._batch:
            self._event("team_rows", rows=rows, batch=self._batch)
            raise RoleEndedError(f"{rows} rows were summed of a batch of {self._batch}")
