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
import hashlib
import json
import math
import queue
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from workers import oom
from workers.messages import TeamOrders, TeamState, TeamStatus
from workers.settings import TeamSpec
from workers.team import tensors, wire
from workers.team.calls import Call, Link
from workers.team.desk import AWAY_S
from workers.team.door import Admission, Door
from workers.team.wire import Connection, Kind, LostError
from workers.training.batches import map_tensors, tensors_in
from workers.training.cut import Given, Pass, Portion, only_hidden
from workers.training.errors import TaskError, UpdateInterruptedError
from workers.training.parts import Snapshot, places_of
from workers.training.trainer import MicroBatch, Trainer

#: Between two attempts to reach the leader.
_AGAIN_S: Final = 0.1

#: Steps that figures are of.
_STEPS: Final = 20

#: Events that wait for the computing thread; older ones are forgotten.
_MOST_EVENTS: Final = 100


class Place(ABC):
    """What both members have in common, as a training's slot sees it (see `Member`)."""

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        self._spec, self._slot, self._tell = spec, slot, tell
        self._other = next(each for each in spec.members if each != slot)
        self._orders: TeamOrders | None = None
        self._trainer: Trainer | None = None
        self._link: Link | None = None
        self._identity = ""
        """Equal for members that can share a training."""
        self._events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MOST_EVENTS)
        self._told, self._is_in = TeamState.REJOINING, False
        self._left_s = -math.inf
        """When the other member was lost."""
        self._told_reason = ""
        self._wire_s = 0.0
        self._wire_of_steps: deque[float] = deque(maxlen=_STEPS)
        self._is_over = False
        self._seen_s, self._is_busy = 0.0, False

    #: Whether it computes for the other one, and has neither samples nor checkpoints.
    lends = False

    #: Both compute all rows of a step.
    share = 1.0

    #: A state between two steps is there at any time.
    is_computing = False

    #: Whether the other member is to rest, and waits until the leader has saved.
    wants_save = False

    #: Whether this member is asked for its state before it may rest.
    save_due = False

    @property
    def portion(self) -> Portion:
        """Which part of the model is here."""
        leader_bytes, other_bytes = self._spec.budgets_bytes
        return Portion(leads=not self.lends, budgets_bytes=(leader_bytes, other_bytes))

    def open(self, trainer: Trainer) -> None:
        """Share this training from now on."""
        plain = json.dumps([trainer.identity.plain(), self._spec.members], sort_keys=True)
        self._identity = hashlib.sha256(plain.encode()).hexdigest()
        self._trainer = trainer

    def leave(self) -> None:
        """Share none until `open`."""
        self._drop("the training is closed")
        self._trainer = None

    @abstractmethod
    def close(self) -> None:
        """Take note that all is done."""

    def obey(self, orders: TeamOrders | None) -> None:
        """Take orders; smaller generations change nothing."""
        if orders and (self._orders is None or orders.generation > self._orders.generation):
            self._orders = orders
            self._drop("there are newer orders")

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for something to compute; say whether there is something."""
        while self._events:
            name, figures = self._events.popleft()
            self._tell(name, **figures)
        self.attend()
        try:
            return self._is_ready(seconds)
        except LostError as error:
            self._drop(str(error))
            return False

    def part(self, most_rows: int, level: int) -> MicroBatch | None:
        """Compute something; `None`: nothing is to do, or the other member is gone."""
        done = None
        with self.busy():
            done = self._part(most_rows, level)
        return done  # noqa: RET504 - `busy` may end it before

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Return the region in which the other member is needed; it is left where that is gone."""
        with self._at_work():
            try:
                yield
            except LostError as error:
                self._drop(str(error))

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Have the other member wait for this one, which does something that may take long."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
            self.attend()

    def attend(self) -> None:
        """Take note that the slot is at work, also while it rests; the other member waits then."""
        self._seen_s = time.monotonic()

    def is_attended(self) -> bool:
        """Say whether the computing thread is there."""
        return self._is_busy or time.monotonic() - self._seen_s < AWAY_S

    @property
    def is_needed(self) -> bool:
        """Whether the training is not over where its last step is done."""
        return not self._is_over

    @property
    def has_news(self) -> bool:
        """Whether the head should hear at once how this member stands."""
        return self._told is not self._state

    def status(self) -> TeamStatus:
        """Say how this member stands."""
        trainer, orders = self._trainer, self._orders
        self._told = self._state
        lent_pct = None if trainer is None or trainer.cut is None else 100 * trainer.cut.lent_share
        steps = self._wire_of_steps
        return TeamStatus(
            state=self._state,
            listens=self._listens,
            generation=None if orders is None else orders.generation,
            step=None if trainer is None else trainer.step,
            members=1 + self._is_in,
            share_pct=lent_pct if self.lends or lent_pct is None else 100 - lent_pct,
            wire_s=sum(steps) / len(steps) if steps else None,
        )

    _listens = ""

    @property
    def _state(self) -> TeamState:
        return TeamState.TOGETHER if self._is_in else TeamState.REJOINING

    @property
    def _training(self) -> Trainer:
        assert self._trainer is not None  # noqa: S101 - nothing is asked for before it is open
        return self._trainer

    def can_save(self, saved_step: int | None) -> bool:
        """Say whether a checkpoint may follow that of this step: it needs both members. One that is
        gone is waited for where steps would be lost, for as long as one that rests.
        """
        if self._is_in:
            return True
        away_s = time.monotonic() - self._left_s
        return away_s < AWAY_S and saved_step != self._training.step

    def save_soon(self) -> None:  # noqa: B027 - one of both has nothing to do
        """Take note that this member is to rest once there is a checkpoint."""

    def saved(self) -> None:  # noqa: B027 - as above
        """Take note that there is a checkpoint of this step."""

    def _drop(self, why: str) -> None:
        """Take note that the other member is gone."""
        link, self._link = self._link, None
        was_in, self._is_in = self._is_in, self._is_in and self._is_over
        if was_in:
            self._left_s = time.monotonic()
        if link is not None:
            link.close()
            if not self._is_over and (was_in or why != self._told_reason):
                self._event("team_lost", member=self._other, reason=why)
                self._told_reason = why

    def _event(self, name: str, **figures: Any) -> None:  # noqa: ANN401 - of an event
        self._events.append((name, figures))

    @abstractmethod
    def _is_ready(self, seconds: float) -> bool:
        """Wait at most so long; say whether there is something to compute."""

    @abstractmethod
    def _part(self, most_rows: int, level: int, /) -> MicroBatch | None:
        """Compute something."""


