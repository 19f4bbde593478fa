"""A member of a team that divides a model by its blocks (`train.split: layers`).

The first member leads: it trains as if it had the whole model. It calls the other member, the
lender, for the forward and backward pass of the lent blocks, and for the lender's state when a
checkpoint is due. So the team's checkpoint is that of one process with the whole model. The lender
handles one call after another. If the lender runs out of memory, the leader's part fails, and is
repeated with fewer samples or more recomputation. After a lost connection both continue if they
hold the same state. A lender without it gets it from the last checkpoint, to which the leader goes
back.

Calls are frames of JSON and tensors of `wire`. Does not choose the blocks (`workers/training/cut`).
Nothing overlaps: one of both computes at a time.
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
from workers.team.place import RETRY_S, STEPS, TeamMember
from workers.team.tensors import Call, Link
from workers.team.wire import Connection, Kind, LostError
from workers.training.batches import map_tensors, tensors_in, versions_of
from workers.training.buffers import Snapshot, places_of
from workers.training.cut import BlockArgs, Pass, Portion, only_hidden
from workers.training.errors import TaskError, UpdateInterruptedError
from workers.training.trainer import MicroBatch, Trainer


class LayerMember(TeamMember):
    """What the leader and the lender have in common."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        super().__init__(spec, slot, tell)
        self._other = next(each for each in spec.members if each != slot)
        leader_bytes, other_bytes = spec.budgets_bytes
        self.portion = Portion(leads=not self.lends, budgets_bytes=(leader_bytes, other_bytes))
        self._link: Link | None = None
        self._lost_s = 0.0
        """Monotonic time since which the other member has been missing."""
        self._reported_reason = ""
        self._wire_of_steps: deque[float] = deque(maxlen=STEPS)

    @property
    def is_needed(self) -> bool:  # type: ignore[override]
        """Whether the team still needs this member after the last step of its training."""
        return not self._is_over

    @property
    def waits_for(self) -> str:  # type: ignore[override]
        """The member missing for `AWAY_S` that holds up all steps, and what to type; or empty."""
        trainer, waited_s = self.trainer, time.monotonic() - self._lost_s
        if trainer is None or trainer.cut is None or self._is_together or waited_s < place.AWAY_S:
            return ""
        first, end = trainer.cut.lent_range
        has = "leads" if self.lends else f"computes blocks {first} to {end - 1}"
        why = f" ({self._reported_reason})" if self._reported_reason else ""
        return (
            f"no step is done without {self._other}, which {has} and is missing{why}; if it is "
            f"QUARANTINED, `reinstate {self._other}`"
        )

    def open(self, trainer: Trainer) -> None:
        """Share this training with the team from now on."""
        super().open(trainer)
        self._lost_s = time.monotonic()

    def leave(self) -> None:
        """Share no training until `open`."""
        self._drop("the training is closed")
        self.trainer = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """As `TeamMember.busy`; the loss of the other member ends the block without an error."""
        with super().busy():
            try:
                yield
            except LostError as error:
                self._drop(str(error))

    def status(self) -> TeamStatus:
        """Return the state of this member for the head."""
        trainer, orders, steps = self.trainer, self.orders, self._wire_of_steps
        self._reported = self.team_state, self._lost
        lent_pct = None if trainer is None or trainer.cut is None else 100 * trainer.cut.lent_share
        return TeamStatus(
            state=self.team_state,
            listens=self.listens,
            generation=None if orders is None else orders.generation,
            step=None if trainer is None else trainer.step,
            members=1 + self._is_together,
            share_pct=lent_pct if self.lends or lent_pct is None else 100 - lent_pct,
            wire_s=sum(steps) / len(steps) if steps else None,
        )

    @property
    def _is_together(self) -> bool:
        return self.team_state is TeamState.TOGETHER

    @property
    def training(self) -> Trainer:
        """The training; it must be open."""
        assert self.trainer is not None  # noqa: S101 - no work comes before it is open
        return self.trainer

    def _drop(self, why: str) -> None:
        """Disconnect from the other member, and report why it is lost."""
        link, self._link = self._link, None
        was_in, self.wants_save = self._is_together, False
        if was_in and not self._is_over:
            self.team_state, self._lost_s = TeamState.REJOINING, time.monotonic()
        if link is not None:
            link.close()
            if not self._is_over and (was_in or why != self._reported_reason):
                self.event("team_lost", member=self._other, reason=why)
                self._reported_reason = why

    def _orders_changed(self) -> None:
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
        """Wait up to `seconds`; return whether there is something to compute.

        Raises:
            LostError: The other member is gone.
        """


