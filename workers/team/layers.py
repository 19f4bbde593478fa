"""A slot's place in a team that divides a model by its blocks (`train.split: layers`).

The first member leads: it trains as if the whole model were here, and asks the other one for what
the lent blocks compute, forward and backward, and for its state where a checkpoint is due. So the
checkpoint of the team is that of one process with the whole model. The other member does what it is
asked for, one call after the other. Where it runs out of memory the leader's part has, and is tried
again with fewer samples or more recomputation. A member that is lost while the other holds the same
step goes on where it was; one without that state gets it from the last checkpoint, to which the
leader goes back.

Calls are frames of JSON and tensors of `wire`. Does not choose the blocks (`workers/training/cut`),
and overlaps nothing: one of both computes at a time.
"""

from __future__ import annotations

import gc
import math
import queue
import secrets
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from workers import oom
from workers.messages import TeamOrders, TeamState, TeamStatus
from workers.settings import TeamSpec
from workers.team import place, tensors, wire
from workers.team.door import Door, Serve
from workers.team.place import AGAIN_S, STEPS, Place
from workers.team.tensors import Call, Link
from workers.team.wire import Connection, Kind, LostError
from workers.training.batches import map_tensors, tensors_in, versions_of
from workers.training.buffers import Snapshot, places_of
from workers.training.cut import Given, Pass, Portion, only_hidden
from workers.training.errors import TaskError, UpdateInterruptedError
from workers.training.trainer import MicroBatch, Trainer


class Half(Place):
    """What both members have in common."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        super().__init__(spec, slot, tell)
        self._other = next(each for each in spec.members if each != slot)
        leader_bytes, other_bytes = spec.budgets_bytes
        self.portion = Portion(leads=not self.lends, budgets_bytes=(leader_bytes, other_bytes))
        self._link: Link | None = None
        self._lost_s = 0.0
        """Since when the other member is not there, while it is not."""
        self._told_reason = ""
        self._wire_of_steps: deque[float] = deque(maxlen=STEPS)

    @property
    def is_needed(self) -> bool:  # type: ignore[override]
        """Whether the training is not over where its last step is done."""
        return not self._is_over

    @property
    def waits_for(self) -> str:  # type: ignore[override]
        """Without whom nothing is computed, and what to type; empty: all are there, or were."""
        trainer, waited_s = self.trainer, time.monotonic() - self._lost_s
        if trainer is None or trainer.cut is None or self._is_in or waited_s < place.AWAY_S:
            return ""
        first, end = trainer.cut.lent_range
        has = "leads" if self.lends else f"computes blocks {first} to {end - 1}"
        why = f" ({self._told_reason})" if self._told_reason else ""
        return (
            f"no step is done without {self._other}, which {has} and is missing{why}; if it is "
            f"QUARANTINED, `reinstate {self._other}`"
        )

    def open(self, trainer: Trainer) -> None:
        """Share this training from now on."""
        super().open(trainer)
        self._lost_s = time.monotonic()

    def leave(self) -> None:
        """Share none until `open`."""
        self._drop("the training is closed")
        self.trainer = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Return the region in which the other member is needed; it is left where that is gone."""
        with super().busy():
            try:
                yield
            except LostError as error:
                self._drop(str(error))

    def status(self) -> TeamStatus:
        """Say how this member stands."""
        trainer, orders, steps = self.trainer, self.orders, self._wire_of_steps
        self._told = self.stands, self._lost
        lent_pct = None if trainer is None or trainer.cut is None else 100 * trainer.cut.lent_share
        return TeamStatus(
            state=self.stands,
            listens=self.listens,
            generation=None if orders is None else orders.generation,
            step=None if trainer is None else trainer.step,
            members=1 + self._is_in,
            share_pct=lent_pct if self.lends or lent_pct is None else 100 - lent_pct,
            wire_s=sum(steps) / len(steps) if steps else None,
        )

    @property
    def _is_in(self) -> bool:
        return self.stands is TeamState.TOGETHER

    @property
    def training(self) -> Trainer:
        """What is trained, once it is open."""
        assert self.trainer is not None  # noqa: S101 - nothing is asked for before it is open
        return self.trainer

    def _drop(self, why: str) -> None:
        """Take note that the other member is gone."""
        link, self._link = self._link, None
        was_in, self.wants_save = self._is_in, False
        if was_in and not self._is_over:
            self.stands, self._lost_s = TeamState.REJOINING, time.monotonic()
        if link is not None:
            link.close()
            if not self._is_over and (was_in or why != self._told_reason):
                self.event("team_lost", member=self._other, reason=why)
                self._told_reason = why

    def _reordered(self) -> None:
        self._drop("there are newer orders")

    def _is_ready(self, seconds: float) -> bool:
        self.attend()
        try:
            return self._awaits(seconds)
        except LostError as error:
            self._drop(str(error))
            return False

    @abstractmethod
    def _awaits(self, seconds: float) -> bool:
        """Wait at most so long; say whether there is something to compute.

        Raises:
            LostError: The other member is gone.
        """