class Leader(Place):
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
        self._rows_there = 0
        """Rows of this batch whose gradients the other member has."""
        self._constant: dict[str, Tensor] | None = None
        """The lent weights that are not trained; `None`: they were not asked for."""
        self._listens = Door(spec.listen, self._admits, self._event).address

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

    def forward(self, hidden: Tensor, given: Given, *, wants_gradient: bool) -> Tensor:
        """Return the hidden states after the lent blocks."""
        return self._asked(
            "forward",
            now=asdict(self._training.now),
            hidden=hidden.detach(),
            kinds=given.kinds,
            of_block=given.of_block,
            wants_gradient=wants_gradient,
        )

    def backward(self, gradient: Tensor) -> Tensor:
        """Return the gradient before the lent blocks from that after them."""
        before = self._asked("backward", gradient=gradient)
        if (now := self._forward_of) is not None:
            self._rows_there = now.done + now.rows
        return before

    def _is_ready(self, seconds: float) -> bool:
        if self._link is not None:
            if self._link.lost is None:
                return True
            raise LostError(self._link.lost)
        try:
            link, said = self._arrived.get(timeout=seconds)
        except queue.Empty:
            return False
        trainer = self._training
        is_same = said.get("step") == trainer.step and said.get("line") == self._line
        if not is_same and trainer.lent_state is None and trainer.step:
            link.close()
            trainer.void(
                f"{self._other} has lost its blocks of step {trainer.step}, which are in no "
                "checkpoint"
            )
            return True  # the next part says so, and the training goes back to its last checkpoint
        state = None if is_same else self._without_constant(trainer.lent_state)
        with self._at_work():  # the state may take long on the wire
            link.call("welcome", line=self._line, step=trainer.step, state=state)
        trainer.drop_sums()  # of which the other member may lack its own
        self._link, self._is_in = link, True
        self._event(
            "team_joined",
            member=self._other,
            step=trainer.step,
            from_step=said.get("step"),
            state_sent=state is not None,
        )
        return True

    def _part(self, most_rows: int, level: int, /) -> MicroBatch | None:
        return self._training.micro_batch(most_rows, level)

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
        now, is_trained = self._training.now, torch.is_grad_enabled()
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
        if not is_trained or not hidden.requires_grad:
            return self.forward(hidden, given, wants_gradient=False)
        self._forward_of = now
        return _Elsewhere.apply(hidden, given, self)  # type: ignore[no-any-return, no-untyped-call]

    def _asked(self, name: str, **content: Any) -> Tensor:  # noqa: ANN401 - as `Link.call`
        out = self._ask(name, **content)["tensor"]
        assert isinstance(out, Tensor)  # noqa: S101 - that is what it is asked for
        return out.to(self._training.device)

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
        trainer = self._training
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
        cut = self._training.cut
        if state is None or cut is None:
            return state
        weights = {name: each for name, each in state["weights"].items() if name in cut.trained}
        return {**state, "weights": weights}

    def _admits(self) -> Admission | None:
        """Let the other member in while this one computes."""
        orders = self._orders
        if orders is None or not self.is_attended():
            return None
        return Admission(orders.secret, partial(self._serve, orders))

    def _serve(self, orders: TeamOrders, connection: Connection) -> None:
        try:
            said = wire.greeting(connection, orders.generation, {self._other}, self._identity)
        except (LostError, TypeError):
            connection.release()
            raise
        with suppress(queue.Empty):  # it has come again since
            self._arrived.get_nowait()[0].close()
        self._arrived.put((Link(connection, self.is_attended), said))


