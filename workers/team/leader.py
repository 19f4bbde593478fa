"""The member that leads: it gives out the rows of each step, adds the sums up in the order of the
members, and alone decides that a step is done.

A helper that is lost costs its rows, which others compute. Who comes back has its state checked; if
it differs it gets a copy of the leader's, and what was added up in the steps meanwhile, beside the
steps. Alone, the leader goes on alone.
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
from workers.team.desk import LOOK_S, Desk, LeftError, Stepped, Work
from workers.team.place import AWAY_S
from workers.team.shares import Rows, Shares
from workers.team.tensors import OwnSums, Sums
from workers.team.wire import Connection, Kind, LostError
from workers.training.batches import tensors_in
from workers.training.checkpoints import HostCopy
from workers.training.host_memory import like

#: Of host memory for the totals that a member misses while the state goes to it, at the least.
_KEPT_BYTES: Final = 1 << 30


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
    missed: deque[tuple[Tensor, bytes]] = field(default_factory=deque)
    """Of the steps since the state that it gets: the total, and what `COMMIT` says."""
    most_missed: int = -1
    """Where it has missed more steps, the next update waits for it; -1: its state is being read."""


_Source: TypeAlias = tuple[Sums, Helper | None]
"""Some rows that are added to the total; of no helper: they were computed here."""


class Leader:
    """One generation of a team, at its leader."""

    def __init__(self, desk: Desk, orders: TeamOrders) -> None:
        """Lead as soon as `train` is called.

        Raises:
            LeftError: There are newer orders, or the computing thread is away.
        """
        self._desk, self.orders = desk, orders
        self._slot, self._members, self._tell = desk.slot, desk.spec.members, desk.event
        settings = desk.check(orders)[0].settings
        self._batch, self._fixed = settings.batch, settings.exact
        self._helpers: dict[str, Helper] = {}
        self._behind: list[Helper] = []
        """Those that get the state, and the steps since."""
        self._shares = Shares(settings.batch, self._members, fixed=settings.exact)
        self._shares.join(self._slot)
        self._claims: dict[str, int] = {}
        """The most rows that each member wants at once, of those that want some."""
        self._gives = False
        """Whether rows of a step are given out; else sums are added up, and no member joins."""
        self._round = 0
        self._chunk = torch.empty(wire.CHUNK_BYTES, dtype=torch.uint8)
        self._is_over = False

    def train(self, stepped: Callable[[Stepped], None]) -> None:
        """Train to the end.

        Raises:
            LeftError: Another one is to lead, or this one cannot.
        """
        while not self._desk.check(self.orders)[0].finished:
            stepped(self._one_step())
        self._is_over = True
        for helper in self._present():
            helper.connection.end_sending()
        until_s = time.monotonic() + wire.SILENT_S
        with self._desk.changed:  # until they have read that it is over
            while (self._helpers or self._behind) and time.monotonic() < until_s:
                self._desk.changed.wait(LOOK_S)

    def close(self) -> None:
        """Have no helper, and nothing to compute, also where a part under way ends later."""
        with self._desk.changed:
            self._is_over, self._gives = True, False
        for helper in [*self._present(), *self._behind]:
            self._drop(helper, "")
        self._desk.clear()

    def ping(self) -> None:
        """Tell the helpers that this process lives. Called every half second or so."""
        for helper in () if self._is_over else [*self._present(), *self._behind]:
            try:
                helper.connection.ping()
            except LostError as error:
                self._drop(helper, str(error))

    def serve(self, connection: Connection, said: Mapping[str, Any]) -> None:
        """Take in a member that has proved itself, and hear what it says until it is gone.

        Raises:
            LookupError, TypeError, ValueError: It does not say what it has.
        """
        try:
            step, checksum = said["version"]
            helper, why = Helper(said["slot"], connection), "it is not heard"
            try:
                self._admit(helper, (step, checksum), said["constant"])
                while True:
                    self._hear(helper)
            except (LostError, LeftError, LookupError, TypeError, ValueError) as error:
                why = str(error)
            finally:
                self._drop(helper, why)
        finally:
            connection.release()

    def _present(self) -> list[Helper]:
        with self._desk.changed:
            return sorted(self._helpers.values(), key=lambda each: self._members.index(each.slot))

    def _admit(self, helper: Helper, before: tuple[int, int], constant: int) -> None:
        """Have a helper take part from now on, with the leader's state; `before`: its own one, and
        `constant` the checksum of what is not trained.

        A copy of the state is sent beside the steps, and then the totals of these steps. Without
        memory for the copy the update of the step waits until the state is sent.
        """
        desk, connection = self._desk, helper.connection
        with desk.changed:
            self._await_rows_of(helper)
            trainer, sums = desk.check(self.orders)
            is_same, step = before == desk.version, desk.version[0]
            self._behind.append(helper)
        state = None if is_same else trainer.state()
        if state is not None:
            if constant == desk.constant:
                state["weights"] = tensors.split_weights(trainer)[0]
            kept_bytes = max(_KEPT_BYTES, sum(each.nbytes for each in tensors_in(state)))
            copy = HostCopy()
            with suppress(RuntimeError, OSError, OverflowError):
                copy.take(state)
                state = copy.state
                helper.most_missed = kept_bytes // max(1, sums.total.nbytes)
        forms = None if state is None else tensors.described(state)
        connection.tell(Kind.WELCOME, step=step, state=forms)
        if state is not None:
            tensors.send(connection, state)
        # For two steps that are sent it may miss another one: so it comes to the last one.
        allowed = len(helper.missed) + 0.5
        while not self._has_joined(helper):
            helper.most_missed = max(0, math.floor(allowed))
            total, said = helper.missed[0]
            tensors.send(connection, total)
            connection.send(Kind.COMMIT, 0, said)
            allowed -= 0.5
            with desk.changed:
                helper.missed.popleft()
                desk.changed.notify_all()
        self._tell(
            "team_joined",
            member=helper.slot,
            step=desk.version[0],
            from_step=before[0],
            state_sent=not is_same,
        )

    def _has_joined(self, helper: Helper) -> bool:
        """Have a helper that has missed no step take part in this one; `False`: it has missed some.

        Raises:
            LostError, LeftError: It cannot join any more.
        """
        with self._desk.changed:
            while not helper.missed and not self._gives:
                self._await_rows_of(helper)
            if helper.missed:
                return False
            if helper.slot in self._helpers:
                self._drop(self._helpers[helper.slot], "it came again")
            self._behind.remove(helper)
            self._helpers[helper.slot] = helper
            self._shares.join(helper.slot)
            helper.connection.tell(Kind.VOID, self._round)
            return True

    def _await_rows_of(self, helper: Helper) -> None:
        """Wait until rows of a step are given out, and the state is that before it. With the lock;
        while this process validates, other weights may stand in the place of its own.
        """
        while not (self._gives and self._desk.is_computing):
            self._desk.changed.wait(LOOK_S)
            helper.connection.ping()
            if self._is_over:
                raise LostError("the team is over")

    def _hear(self, helper: Helper) -> None:
        """Take in one frame of a helper."""
        frame = helper.connection.frame()
        said = frame.said
        if frame.kind is Kind.CHUNK:  # of a round that was called off
            helper.connection.into(memoryview(bytearray(frame.length)), frame)
            return
        with self._desk.changed:
            if frame.round != self._round or self._helpers.get(helper.slot) is not helper:
                return  # it was under way when the round began
            if frame.kind is Kind.CLAIM:
                if said.get("version"):
                    helper.version = (said["version"][0], said["version"][1])
                self._claimed(helper.slot, bool(said.get("done")), max(1, said["most"]))
            elif frame.kind is Kind.SUMS:
                helper.sums = [
                    Sums(unit, torch.empty(0), rows, loss, used)
                    for unit, rows, loss, used in said["units"]
                ]
                self._desk.changed.notify_all()
                while helper.sums is not None and not helper.connection.is_closed:
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
        self._desk.give(Work(rows=rows, then=then))

    def _drop(self, helper: Helper, why: str) -> None:
        """Go on without a helper; its rows are computed by others."""
        with self._desk.changed:
            if helper in self._behind:
                self._behind.remove(helper)
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
            self._compute(None)
        while True:
            helpers, began_s = self._await_rows(), time.monotonic()
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
        behind, missed = self._missed_by(sums)

        def commit(loss: float, norm: float) -> tuple[float, float]:
            """Tell all that the step is done, and by how much; from here on it is."""
            said = json.dumps({"loss": loss, "norm": norm, **told}).encode()
            for helper in helpers:
                with suppress(LostError):
                    self._send(helper, Kind.COMMIT, said)
            for helper in behind:
                helper.missed.append((missed, said))
            return loss, norm

        share = shares.rows_of(self._slot) / self._batch
        desk.update(total, commit)
        return Stepped(members=1 + len(helpers), share=share, wire_s=wire_s)

    def _missed_by(self, sums: OwnSums) -> tuple[list[Helper], Tensor]:
        """Return who gets the total of this step later, and a copy of it."""
        with self._desk.changed:
            behind = list(self._behind)
        if not behind:
            return behind, sums.total
        try:
            return behind, like(sums.total).copy_(sums.total)
        except (RuntimeError, OSError, OverflowError) as error:
            for helper in behind:
                self._drop(helper, f"no host memory to keep what it misses: {error}")
        return [], sums.total

    def _await_rows(self) -> list[Helper]:
        """Give out rows until all are computed, and the state may change; return who is here then:
        the rows of one that is lost later are lacking.
        """
        with self._desk.changed:
            self._gives = True
            while not self._shares.is_complete or any(
                len(each.missed) > each.most_missed for each in self._behind
            ):
                for slot in self._shares.late(wire.SILENT_S, time.monotonic()):
                    if slot in self._helpers:
                        self._drop(self._helpers[slot], "its rows take far longer than before")
                self._give_out()
                self._desk.wait_for_news(self.orders)
            self._gives = False
            return self._present()

    def _summed(self, helpers: Sequence[Helper], sums: OwnSums) -> tuple[float, list[bool]] | None:
        """Add all sums up, here and at the helpers; return the loss, and which parameters have a
        gradient. `None`: no other has a sum.

        Raises:
            LostError: A helper was lost, and dropped; the total means nothing.
        """
        if not helpers and not self._fixed and not self._behind:
            self._refuse_rows(self._desk.check(self.orders)[0].done_rows)
            return None
        self._new_round()
        for helper in helpers:
            self._send(helper, Kind.SUMS)
        if not self._fixed and self._shares.rows_of(self._slot):
            sums.take(self._members.index(self._slot), in_total=True)
        sources = self._sources(helpers, sums)
        self._refuse_rows(sum(each.rows for each, _ in sources))
        for piece in self._added(sources, sums.total):
            for helper in helpers:
                self._send(helper, Kind.CHUNK, tensors.bytes_of(piece))
        self._new_round()
        used = [any(each) for each in zip(*(each.used for each, _ in sources), strict=True)]
        return sum(each.loss for each, _ in sources), used

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
        sources: list[_Source] = [(each, None) for each in sums.units.values()]
        until_s = time.monotonic() + AWAY_S
        with self._desk.changed:
            for helper in helpers:
                while helper.sums is None:
                    if helper.connection.is_closed or time.monotonic() > until_s:
                        self._drop(helper, "it hands over no sums")
                        raise LostError(helper.slot)
                    self._desk.wait_for_news(self.orders)
                sources += [(each, helper) for each in helper.sums]
        return sorted(sources, key=lambda each: each[0].unit if self._fixed else 0)

    def _added(self, sources: Sequence[_Source], total: Tensor) -> Iterator[Tensor]:
        """Add sums up in their order, and yield each chunk of the total."""
        own = {each.unit: tensors.pieces(each.flat) for each, _ in sources}
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
        """Receive a helper's next chunk, after any claim that its computing thread still made."""
        try:
            while (frame := helper.connection.frame()).kind is Kind.CLAIM:
                pass
            helper.connection.into(tensors.bytes_of(place), frame)
        except LostError as error:
            self._drop(helper, str(error))
            raise
        return place

    def _refuse_rows(self, rows: int) -> None:
        """Compare what was summed with the batch: nothing may be lacking, or counted twice."""
        if rows != self._batch:
            self._tell("team_rows", rows=rows, batch=self._batch)
            raise LeftError(f"{rows} rows were summed of a batch of {self._batch}")
