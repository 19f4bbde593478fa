"""The member that leads: it gives out the rows of each step, adds the sums up in the order of the
members, and alone decides that a step is done.

A helper that is lost costs its rows, which others compute; who comes back has its state checked,
and gets the leader's in full if it differs. Alone, it goes on alone.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from workers.messages import TeamOrders
from workers.team import tensors, wire
from workers.team.desk import AWAY_S, ComputeRows, Desk, Finish, LeftError
from workers.team.shares import Shares
from workers.team.tensors import OwnSums, Sums
from workers.team.wire import Connection, Head, Kind, LostError

#: Chunks of a helper that wait to be added.
_AHEAD: Final = 4

#: How long the leader sleeps where nothing wakes it up.
_LOOK_S: Final = 0.05


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
    constant: int
    version: tuple[int, int] | None
    """Its step and checksum, until they were compared; then `None`."""
    claims: int | None = None
    """The most rows that it wants at once; `None`: it wants none."""
    sums: dict[int, Sums] | None = None
    """What it has to add in this round, by unit; the numbers come in chunks."""
    free: queue.SimpleQueue[Tensor] = field(default_factory=queue.SimpleQueue)
    full: queue.SimpleQueue[tuple[int, Tensor]] = field(default_factory=queue.SimpleQueue)
    """Chunks, each with its round."""


class _Source(NamedTuple):
    """Some rows that are added to the total."""

    unit: int
    helper: Helper | None
    """`None`: they were computed here."""
    sums: Sums


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
        self._gives = False
        """Whether rows of a step are given out; else sums are added up, and no member joins."""
        self._joining = 0
        """Those that receive the state: it must not change meanwhile."""
        self._round = 0
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
                    self._desk.changed.wait(_LOOK_S)
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
            helper = self._hello(connection)
            try:
                self._admit(helper)
                while True:
                    self._hear(helper, connection.head())
            except (LostError, LeftError, LookupError, TypeError, ValueError) as error:
                self._drop(helper, str(error))
        finally:
            connection.release()

    def _present(self) -> list[Helper]:
        with self._desk.changed:
            return sorted(self._helpers.values(), key=lambda each: self._members.index(each.slot))

    def _hello(self, connection: Connection) -> Helper:
        head = connection.head()
        said = connection.said(head) if head.kind is Kind.HELLO else {}
        reason = None
        if said.get("generation") != self.orders.generation:
            reason = f"it obeys generation {said.get('generation')}, and this is another"
        elif said.get("slot") not in set(self._members) - {self._slot}:
            reason = f"{said.get('slot')} is no other member of this team"
        elif said.get("identity") != self._identity:
            reason = (
                "it trains something else: its settings, data or model differ from the leader's"
            )
        if reason is not None:
            connection.tell(Kind.REFUSED, reason=reason)
            raise LostError(reason)
        step, checksum = said["version"]
        helper = Helper(said["slot"], connection, said["constant"], (step, checksum))
        for _ in range(_AHEAD):
            helper.free.put(torch.empty(wire.CHUNK_BYTES, dtype=torch.uint8))
        return helper

    def _admit(self, helper: Helper) -> None:
        """Have a helper take part from now on, with the leader's state."""
        desk = self._desk
        with desk.changed:
            # While this process validates, other weights may stand in the place of its own.
            while not (self._gives and desk.is_here):
                desk.changed.wait(_LOOK_S)
                helper.connection.ping()
                if self._is_over:
                    raise LostError("the team is over")
            trainer, _ = desk.check(self.orders)
            step, is_same = desk.version[0], helper.version == desk.version
            from_step = helper.version[0] if helper.version else None
            helper.version = None
            self._joining += 1
        try:
            state = None if is_same else trainer.state()
            if state is not None and helper.constant == desk.constant:
                state["weights"] = tensors.split_weights(trainer)[0]
            forms = None if state is None else tensors.described(state)
            helper.connection.tell(Kind.WELCOME, self._round, step=step, state=forms)
            if state is not None:
                tensors.send(helper.connection, state)
            with desk.changed:
                if (before := self._helpers.get(helper.slot)) is not helper:
                    if before is not None:
                        self._drop(before, "it came again")
                    self._helpers[helper.slot] = helper
                    self._shares.join(helper.slot)
        finally:
            with desk.changed:
                self._joining -= 1
                desk.changed.notify_all()
        self._tell(
            "team_joined",
            member=helper.slot,
            step=step,
            from_step=from_step,
            state_sent=not is_same,
        )

    def _hear(self, helper: Helper, head: Head) -> None:
        """Take in one frame of a helper."""
        if head.kind is Kind.CHUNK and head.round != self._round:
            helper.connection.skip(head)
            return
        if head.kind is Kind.CHUNK:
            chunk = self._free_chunk(helper)
            helper.connection.into(tensors.bytes_of(chunk)[: head.length], head)
            helper.full.put((head.round, chunk))
            return
        said = helper.connection.said(head)
        with self._desk.changed:
            if head.round != self._round:
                return  # it was under way when the round began
            if head.kind is Kind.CLAIM and self._helpers.get(helper.slot) is helper:
                if said.get("done"):
                    self._shares.done(helper.slot, time.monotonic())
                if said.get("version"):
                    helper.version = (said["version"][0], said["version"][1])
                helper.claims = max(1, said["most"])
                self._give_out()
            elif head.kind is Kind.SUMS:
                helper.sums = {
                    unit: Sums(torch.empty(0), rows, loss, used)
                    for unit, rows, loss, used in said["units"]
                }
            self._desk.changed.notify_all()

    def _free_chunk(self, helper: Helper) -> Tensor:
        while True:
            try:
                return helper.free.get(timeout=wire.PING_EVERY_S)
            except queue.Empty:
                if helper.connection.is_closed:
                    raise LostError("it was left out") from None

    def _give_out(self) -> None:
        """Answer claims, as far as there are rows. With the lock."""
        for helper in self._present() if self._gives else ():
            if helper.claims is None:
                continue
            if helper.version not in {None, self._desk.version}:
                helper.claims = None
                threading.Thread(target=self._repair, args=(helper,), daemon=True).start()
                continue
            helper.version = None
            rows = self._shares.give(helper.slot, helper.claims, time.monotonic())
            if rows is not None:
                helper.claims = None
                said = json.dumps(asdict(rows)).encode()
                with suppress(LostError):
                    self._send(helper, Kind.ROWS, said)

    def _repair(self, helper: Helper) -> None:
        """Send the state to a helper whose weights are others after the same updates."""
        step = helper.version[0] if helper.version else None
        self._tell("team_differs", member=helper.slot, step=step)
        try:
            self._admit(helper)
        except (LostError, LeftError) as error:
            self._drop(helper, str(error))

    def _drop(self, helper: Helper, why: str) -> None:
        """Go on without a helper; its rows are computed by others."""
        with self._desk.changed:
            if self._helpers.get(helper.slot) is helper:
                del self._helpers[helper.slot]
                rows = self._shares.leave(helper.slot)
                if not self._is_over:
                    self._tell("team_lost", member=helper.slot, reason=why, rows_again=rows)
                self._desk.changed.notify_all()
        helper.connection.close()

    def _send(self, helper: Helper, kind: Kind, data: Any = b"") -> None:  # noqa: ANN401 - bytes
        """Send a frame of this round; `LostError`: the helper is gone, and was dropped."""
        try:
            helper.connection.send(kind, self._round, data)
        except LostError as error:
            self._drop(helper, str(error))
            raise

    def _wait(self) -> None:
        self._desk.check(self.orders)
        self._desk.changed.wait(_LOOK_S)

    def _one_step(self) -> Stepped:
        desk = self._desk
        _, sums = desk.check(self.orders)
        sums.clear()
        with desk.changed:
            self._shares.begin(desk.version[0], time.monotonic())
        anew, work = True, None
        while work is None:
            anew = self._compute(sums, anew=anew)
            helpers, began_s = self._present(), time.monotonic()
            work = self._summed(helpers, sums)
        wire_s = time.monotonic() - began_s if helpers else 0.0
        used = [] if work.total is None else work.total[1]

        def commit(loss: float, norm: float) -> tuple[float, float]:
            """Tell all that the step is done, and by how much; from here on it is."""
            said = {"loss": loss, "norm": norm, "used": used, "members": 1 + len(helpers)}
            for helper in helpers:
                with suppress(LostError):
                    self._send(helper, Kind.COMMIT, json.dumps({**said, "wire_s": wire_s}).encode())
            return loss, norm

        work.agreed = commit
        own_rows = self._shares.rows_of(self._slot)
        desk.do(work, self._wait)
        return Stepped(members=1 + len(helpers), share=own_rows / self._batch, wire_s=wire_s)

    def _compute(self, sums: OwnSums, *, anew: bool) -> bool:
        """Compute and give out until all rows are done. `anew`: none was computed here before;
        return whether that is still so.
        """
        desk, shares = self._desk, self._shares
        work: ComputeRows | None = None
        with desk.changed:
            self._gives = True
            while True:
                now_s = time.monotonic()
                if work is not None and work.is_done:
                    shares.done(self._slot, now_s)
                    work = None
                for slot in shares.late(wire.SILENT_S, now_s):
                    if slot in self._helpers:
                        self._drop(self._helpers[slot], "its rows take far longer than before")
                self._give_out()
                if work is None and desk.is_here:
                    rows = shares.give(self._slot, desk.most_rows, now_s)
                    if rows is not None:
                        work = ComputeRows(rows=rows, anew=anew, keep=sums if self._fixed else None)
                        anew = False
                        desk.give(work)
                if work is None and shares.is_complete and not self._joining:
                    self._gives = False
                    return anew
                self._wait()

    def _summed(self, helpers: Sequence[Helper], sums: OwnSums) -> Finish | None:
        """Add all sums up; return the update that follows, or `None`: a member was lost in it."""
        if not helpers and not self._fixed:
            self._refuse_rows(self._desk.check(self.orders)[0].done_rows)
            return Finish(sums=sums)
        if not self._fixed and self._shares.rows_of(self._slot):
            sums.take(self._members.index(self._slot))
        try:
            sources = self._sources(helpers, sums)
            self._refuse_rows(sum(each.sums.rows for each in sources))
            for piece in self._added(sources, sums.total):
                for helper in helpers:
                    self._send(helper, Kind.CHUNK, piece)
        except LostError:
            self._round += 1
            for helper in self._present():
                with suppress(LostError):
                    self._begin_round(helper, Kind.VOID)
            return None
        loss = sum(each.sums.loss for each in sources)
        used = [any(each) for each in zip(*(each.sums.used for each in sources), strict=True)]
        return Finish(sums=sums, total=(loss, used))

    def _sources(self, helpers: Sequence[Helper], sums: OwnSums) -> list[_Source]:
        """Return all that is to be added, in its order."""
        self._round += 1
        for helper in helpers:
            self._begin_round(helper, Kind.SUMS)
        sources = [_Source(unit, None, each) for unit, each in sums.units.items()]
        until_s = time.monotonic() + AWAY_S
        with self._desk.changed:
            for helper in helpers:
                while helper.sums is None:
                    if helper.connection.is_closed or time.monotonic() > until_s:
                        self._drop(helper, "it hands over no sums")
                        raise LostError(helper.slot)
                    self._wait()
                sources += [_Source(unit, helper, each) for unit, each in helper.sums.items()]
        return sorted(sources, key=lambda each: each.unit)

    def _begin_round(self, helper: Helper, kind: Kind) -> None:
        """Tell a helper of it, and forget what it has sent for the one before."""
        with self._desk.changed:
            helper.sums = helper.claims = None
        while not helper.full.empty():
            helper.free.put(helper.full.get()[1])
        self._send(helper, kind)

    def _added(self, sources: Sequence[_Source], total: Tensor) -> Iterator[memoryview]:
        """Add sums up in their order, chunk by chunk; yield the bytes of each."""
        own = {each.unit: iter(tensors.pieces(each.sums.flat)) for each in sources}
        for piece in tensors.pieces(total):
            piece.zero_()
            for source in sources:
                if source.helper is None:
                    piece.add_(next(own[source.unit]))
                else:
                    chunk = self._received(source.helper)
                    piece.add_(chunk[: piece.nbytes].view(piece.dtype))
                    source.helper.free.put(chunk)
            yield tensors.bytes_of(piece)

    def _received(self, helper: Helper) -> Tensor:
        """Return the next chunk of this round; `LostError`: the helper was dropped."""
        while True:
            try:
                round_, chunk = helper.full.get(timeout=wire.SILENT_S)
            except queue.Empty:
                self._drop(helper, f"its sums stopped for {wire.SILENT_S:g} s")
                raise LostError(helper.slot) from None
            if round_ == self._round:
                return chunk
            helper.free.put(chunk)

    def _refuse_rows(self, rows: int) -> None:
        """Compare what was summed with the batch: nothing may be lacking, or counted twice."""
        if rows != self._batch:
            self._tell("team_rows", rows=rows, batch=self._batch)
            raise LeftError(f"{rows} rows were summed of a batch of {self._batch}")