class Leader(Half):
    """The member with the samples and the loss. Methods are called by the computing thread."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be listened at.
        """
        super().__init__(spec, slot, tell)
        self._arrived: queue.SimpleQueue[tuple[Link, Mapping[str, Any]]] = queue.SimpleQueue()
        self._line = ""
        """Names what was trained from one loaded state on: states of equal steps are equal."""
        self._last_pass: int | None = None
        self._forward_of: Pass | None = None
        """The last pass that has a gradient."""
        self._wire_s = 0.0
        """Of this step."""
        self._rows_there = 0
        """Rows of this batch whose gradients the other member has."""
        self._constant: dict[str, Tensor] | None = None
        """The lent weights that are not trained; `None`: they were not asked for."""
        self.listens = Door(self, self._admits).address

    def open(self, trainer: Trainer) -> None:
        """Share this training from now on."""
        super().open(trainer)
        self._line, self._last_pass = secrets.token_hex(8), None
        if trainer.cut is not None and trainer.cut.lent is not None:
            trainer.cut.lent.compute = self._compute
        trainer.other = self

    def close(self) -> None:
        """Have the other member end, and wait a moment until it has heard of it."""
        self._is_over = True
        if self._link is not None:
            with self.busy():
                self._link.call("end")
                self._link.take(2 * wire.SILENT_S)

    def saved(self) -> None:
        """Let the other member rest."""
        self.wants_save = False
        if self._link is not None:
            self._link.call("saved")

    def can_save(self, saved_step: int | None) -> bool:
        """Say whether a checkpoint may follow that of this step: it needs the state of both. A
        member that is gone is waited for where steps would be lost, for as long as one that rests.
        """
        trainer = self.training
        is_known = trainer.at_boundary and trainer.lent_state is not None
        may_come = is_known or time.monotonic() - self._lost_s < place.AWAY_S
        return self._is_in or (may_come and saved_step != trainer.step)

    def _awaits(self, seconds: float) -> bool:
        if self._link is not None:
            if self._link.lost is None:
                return True
            raise LostError(self._link.lost)
        try:
            link, said = self._arrived.get(timeout=seconds)
        except queue.Empty:
            return False
        trainer = self.training
        is_same = said.get("step") == trainer.step and said.get("line") == self._line
        if not is_same and trainer.lent_state is None and trainer.step:
            link.close()
            trainer.void(
                f"{self._other} has lost its blocks of step {trainer.step}, which are in no "
                "checkpoint"
            )
            return True  # the next part says so, and the training goes back to its last checkpoint
        state = None if is_same else self._without_constant(trainer.lent_state)
        with super().busy():  # the state may take long on the wire
            link.call("welcome", line=self._line, step=trainer.step, state=state)
        trainer.drop_sums()  # of which the other member may lack its own
        self._rows_there, self._wire_s = 0, 0.0
        self._link, self.stands = link, TeamState.TOGETHER
        self.event(
            "team_joined",
            member=self._other,
            step=trainer.step,
            from_step=said.get("step"),
            state_sent=state is not None,
        )
        return True

    def _part(self, most_rows: int, level: int, /) -> MicroBatch | None:
        return self.training.micro_batch(most_rows, level)

    def _compute(self, hidden: Tensor, given: Given) -> Tensor:
        """Have the other member compute the lent blocks.

        Raises:
            TaskError: Blocks get what wants a gradient beside hidden states, or are called twice.
            LostError: It is gone.
            torch.OutOfMemoryError: It has run out of memory.
        """
        if any(each.requires_grad for each in tensors_in(given.kinds)):
            raise TaskError(
                "the blocks of this model share what is trained, such as a bias of positions, so "
                "train.split: layers cannot divide it; train it with split: data"
            )
        now, is_trained = self.training.now, torch.is_grad_enabled()
        if is_trained or (now.trains and not now.widened):  # no look at losses, and no validation
            what = None
            if now.number == self._last_pass:
                what = "calls its blocks twice for a loss"
            elif not is_trained:
                what = "calls its blocks without gradients"
            elif not hidden.requires_grad:
                what = "trains nothing before the blocks that are lent"
            if what is not None:
                raise TaskError(
                    f"this training {what}, so split: layers cannot divide it; use split: data"
                )
            self._last_pass = now.number
        wants_gradient = is_trained and hidden.requires_grad
        if wants_gradient:
            self._forward_of = now
        return _Elsewhere.apply(hidden, given, self, wants_gradient)  # type: ignore[no-any-return, no-untyped-call]

    def asked(self, name: str, **content: Any) -> Tensor:  # noqa: ANN401 - as `Link.call`
        """Return the hidden states after the lent blocks, or the gradient before them."""
        out = self._ask(name, **content)["tensor"]
        assert isinstance(out, Tensor)  # noqa: S101 - that is what it is asked for
        if name == "backward" and (now := self._forward_of) is not None:
            self._rows_there = now.done + now.rows
        return out.to(self.training.device)

    def _ask(self, name: str, **content: Any) -> Mapping[str, Any]:  # noqa: ANN401
        """Return the answer of the other member."""
        if self._link is None:
            raise LostError(f"{self._other} is not there")
        began_s = time.perf_counter()
        self._link.call(name, **content)
        answer = self._link.take()
        if answer is None or answer.name == "failed":
            text = "" if answer is None else answer.content["text"]
            raise torch.OutOfMemoryError(f"CUDA out of memory at {self._other}: {text}")
        self.wants_save = answer.content["wants_save"]
        computed_s = answer.content.get("computed_s", 0.0)
        self._wire_s += time.perf_counter() - began_s - computed_s
        return answer.content

    def agree(self, loss: float, norm: float, /) -> tuple[float, float]:
        """Return loss and norm of both members, and have the other one update by them."""
        trainer = self.training
        said = self._ask("norm")
        if said["rows"] != self._rows_there:
            raise TaskError(
                f"{self._other} has the gradients of {said['rows']} samples, and was given "
                f"{self._rows_there}; that must not be: please report it"
            )
        self._rows_there = 0
        both = math.hypot(norm, said["norm"])
        assert self._link is not None  # noqa: S101 - it has just answered
        items = trainer.items_per_sample * trainer.settings.batch
        self._link.call("commit", loss=loss / items, norm=both)
        self._wire_of_steps.append(self._wire_s)
        self._wire_s = 0.0
        return loss, both

    def state(self) -> Mapping[str, Any]:
        """Return the state of the other member. What is not trained is sent once."""
        said = self._ask("state", constant=self._constant is None)
        if self._constant is None:
            self._constant = dict(said["constant"])
        state: Mapping[str, Any] = said["state"]
        return {**state, "weights": {**self._constant, **state["weights"]}}

    def _without_constant(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a state of the other member without the weights that it has of the folder."""
        cut = self.training.cut
        if state is None or cut is None:
            return state
        weights = {name: each for name, each in state["weights"].items() if name in cut.trained}
        return {**state, "weights": weights}

    def _admits(self) -> tuple[TeamOrders, Serve] | None:
        """Let the other member in while this one computes."""
        return (self.orders, self._serve) if self.orders and self.is_attended() else None

    def _serve(self, connection: Connection, said: Mapping[str, Any]) -> None:
        with suppress(queue.Empty):  # it has come again since
            self._arrived.get_nowait()[0].close()
        self._arrived.put((Link(connection, self.is_attended), said))


class _Elsewhere(torch.autograd.Function):
    """What the lent blocks compute, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, given: Given, leader: Leader, wants: bool) -> Tensor:  # noqa: ANN401 - torch's own
        ctx.leader = leader
        return leader.asked(
            "forward",
            now=asdict(leader.training.now),
            hidden=hidden.detach(),
            kinds=given.kinds,
            of_block=given.of_block,
            wants_gradient=wants,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - as above
        return ctx.leader.asked("backward", gradient=gradient), None, None, None


class Lender(Half):
    """The member that computes blocks for the leader."""

    lends = True

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        super().__init__(spec, slot, tell)
        self._next: Call | None = None
        self._line = ""
        self._held: tuple[Pass, Tensor, Tensor] | None = None
        """A forward pass whose backward pass may come, what went in and what came out."""
        self._again_s = 0.0
        self._has_looked = False
        """Whether a pass was looked at: what it does to the blocks beside its result."""
        self._wants_save = self._is_saved = False
        """Whether it is to rest, and whether the leader has saved what is here."""

    def save_soon(self) -> None:
        """Compute until the leader has a checkpoint, which needs the state of this member."""
        self._wants_save = not self._is_saved

    @property
    def save_due(self) -> bool:  # type: ignore[override]
        """Whether the leader, if it is there, has not saved since this member is to rest."""
        return self._wants_save and self._is_in

    def _awaits(self, seconds: float) -> bool:
        if self._link is None:
            self._join(seconds)
        elif self._next is None:
            self._next = self._link.take(seconds)
        return self._next is not None

    def _join(self, seconds: float) -> None:
        orders, now_s = self.orders, time.monotonic()
        self._next = self._held = None
        if orders is None or self.trainer is None or now_s < self._again_s:
            time.sleep(seconds)
            return
        self._again_s = now_s + AGAIN_S
        connection = wire.connect(orders.address, orders.secret)
        connection.tell(
            Kind.HELLO,
            generation=orders.generation,
            slot=self.slot,
            identity=self.identity,
            step=self.training.step,
            line=self._line,
        )
        self._link = Link(connection, self.is_attended)

    def _part(self, _: int, __: int, /) -> MicroBatch | None:
        call, self._next = self._next, None
        if call is None or self._link is None:
            return None
        if call.name == "end":
            self._is_over = True
            self._drop("the training is over")
            return MicroBatch(rows=0, level=0, updated=True)
        if call.name in {"welcome", "saved"}:
            if call.name == "welcome":
                self._enter(call.content)
            self._is_saved = call.name == "saved"
            self._wants_save = self._wants_save and not self._is_saved
            return MicroBatch(rows=0, level=0, updated=False)
        began_s, failure = time.perf_counter(), None
        try:
            answer = self._answer(call)
            if answer is not None:
                self._done(computed_s=time.perf_counter() - began_s, **answer)
        except LostError:
            raise
        except Exception as error:
            verdict = oom.classify(error)
            if not verdict.is_out_of_memory:
                # Else the leader would wait for an answer.
                self._drop(f"{type(error).__name__}: {error}")
                raise
            oom.drop_frames(error)
            failure = verdict.text
        if failure is not None:  # outside the handler, whose traceback holds tensors
            self._held = None
            gc.collect()
            self._link.call("failed", text=failure)
        return MicroBatch(rows=0, level=0, updated=call.name == "norm")

    def _enter(self, said: Mapping[str, Any]) -> None:
        """Have the state of the leader's step.

        Raises:
            UpdateInterruptedError: The leader begins anew, and so does this one.
        """
        trainer = self.training
        trainer.drop_sums()
        if said["state"] is not None:
            tensors.load(trainer, said["state"])
        elif said["step"] != trainer.step:
            raise UpdateInterruptedError("the leader begins at step 0")
        self._line, self.stands = said["line"], TeamState.TOGETHER

    def _answer(self, call: Call) -> dict[str, Any] | None:
        said, trainer = call.content, self.training
        if call.name == "forward":
            return {"tensor": self._forward(Pass(**said["now"]), said)}
        if call.name == "backward":
            return {"tensor": self._backward(said["gradient"])}
        if call.name == "state":
            trained, constant = tensors.split_weights(trainer)
            state = {**trainer.state(), "weights": trained}
            return {"state": state, **({"constant": constant} if said["constant"] else {})}
        if call.name == "norm":
            trainer.finish(self._agree)
            return None
        raise LostError(f"it asks for {call.name!r}")

    def _drop(self, why: str) -> None:
        self._held, self._next, self._wants_save = None, None, False
        super()._drop(why)

    def _forward(self, now: Pass, said: Mapping[str, Any]) -> Tensor:
        trainer, self._held, self._is_saved = self.training, None, False
        if now.step != trainer.step:
            raise LostError(f"it computes step {now.step}, and this member has {trainer.step}")
        first: Tensor = said["hidden"].to(trainer.device)
        hidden, wants_gradient = first, said["wants_gradient"]
        first.requires_grad_(wants_gradient)
        kinds = map_tensors(lambda each: each.to(trainer.device), said["kinds"])
        assert trainer.cut is not None  # noqa: S101 - a lender has a part of a model
        modules = [each for block in trainer.cut.blocks for each in block.modules()]
        buffers = [each for block in trainer.cut.blocks for each in block.buffers()]
        before, many = versions_of(buffers), len(list(tensors_in(kinds)))
        numbers = Snapshot([] if self._has_looked else places_of(modules, small=True))
        with (
            trainer.within(now),
            torch.set_grad_enabled(wants_gradient),
            trainer.arithmetic(widened=now.widened),
        ):
            for block, place in zip(trainer.cut.blocks, said["of_block"], strict=True):
                given = kinds[place]
                hidden = only_hidden(block(hidden, *given["args"], **given["kwargs"]))
        is_kept = not self._has_looked and (
            any(map(_keeps_graph, modules)) or many != len(list(tensors_in(kinds)))
        )
        if is_kept or before != versions_of(buffers) or numbers.changed():
            raise TaskError(
                "each pass changes the blocks of this model, or keeps something of it there, such "
                "as a buffer or a loss beside; so train.split: layers cannot divide it; do that "
                "after the step, or train on one card"
            )
        self._has_looked = self._has_looked or wants_gradient
        if wants_gradient:
            self._held = now, first, hidden
        return hidden.detach()

    def _backward(self, gradient: Tensor) -> Tensor:
        held, self._held = self._held, None
        if held is None:
            raise LostError("it asks for a gradient of nothing")
        (now, hidden, out), trainer = held, self.training
        gradient = gradient.to(trainer.device)
        with trainer.within(now) as sums:
            # The gradient of this sum at `out` is just what the leader has sent.
            sums.add(now.rows, (out * gradient).sum(), inputs=[hidden])
        before: Tensor | None = hidden.grad
        assert before is not None  # noqa: S101 - it was asked for
        return before

    def _done(self, **answer: Any) -> None:  # noqa: ANN401 - as `Link.call`
        """Answer the leader."""
        assert self._link is not None  # noqa: S101 - the call has come by it
        self._link.call("done", wants_save=self._wants_save, **answer)

    def _agree(self, _: float, norm: float) -> tuple[float, float]:
        """Tell the norm of the own gradients; return what the leader says of all."""
        assert self._link is not None  # noqa: S101 - the call has come by it
        self._done(norm=norm, rows=self.training.done_rows)
        said = self._link.take()
        if said is None or said.name != "commit":
            raise LostError("the step was not committed")
        return said.content["loss"], said.content["norm"]


def _keeps_graph(module: nn.Module) -> bool:
    """Whether a module has a tensor of the pass that it has computed."""
    return any(
        isinstance(each, Tensor) and each.grad_fn is not None for each in vars(module).values()
    )