class Leader(LayerMember):
    """The member with the samples and the loss. The computing thread calls its methods."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be listened at.
        """
        super().__init__(spec, slot, tell)
        self._arrived: queue.SimpleQueue[tuple[Link, Mapping[str, Any]]] = queue.SimpleQueue()
        self._lineage = ""
        """Random name of what was trained from one loaded state; equal steps are equal states."""
        self._last_pass: int | None = None
        self._forward_of: Pass | None = None
        """The last pass that computes a gradient."""
        self._wire_s = 0.0
        """Seconds on the wire in this step."""
        self._rows_at_lender = 0
        """Rows of this batch whose gradients the lender has."""
        self._constant: dict[str, Tensor] | None = None
        """The untrained weights of the lent blocks; `None`: not requested yet."""
        self.listens = Door(self, self._admits).address

    def open(self, trainer: Trainer) -> None:
        """Share this training with the team from now on."""
        super().open(trainer)
        self._lineage, self._last_pass = secrets.token_hex(8), None
        if trainer.cut is not None and trainer.cut.lent is not None:
            trainer.cut.lent.compute = self._compute
        trainer.other = self

    def close(self) -> None:
        """End the other member, and wait up to `2 * SILENT_S` until it has read that."""
        self._is_over = True
        if self._link is not None:
            with self.busy():
                self._link.call("end")
                self._link.take(2 * wire.SILENT_S)

    def saved(self) -> None:
        """Tell the other member that its state is saved, so that it may rest."""
        self.wants_save = False
        if self._link is not None:
            self._link.call("saved")

    def can_save(self, saved_step: int | None) -> bool:
        """Return whether a checkpoint newer than that of `saved_step` may still be written: it
        needs the state of both. For a lost member it waits up to `AWAY_S` if steps would be lost.
        """
        trainer = self.training
        is_known = trainer.at_boundary and trainer.lent_state is not None
        may_come = is_known or time.monotonic() - self._lost_s < place.AWAY_S
        return self._is_together or (may_come and saved_step != trainer.step)

    def _awaits(self, seconds: float) -> bool:
        if self._link is not None:
            if self._link.lost is None:
                return True
            raise LostError(self._link.lost)
        try:
            link, message = self._arrived.get(timeout=seconds)
        except queue.Empty:
            return False
        trainer = self.training
        is_same = message.get("step") == trainer.step and message.get("line") == self._lineage
        if not is_same and trainer.lent_state is None and trainer.step:
            link.close()
            trainer.invalidate(
                f"{self._other} has lost its blocks of step {trainer.step}, which are in no "
                "checkpoint"
            )
            return True  # the next part raises that; training goes back to its last checkpoint
        state = None if is_same else self._without_constant(trainer.lent_state)
        with super().busy():  # sending the state may take long
            link.call("welcome", line=self._lineage, step=trainer.step, state=state)
        trainer.drop_sums()  # the lender may have lost its part of them
        self._rows_at_lender, self._wire_s = 0, 0.0
        self._link, self.team_state = link, TeamState.TOGETHER
        self.event(
            "team_joined",
            member=self._other,
            step=trainer.step,
            from_step=message.get("step"),
            state_sent=state is not None,
        )
        return True

    def _part(self, most_rows: int, level: int, /) -> MicroBatch | None:
        return self.training.micro_batch(most_rows, level)

    def _compute(self, hidden: Tensor, given: BlockArgs) -> Tensor:
        """Compute the lent blocks at the other member.

        Raises:
            TaskError: The blocks get a tensor with a gradient besides hidden states, or run twice.
            LostError: The other member is gone.
            torch.OutOfMemoryError: The other member has run out of memory.
        """
        if any(each.requires_grad for each in tensors_in(given.kinds)):
            raise TaskError(
                "the blocks of this model share what is trained, such as a bias of positions, so "
                "train.split: layers cannot divide it; train it with split: data"
            )
        now, is_trained = self.training.current_pass, torch.is_grad_enabled()
        if is_trained or (now.trains and not now.widened):  # no check of losses, and no validation
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
        return _LentBlocksFunction.apply(hidden, given, self, wants_gradient)  # type: ignore[no-any-return, no-untyped-call]

    def request_tensor(self, name: str, **content: Any) -> Tensor:  # noqa: ANN401 - as `Link.call`
        """Return hidden states after the lent blocks (`forward`), or the gradient before them."""
        out = self._request(name, **content)["tensor"]
        assert isinstance(out, Tensor)  # noqa: S101 - both calls return a tensor
        if name == "backward" and (now := self._forward_of) is not None:
            self._rows_at_lender = now.done + now.rows
        return out.to(self.training.device)

    def _request(self, name: str, **content: Any) -> Mapping[str, Any]:  # noqa: ANN401
        """Call the other member, and return its answer."""
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
        """Return loss and norm of both members' gradients, and make the lender update."""
        trainer = self.training
        message = self._request("norm")
        if message["rows"] != self._rows_at_lender:
            raise TaskError(
                f"{self._other} has the gradients of {message['rows']} samples, and was given "
                f"{self._rows_at_lender}; that is a bug: please report it"
            )
        self._rows_at_lender = 0
        both = math.hypot(norm, message["norm"])
        assert self._link is not None  # noqa: S101 - it has just answered
        items = trainer.items_per_sample * trainer.settings.batch
        self._link.call("commit", loss=loss / items, norm=both)
        self._wire_of_steps.append(self._wire_s)
        self._wire_s = 0.0
        return loss, both

    def state(self) -> Mapping[str, Any]:
        """Return the state of the other member. Its untrained weights are sent once."""
        message = self._request("state", constant=self._constant is None)
        if self._constant is None:
            self._constant = dict(message["constant"])
        state: Mapping[str, Any] = message["state"]
        return {**state, "weights": {**self._constant, **state["weights"]}}

    def _without_constant(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a lender's state without the weights that it reads from its model folder."""
        cut = self.training.cut
        if state is None or cut is None:
            return state
        weights = {name: each for name, each in state["weights"].items() if name in cut.trained}
        return {**state, "weights": weights}

    def _admits(self) -> tuple[TeamOrders, Serve] | None:
        """Admit the other member while the computing thread of this one is there."""
        return (self.orders, self._serve) if self.orders and self.is_attended() else None

    def _serve(self, connection: Connection, message: Mapping[str, Any]) -> None:
        with suppress(queue.Empty):  # it has connected again since
            self._arrived.get_nowait()[0].close()
        self._arrived.put((Link(connection, self.is_attended), message))


class _LentBlocksFunction(torch.autograd.Function):
    """The lent blocks as a function of autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, given: BlockArgs, leader: Leader, wants: bool) -> Tensor:  # noqa: ANN401 - torch's own
        ctx.leader = leader
        return leader.request_tensor(
            "forward",
            now=asdict(leader.training.current_pass),
            hidden=hidden.detach(),
            kinds=given.kinds,
            of_block=given.of_block,
            wants_gradient=wants,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - as above
        return ctx.leader.request_tensor("backward", gradient=gradient), None, None, None


class Lender(LayerMember):
    """The member that computes the lent blocks for the leader."""

    lends = True

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        super().__init__(spec, slot, tell)
        self._next: Call | None = None
        self._lineage = ""
        self._forward_pass: tuple[Pass, Tensor, Tensor] | None = None
        """The forward pass whose backward pass may follow, with its input and its output."""
        self._retry_at_s = 0.0
        self._is_pass_checked = False
        """Whether a pass was checked for side effects on the blocks."""
        self._wants_save = self._is_saved = False
        """Whether this member must rest, and whether the leader has saved its present state."""

    def save_soon(self) -> None:
        """Go on computing until the leader has saved a checkpoint with this member's state."""
        self._wants_save = not self._is_saved

    @property
    def save_due(self) -> bool:  # type: ignore[override]
        """Whether this member must rest, and a connected leader has not saved its state since."""
        return self._wants_save and self._is_together

    def _awaits(self, seconds: float) -> bool:
        if self._link is None:
            self._join(seconds)
        elif self._next is None:
            self._next = self._link.take(seconds)
        return self._next is not None

    def _join(self, seconds: float) -> None:
        """Connect to the leader, at most once in `RETRY_S`; sleep `seconds` otherwise."""
        orders, now_s = self.orders, time.monotonic()
        self._next = self._forward_pass = None
        if orders is None or self.trainer is None or now_s < self._retry_at_s:
            time.sleep(seconds)
            return
        self._retry_at_s = now_s + RETRY_S
        connection = wire.connect(orders.address, orders.secret)
        connection.send_json(
            Kind.HELLO,
            generation=orders.generation,
            slot=self.slot,
            identity=self.identity,
            step=self.training.step,
            line=self._lineage,
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
                self._answer_call(computed_s=time.perf_counter() - began_s, **answer)
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
            self._forward_pass = None
            gc.collect()
            self._link.call("failed", text=failure)
        return MicroBatch(rows=0, level=0, updated=call.name == "norm")

    def _enter(self, message: Mapping[str, Any]) -> None:
        """Load the state of the leader's step.

        Raises:
            UpdateInterruptedError: The leader begins at step 0, and so must this member.
        """
        trainer = self.training
        trainer.drop_sums()
        if message["state"] is not None:
            tensors.load(trainer, message["state"])
        elif message["step"] != trainer.step:
            raise UpdateInterruptedError("the leader begins at step 0")
        self._lineage, self.team_state = message["line"], TeamState.TOGETHER

    def _answer(self, call: Call) -> dict[str, Any] | None:
        message, trainer = call.content, self.training
        if call.name == "forward":
            return {"tensor": self._forward(Pass(**message["now"]), message)}
        if call.name == "backward":
            return {"tensor": self._backward(message["gradient"])}
        if call.name == "state":
            trained, constant = tensors.split_weights(trainer)
            state = {**trainer.state(), "weights": trained}
            return {"state": state, **({"constant": constant} if message["constant"] else {})}
        if call.name == "norm":
            trainer.finish(self._agree)
            return None
        raise LostError(f"it asks for {call.name!r}")

    def _drop(self, why: str) -> None:
        self._forward_pass, self._next, self._wants_save = None, None, False
        super()._drop(why)

    def _forward(self, now: Pass, message: Mapping[str, Any]) -> Tensor:
        trainer, self._forward_pass, self._is_saved = self.training, None, False
        if now.step != trainer.step:
            raise LostError(f"it computes step {now.step}, and this member has {trainer.step}")
        first: Tensor = message["hidden"].to(trainer.device)
        hidden, wants_gradient = first, message["wants_gradient"]
        first.requires_grad_(wants_gradient)
        kinds = map_tensors(lambda each: each.to(trainer.device), message["kinds"])
        assert trainer.cut is not None  # noqa: S101 - a lender has a part of a model
        modules = [each for block in trainer.cut.blocks for each in block.modules()]
        buffers = [each for block in trainer.cut.blocks for each in block.buffers()]
        before, many = versions_of(buffers), len(list(tensors_in(kinds)))
        numbers = Snapshot([] if self._is_pass_checked else places_of(modules, small=True))
        with (
            trainer.lent_pass(now),
            torch.set_grad_enabled(wants_gradient),
            trainer.arithmetic(widened=now.widened),
        ):
            for block, place in zip(trainer.cut.blocks, message["of_block"], strict=True):
                given = kinds[place]
                hidden = only_hidden(block(hidden, *given["args"], **given["kwargs"]))
        is_kept = not self._is_pass_checked and (
            any(map(_keeps_graph, modules)) or many != len(list(tensors_in(kinds)))
        )
        if is_kept or before != versions_of(buffers) or numbers.changed():
            raise TaskError(
                "each pass changes the blocks of this model, or keeps something of it there, such "
                "as a buffer or an extra loss; so train.split: layers cannot divide it; do that "
                "after the step, or train on one card"
            )
        self._is_pass_checked = self._is_pass_checked or wants_gradient
        if wants_gradient:
            self._forward_pass = now, first, hidden
        return hidden.detach()

    def _backward(self, gradient: Tensor) -> Tensor:
        forward_pass, self._forward_pass = self._forward_pass, None
        if forward_pass is None:
            raise LostError("it asks for a gradient, and there was no forward pass")
        (now, hidden, out), trainer = forward_pass, self.training
        gradient = gradient.to(trainer.device)
        with trainer.lent_pass(now) as sums:
            # The gradient of this sum at `out` is the one that the leader has sent.
            sums.add(now.rows, (out * gradient).sum(), inputs=[hidden])
        before: Tensor | None = hidden.grad
        assert before is not None  # noqa: S101 - it was asked for
        return before

    def _answer_call(self, **answer: Any) -> None:  # noqa: ANN401 - as `Link.call`
        """Send the leader the answer to its call."""
        assert self._link is not None  # noqa: S101 - the call came over it
        self._link.call("done", wants_save=self._wants_save, **answer)

    def _agree(self, _: float, norm: float) -> tuple[float, float]:
        """Send the norm of this member's gradients; return loss and norm of both members."""
        assert self._link is not None  # noqa: S101 - the call came over it
        self._answer_call(norm=norm, rows=self.training.done_rows)
        message = self._link.take()
        if message is None or message.name != "commit":
            raise LostError("the step was not committed")
        return message.content["loss"], message.content["norm"]


def _keeps_graph(module: nn.Module) -> bool:
    """Whether a module keeps a tensor with the graph of a pass."""
    return any(
        isinstance(each, Tensor) and each.grad_fn is not None for each in vars(module).values()
    )
