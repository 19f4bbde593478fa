"""The member that leads: it gives out the rows of each step, adds the sums up in the order of the
members, and alone decides that a step is done.

A helper that is lost costs its rows, which others compute; who comes back has its state checked,
and gets the leader's in full if it differs. Alone, it goes on alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.messages import TeamOrders
from workers.team import tensors, wire
from workers.team.desk import AWAY_S, LOOK_S, Compute, Desk, LeftError, update_with
from workers.team.shares import Rows, Shares
from workers.team.tensors import OwnSums, Sums
from workers.team.wire import Connection, Kind, LostError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What a step was, for the table."""

    members: int
    share: float
    """Of the rows, those that this member computed."""
    wire_s: float


@dataclass(eq=False)
class Helper:
    """Another member, as the leader sees it."""

    slot: str
    connection: Connection
    version: tuple[int, int] | None = None
    """Its step and checksum, until they were compared; then `None`."""
    sums: list[Sums] | None = None
    """What it has to add in this round; the numbers come in chunks, which the leader's own thread
    reads until this is `None` again."""


class _Source(NamedTuple):
    """Some rows that are added to the total."""

    sums: Sums
    helper: Helper | None
    """`None`: they were computed here."""


class Leader:
    """One generation of a team, at its leader."""

    def __init__(
        self,
        desk: Desk,
        slot: str,
        members: Sequence[str],
        orders: TeamOrders,
        identity: str,
        tell: Callable[..., None],
    ) -> None:
        self.orders = orders
        self._desk, self._slot, self._members = desk, slot, list(members)
        self._identity, self._tell = identity, tell
        settings = desk.check(orders)[0].settings
        self._batch, self._fixed = settings.batch, settings.exact
        self._helpers: dict[str, Helper] = {}
        self._shares = Shares(settings.batch, members, fixed=settings.exact)
        self._shares.join(slot)
        self._claims: dict[str, int] = {}
        """The most rows that each member wants at once, of those that want some."""
        self._is_anew = True
        """Whether no row of this step was given out here."""
        self._gives = False
        """Whether rows of a step are given out; else sums are added up, and no member joins."""
        self._joining = 0
        """Those that receive the state: it must not change meanwhile."""
        self._round = 0
        self._chunk = torch.empty(wire.CHUNK_BYTES, dtype=torch.uint8)
        self._is_over = False

    def lead(self, stepped: Callable[[Stepped], None]) -> None:
        """Train to the end.

        Raises:
            LeftError: Another one is to lead, or this one cannot.
        """
        try:
            while not self._desk.check(self.orders)[0].finished:
                stepped(self._one_step())
            self._is_over = True
            for helper in self._present():
                helper.connection.end_sending()
            until_s = time.monotonic() + wire.SILENT_S
            with self._desk.changed:  # until they have read that it is over
                while self._helpers and time.monotonic() < until_s:
                    self._desk.changed.wait(LOOK_S)
        finally:
            self._is_over = True
            for helper in self._present():
                self._drop(helper, "")

    def ping(self) -> None:
        """Tell the helpers that this process lives. Called every half second or so."""
        for helper in () if self._is_over else self._present():
            try:
                helper.connection.ping()
            except LostError as error:
                self._drop(helper, str(error))

    def serve(self, connection: Connection) -> None:
        """Take in a member that has proved itself, and hear what it says until it is gone.

        Raises:
            LostError: It is none.
        """
        try:
            helper, constant = self._hello(connection)
            try:
                self._admit(helper, constant)
                while True:
                    self._hear(helper)
            except (LostError, LeftError, LookupError, TypeError, ValueError) as error:
                self._drop(helper, str(error))
        finally:
            connection.release()

    def _present(self) -> list[Helper]:
        with self._desk.changed:
            return sorted(self._helpers.values(), key=lambda each: self._members.index(each.slot))

    def _hello(self, connection: Connection) -> tuple[Helper, int]:
        others = set(self._members) - {self._slot}
        said = wire.greeting(connection, self.orders.generation, others, self._identity)
        step, checksum = said["version"]
        return Helper(said["slot"], connection, (step, checksum)), said["constant"]

    def _admit(self, helper: Helper, constant: int) -> None:
        """Have a helper take part from now on, with the leader's state."""
        desk = self._desk
        with desk.changed:
            # While this process validates, other weights may stand in the place of its own.
            while not (self._gives and desk.is_here):
                desk.changed.wait(LOOK_S)
                helper.connection.ping()
                if self._is_over:
                    raise LostError("the team is over")
            trainer, _ = desk.check(self.orders)
            before, step = helper.version, desk.version[0]
            is_same, helper.version = before == desk.version, None
            self._joining += 1
        try:
            state = None if is_same else trainer.state()
            if state is not None and constant == desk.constant:
                state["weights"] = tensors.split_weights(trainer)[0]
            forms = None if state is None else tensors.described(state)
            helper.connection.tell(Kind.WELCOME, self._round, step=step, state=forms)
            if state is not None:
                tensors.send(helper.connection, state)
            with desk.changed:
                if helper.slot in self._helpers:
                    self._drop(self._helpers[helper.slot], "it came again")
                self._helpers[helper.slot] = helper
                self._shares.join(helper.slot)
        finally:
            with desk.changed:
                self._joining -= 1
                desk.changed.notify_all()
        from_step = before[0] if before else None
        self._tell(
            "team_joined",
            member=helper.slot,
            step=step,
            from_step=from_step,
            state_sent=not is_same,
        )

    def _hear(self, helper: Helper) -> None:
        """Take in one frame of a helper."""
        connection = helper.connection
        head = connection.head()
        if head.kind is Kind.CHUNK:  # of a round that was called off
            connection.skip(head)
            return
        said = connection.said(head)
        with self._desk.changed:
            if head.round != self._round or self._helpers.get(helper.slot) is not helper:
                return  # it was under way when the round began
            if head.kind is Kind.CLAIM:
                if said.get("version"):
                    helper.version = (said["version"][0], said["version"][1])
                self._claimed(helper.slot, bool(said.get("done")), max(1, said["most"]))
            elif head.kind is Kind.SUMS:
                helper.sums = [
                    Sums(unit, torch.empty(0), rows, loss, used)
                    for unit, rows, loss, used in said["units"]
                ]
                self._desk.changed.notify_all()
                while helper.sums is not None and not connection.is_closed:
                    self._desk.changed.wait()

    def _claimed(self, slot: str, is_done: bool, most_rows: int) -> None:
        """Take note that a member wants rows, and whether it has computed what it was given."""
        with self._desk.changed:
            if is_done:
                self._shares.done(slot, time.monotonic())
            self._claims[slot] = most_rows
            self._give_out()
            self._desk.changed.notify_all()

    def _give_out(self) -> None:
        """Answer claims, as far as there are rows. With the lock."""
        for slot in sorted(self._claims, key=self._members.index) if self._gives else ():
            helper = self._helpers.get(slot)
            if helper is not None and helper.version not in {None, self._desk.version}:
                self._tell("team_differs", member=slot, step=helper.version[0])
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
        """Have rows computed here, or claim some once the computing thread is there."""
        then = partial(self._claimed, self._slot, rows is not None)
        keep = self._desk.sums if self._fixed else None
        self._desk.give(Compute(rows=rows, then=then, anew=self._is_anew, keep=keep))
        self._is_anew = self._is_anew and rows is None

    def _drop(self, helper: Helper, why: str) -> None:
        """Go on without a helper; its rows are computed by others."""
        with self._desk.changed:
            if self._helpers.get(helper.slot) is helper:
                del self._helpers[helper.slot]
                self._claims.pop(helper.slot, None)
                rows = self._shares.leave(helper.slot)
                if not self._is_over:
                    self._tell("team_lost", member=helper.slot, reason=why, rows_again=rows)
            helper.connection.close(why)
            self._desk.changed.notify_all()

    def _send(self, helper: Helper, kind: Kind, data: Any = b"") -> None:  # noqa: ANN401 - bytes
        """Send a frame of this round; `LostError`: the helper is gone, and was dropped."""
        try:
            helper.connection.send(kind, self._round, data)
        except LostError as error:
            self._drop(helper, str(error))
            raise

    def _one_step(self) -> Stepped:
        desk, shares = self._desk, self._shares
        _, sums = desk.check(self.orders)
        sums.clear()
        with desk.changed:
            shares.begin(desk.version[0], time.monotonic())
            self._claims.pop(self._slot, None)
            self._is_anew = True
            self._compute(None)
        while True:
            self._await_rows()
            helpers, began_s = self._present(), time.monotonic()
            try:
                total = self._summed(helpers, sums)
                break
            except LostError:
                self._new_round()
                for helper in self._present():
                    with suppress(LostError):
                        self._send(helper, Kind.VOID)
                self._compute(None)
        wire_s = time.monotonic() - began_s if helpers else 0.0
        told = {"used": total[1] if total else [], "members": 1 + len(helpers), "wire_s": wire_s}

        def commit(loss: float, norm: float) -> tuple[float, float]:
            """Tell all that the step is done, and by how much; from here on it is."""
            for helper in helpers:
                with suppress(LostError):
                    said = json.dumps({"loss": loss, "norm": norm, **told})
                    self._send(helper, Kind.COMMIT, said.encode())
            return loss, norm

        share = shares.rows_of(self._slot) / self._batch
        desk.do(update_with(sums, total, commit))
        return Stepped(members=1 + len(helpers), share=share, wire_s=wire_s)

    def _await_rows(self) -> None:
        """Give out rows until all are computed."""
        with self._desk.changed:
            self._gives = True
            while self._joining or not self._shares.is_complete:
                for slot in self._shares.late(wire.SILENT_S, time.monotonic()):
                    if slot in self._helpers:
                        self._drop(self._helpers[slot], "its rows take far longer than before")
                self._give_out()
                self._desk.wait_for_news(self.orders)
            self._gives = False

    def _summed(self, helpers: Sequence[Helper], sums: OwnSums) -> tuple[float, list[bool]] | None:
        """Add all sums up, here and at the helpers; return the loss, and which parameters have a
        gradient. `None`: no other has a sum.

        Raises:
            LostError: A helper was lost, and dropped; the total means nothing.
        """
        if not helpers and not self._fixed:
            self._refuse_rows(self._desk.check(self.orders)[0].done_rows)
            return None
        self._new_round()
        for helper in helpers:
            self._send(helper, Kind.SUMS)
        if not self._fixed and self._shares.rows_of(self._slot):
            sums.take(self._members.index(self._slot), in_total=True)
        sources = self._sources(helpers, sums)
        self._refuse_rows(sum(each.sums.rows for each in sources))
        for piece in self._added(sources, sums.total):
            for helper in helpers:
                self._send(helper, Kind.CHUNK, tensors.bytes_of(piece))
        with self._desk.changed:
            for helper in helpers:
                helper.sums = None
            self._desk.changed.notify_all()
        used = [any(each) for each in zip(*(each.sums.used for each in sources), strict=True)]
        return sum(each.sums.loss for each in sources), used

    def _new_round(self) -> None:
        """Forget what helpers have said of sums, and want."""
        with self._desk.changed:
            self._round += 1
            self._claims.clear()
            for helper in self._helpers.values():
                helper.sums = None
            self._desk.changed.notify_all()

    def _sources(self, helpers: Sequence[Helper], sums: OwnSums) -> list[_Source]:
        """Return all that is to be added, in its order: the own ones first, unless it is fixed."""
        sources = [_Source(each, None) for each in sums.units.values()]
        until_s = time.monotonic() + AWAY_S
        with self._desk.changed:
            for helper in helpers:
                while helper.sums is None:
                    if helper.connection.is_closed or time.monotonic() > until_s:
                        self._drop(helper, "it hands over no sums")
                        raise LostError(helper.slot)
                    self._desk.wait_for_news(self.orders)
                sources += [_Source(each, helper) for each in helper.sums]
        return sorted(sources, key=lambda each: each.sums.unit if self._fixed else 0)

    def _added(self, sources: Sequence[_Source], total: Tensor) -> Iterator[Tensor]:
        """Add sums up in their order, and yield each chunk of the total."""
        own = {each.sums.unit: tensors.pieces(each.sums.flat) for each in sources}
        for piece in tensors.pieces(total):
            place = piece  # the first of them is not copied
            for sums, helper in sources:
                part = self._received(helper, place) if helper else next(own[sums.unit])
                if place is not piece:
                    piece.add_(part)
                elif part.data_ptr() != piece.data_ptr():
                    piece.copy_(part)
                place = self._chunk[: piece.nbytes].view(piece.dtype)
            yield piece

    def _received(self, helper: Helper, place: Tensor) -> Tensor:
        """Receive a helper's next chunk."""
        try:
            helper.connection.into(tensors.bytes_of(place), helper.connection.head())
        except LostError as error:
            self._drop(helper, str(error))
            raise
        return place

    def _refuse_rows(self, rows: int) -> None:
        """Compare what was summed with the batch: nothing may be lacking, or counted twice."""
        if rows != self._batch:
            self._tell("team_rows", rows=rows, batch=self._batch)
            raise LeftError(f"{rows} rows were summed of a batch of {self._batch}")