class _Elsewhere(torch.autograd.Function):
    """What the lent blocks compute, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, given: Given, leader: Leader) -> Tensor:  # noqa: ANN401 - torch's own
        ctx.leader = leader
        return leader.forward(hidden, given, wants_gradient=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return ctx.leader.backward(gradient), None, None


@dataclass(frozen=True, slots=True)
class _Held:
    """A forward pass whose backward pass may come."""

    now: Pass
    hidden: Tensor
    out: Tensor


class Lender(Place):
    """The member that computes blocks for the leader."""

    lends = True

    def __init__(self, spec: TeamSpec, slot: str, tell: Callable[..., None]) -> None:
        super().__init__(spec, slot, tell)
        self._next: Call | None = None
        self._line = ""
        self._held: _Held | None = None
        self._again_s = 0.0
        self._has_looked = False
        """Whether a pass was looked at: what it does to the blocks beside its result."""
        self._wants_save = self._is_saved = False
        """Whether it is to rest, and whether the leader has saved what is here."""

    def close(self) -> None:
        """Do nothing: the leader has said that all is done."""

    def save_soon(self) -> None:
        """Compute until the leader has a checkpoint, which needs the state of this member."""
        self._wants_save = not self._is_saved

    @property
    def save_due(self) -> bool:  # type: ignore[override]
        """Whether the leader, if it is there, has not saved since this member is to rest."""
        return self._wants_save and self._is_in

    def _is_ready(self, seconds: float) -> bool:
        if self._link is None:
            self._join(seconds)
        elif self._next is None:
            self._next = self._link.take(seconds)
        return self._next is not None

    def _join(self, seconds: float) -> None:
        orders, now_s = self._orders, time.monotonic()
        self._next = self._held = None
        if orders is None or self._trainer is None or now_s < self._again_s:
            time.sleep(seconds)
            return
        self._again_s = now_s + _AGAIN_S
        connection = wire.connect(orders.address, orders.secret)
        connection.tell(
            Kind.HELLO,
            generation=orders.generation,
            slot=self._slot,
            identity=self._identity,
            step=self._training.step,
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
        elif answer is not None:
            self._done(computed_s=time.perf_counter() - began_s, **answer)
        return MicroBatch(rows=0, level=0, updated=call.name == "norm")

    def _enter(self, said: Mapping[str, Any]) -> None:
        """Have the state of the leader's step.

        Raises:
            UpdateInterruptedError: The leader begins anew, and so does this one.
        """
        trainer = self._training
        trainer.drop_sums()
        if said["state"] is not None:
            weights = {**trainer.model.state_dict(), **said["state"]["weights"]}
            trainer.load({**said["state"], "weights": weights})
        elif said["step"] != trainer.step:
            raise UpdateInterruptedError("the leader begins at step 0")
        self._line, self._is_in = said["line"], True

    def _answer(self, call: Call) -> dict[str, Any] | None:
        said, trainer = call.content, self._training
        if call.name == "forward":
            return {"tensor": self._forward(Pass(**said["now"]), said)}
        if call.name == "backward":
            return {"tensor": self._backward(said["gradient"])}
        if call.name == "state":
            return self._state_for(said)
        if call.name == "norm":
            trainer.finish(self._agree)
            return None
        raise LostError(f"it asks for {call.name!r}")

    def _state_for(self, said: Mapping[str, Any]) -> dict[str, Any]:
        trainer = self._training
        trained, constant = tensors.split_weights(trainer)
        state = {"state": {**trainer.state(), "weights": trained}}
        return {**state, "constant": constant} if said["constant"] else state

    def _drop(self, why: str) -> None:
        self._held, self._next, self._wants_save = None, None, False
        super()._drop(why)

    def _forward(self, now: Pass, said: Mapping[str, Any]) -> Tensor:
        trainer, self._held, self._is_saved = self._training, None, False
        if now.step != trainer.step:
            raise LostError(f"it computes step {now.step}, and this member has {trainer.step}")
        first: Tensor = said["hidden"].to(trainer.device)
        hidden, wants_gradient = first, said["wants_gradient"]
        first.requires_grad_(wants_gradient)
        kinds = map_tensors(lambda each: each.to(trainer.device), said["kinds"])
        assert trainer.cut is not None  # noqa: S101 - a lender has a part of a model
        before = _versions(trainer.cut.blocks)
        places = [] if self._has_looked else places_of(_modules_of(trainer.cut.blocks), small=True)
        numbers = Snapshot(places)
        many = len(list(tensors_in(kinds)))
        with (
            trainer.within(now),
            torch.set_grad_enabled(wants_gradient),
            trainer.arithmetic(widened=now.widened),
        ):
            for block, place in zip(trainer.cut.blocks, said["of_block"], strict=True):
                given = kinds[place]
                hidden = only_hidden(block(hidden, *given["args"], **given["kwargs"]))
        is_kept = not self._has_looked and (
            any(map(_keeps_graph, _modules_of(trainer.cut.blocks)))
            or many != len(list(tensors_in(kinds)))
        )
        if is_kept or before != _versions(trainer.cut.blocks) or numbers.changed():
            raise TaskError(
                "each pass changes the blocks of this model, or keeps something of it there, such "
                "as a buffer or a loss beside; so train.split: layers cannot divide it; do that "
                "after the step, or train on one card"
            )
        self._has_looked = self._has_looked or wants_gradient
        if wants_gradient:
            self._held = _Held(now, first, hidden)
        return hidden.detach()

    def _backward(self, gradient: Tensor) -> Tensor:
        held, self._held = self._held, None
        if held is None:
            raise LostError("it asks for a gradient of nothing")
        trainer = self._training
        gradient = gradient.to(trainer.device)
        with trainer.within(held.now) as sums:
            # The gradient of this sum at `out` is just what the leader has sent.
            sums.add(held.now.rows, (held.out * gradient).sum(), inputs=[held.hidden])
        before: Tensor | None = held.hidden.grad
        assert before is not None  # noqa: S101 - it was asked for
        return before

    def _done(self, **answer: Any) -> None:  # noqa: ANN401 - as `Link.call`
        """Answer the leader."""
        assert self._link is not None  # noqa: S101 - the call has come by it
        self._link.call("done", wants_save=self._wants_save, **answer)

    def _agree(self, _: float, norm: float) -> tuple[float, float]:
        """Tell the norm of the own gradients; return what the leader says of all."""
        assert self._link is not None  # noqa: S101 - the call has come by it
        self._done(norm=norm, rows=self._training.done_rows)
        said = self._link.take()
        if said is None or said.name != "commit":
            raise LostError("the step was not committed")
        return said.content["loss"], said.content["norm"]


def _versions(blocks: Sequence[nn.Module]) -> list[int]:
    """Return how often each buffer was written to."""
    return [buffer._version for block in blocks for buffer in block.buffers()]


def _modules_of(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for block in blocks for module in block.modules()]


def _keeps_graph(module: nn.Module) -> bool:
    """Whether a module has a tensor of the pass that it has computed."""
    return any(
        isinstance(each, Tensor) and each.grad_fn is not None for each in vars(module).values()
    )
