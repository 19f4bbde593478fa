"""A model whose blocks are divided between two processes: which of them, what is left of the model
in each, and how the states of both make that of the whole.

One process leads: it keeps what comes before the blocks, the first ones and the last one, head and
loss. The other lends its memory: it keeps the blocks between. So tied embeddings need no exchange,
and logits stay where the loss is. A block that is elsewhere stays in its list without weights,
because models look up what belongs to a block by its place there. Sends nothing
(`workers/team/layers.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from workers.training.batches import map_tensors, tensors_in
from workers.training.checkpoints import Identity
from workers.training.errors import TaskError
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask

State: TypeAlias = Mapping[str, Any]
"""As `Trainer.state` gives it."""

#: The leader keeps the first block and the last one.
_FEWEST_BLOCKS: Final = 3

#: Of a number that is trained, beside the weight: its sum in fp32 and two states of Adam.
_TRAINED_BYTES: Final = 4 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Which part of a model a process gets."""

    leads: bool
    budgets_bytes: tuple[int, int]
    """What the leader may hold, and what the other one may."""


class OtherPart(Protocol):
    """The process that has the other blocks, as the one that leads asks it."""

    def agree(self, loss: float, norm: float, /) -> tuple[float, float]:
        """See `agreed` of `Accumulator.finish`: the other one updates as well."""

    def state(self) -> State:
        """Return its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass of the leader, as the other process must know it."""

    number: int
    step: int
    batch: int
    """Counts the beginnings of sums: another number begins them anew."""
    done: int
    """Rows of the batch that are in the sums."""
    first: int
    """Number of the first sample in the whole training, by which dropout is keyed."""
    rows: int
    recomputed: float
    """Share of the blocks that are computed again in the backward pass."""
    on_host_pct: int
    """Share of the optimiser's states that wait in host memory, where memory decides on it."""
    widened: bool
    """Whether it is computed in fp32 whatever the settings say."""
    trains: bool
    """Whether the model is in training mode."""


@dataclass(slots=True)
class Given:
    """What blocks get beside the hidden states."""

    kinds: list[dict[str, Any]] = field(default_factory=list)
    """`args` and `kwargs`, each once."""
    of_block: list[int] = field(default_factory=list)
    """The place in `kinds` for each block."""
    keys: list[object] = field(default_factory=list)

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Add what the next block gets."""
        kind = {"args": list(args), "kwargs": dict(kwargs)}
        key = [id(each) for each in tensors_in(kind)], repr(map_tensors(lambda _: None, kind))
        if key not in self.keys:
            self.keys.append(key)
            self.kinds.append(kind)
        self.of_block.append(self.keys.index(key))


class LentBlocks:
    """Stands in the place of blocks that another process computes: hidden states are taken before
    the first one, and come from `compute` after the last one. What lies between them is not a
    number, so that a model that uses it otherwise has a loss that is none.
    """

    def __init__(self, blocks: Sequence[nn.Module], example: nn.Module) -> None:
        """Take over the `forward` of each block. Another block is the `example` of whether blocks
        return tuples.
        """
        self.compute: Callable[[Tensor, Given], Tensor] | None = None
        """From hidden states to those after all blocks; `None`: they are not computed, as where
        operations are counted.
        """
        self._given, self._last = Given(), len(blocks) - 1
        self._before: Tensor | None = None
        """Hidden states before the first block."""
        self._between: Tensor | None = None
        self._beside: int | None = None
        """How many times blocks return `None` after hidden states; `None`: they return no tuple."""
        example.register_forward_hook(self._saw)
        for place, block in enumerate(blocks):
            setattr(block, "forward", partial(self._pass, place))  # noqa: B010 - mypy has methods constant

    def _saw(self, _: nn.Module, __: object, out: object) -> None:
        self._beside = len(out) - 1 if isinstance(out, tuple) else None
        only_hidden(out)

    def _pass(self, place: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a block's own
        named = dict(kwargs)
        hidden = args[0] if args else named.pop("hidden_states", None)
        if not isinstance(hidden, Tensor):
            raise TaskError(
                "a block is not called with hidden states as its first argument, so train.split: "
                "layers cannot divide this model; train it with split: data"
            )
        if place == 0:
            self._given, self._before = Given(), hidden
        elif hidden is not self._between or self._before is None:
            raise TaskError(
                "the model does more between its blocks than to hand on hidden states, as an "
                "encoder and a decoder do, so split: layers cannot divide it; use split: data"
            )
        self._given.add(args[1:], named)
        if place < self._last:
            out = self._between = hidden.new_full((), math.nan).expand(hidden.shape)
        else:
            before = self._before
            out = before if self.compute is None else self.compute(before, self._given)
            self._before = self._between = None
        return out if self._beside is None else (out, *[None] * self._beside)


def only_hidden(out: Any) -> Tensor:  # noqa: ANN401 - whatever a block returns
    """Return the hidden states of what a block returns.

    Raises:
        TaskError: It returns more than that.
    """
    hidden, *rest = out if isinstance(out, tuple) else (out,)
    if not isinstance(hidden, Tensor) or any(each is not None for each in rest):
        raise TaskError(
            "the blocks of this model return more than hidden states, so train.split: layers "
            "cannot divide it; train it with split: data"
        )
    return hidden


class Cut:
    """A model after it was cut: `model` itself is changed, and has the own weights alone."""

    def __init__(
        self, task: TrainTask, settings: TrainSettings, model: nn.Module, portion: Portion
    ) -> None:
        """Cut a whole model, which is still in host memory.

        Raises:
            TaskError: It has too few blocks, or shares weights between both parts.
        """
        blocks = list(dict.fromkeys(task.blocks(model)))
        if len(blocks) < _FEWEST_BLOCKS:
            raise TaskError(
                f"the model of {task.name} cannot be divided: it has {len(blocks)} blocks, and "
                f"train.split: layers needs {_FEWEST_BLOCKS} or more; name them in the TrainTask, "
                "or take a larger model"
            )
        self.leads = portion.leads
        self.forms = Identity.of(task.name, model.state_dict()).weights
        """Types and shapes of all weights."""
        self.trained = {name for name, each in model.named_parameters() if each.requires_grad}
        """Names of the weights that are trained, of both parts."""
        names = {each: name for name, each in model.named_parameters()}
        self.optimizer = task.new_optimizer(model, settings)
        """That of the whole. A parameter that is elsewhere is an empty one in it."""
        _refuse_optimizer(task, self.optimizer)
        costs = [_cost_bytes(block.parameters()) for block in blocks]
        rest_bytes = _cost_bytes(model.parameters()) - sum(costs)
        first, end = middle_of(costs, rest_bytes, portion.budgets_bytes)
        middle = blocks[first:end]
        self.lent_range = first, end
        """Numbers of the blocks that are lent: the first, and the one after the last."""
        self.lent = LentBlocks(middle, blocks[0]) if portion.leads else None
        """What stands for the blocks that the other process computes for this one."""
        self.blocks = [*blocks[:first], *blocks[end:]] if portion.leads else middle
        """Those that are computed here."""
        self.lent_share = len(middle) / len(blocks)
        inside = {module for block in middle for module in block.modules()}
        prefixes = tuple(f"{name}." for name, each in model.named_modules() if each in middle)
        _refuse_shared(task, model, blocks, middle)
        self._of_middle = {name for name in self.forms if name.startswith(prefixes)}
        in_last = any(each.requires_grad for each in blocks[-1].parameters())
        if not self.trained & self._of_middle or not in_last:
            raise TaskError(
                f"the model of {task.name} has nothing to train in the blocks that are lent, or in "
                "the last one; leave out train.split: layers"
            )
        self._numbers: dict[str, int] = {}
        """Of the trained weights, as the optimiser counts them."""
        for group in self.optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                name = names[parameter]
                self._numbers[name] = len(self._numbers)
                if (name in self._of_middle) is self.leads:
                    empty = nn.Parameter(torch.empty(0), requires_grad=False)
                    group["params"][place] = empty
        for module in model.modules():
            if (module in inside) is portion.leads:
                module._parameters.clear()
                module._buffers.clear()
                # A layer of 4 bits would look for its weight.
                setattr(module, "_save_to_state_dict", lambda *_, **__: None)  # noqa: B010 - a method

    def merged(self, own: State, other: State) -> dict[str, Any]:
        """Return the state of the whole from that of the leader and that of the other process."""
        first, second = self._part(own, of_middle=False), self._part(other, of_middle=True)
        weights = {**first["weights"], **second["weights"]}
        states = {**first["optimizer"]["state"], **second["optimizer"]["state"]}
        return {
            **own,
            "weights": {name: weights[name] for name in self.forms},
            "optimizer": {**own["optimizer"], "state": dict(sorted(states.items()))},
        }

    def parts(self, whole: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the leader and that of the other process."""
        return self._part(whole, of_middle=False), self._part(whole, of_middle=True)

    def _part(self, whole: State, *, of_middle: bool) -> dict[str, Any]:
        def is_there(name: str) -> bool:
            return (name in self._of_middle) is of_middle

        weights = {name: each for name, each in whole["weights"].items() if is_there(name)}
        there = {number for name, number in self._numbers.items() if is_there(name)}
        states = {int(number): state for number, state in whole["optimizer"]["state"].items()}
        own = {number: state for number, state in states.items() if number in there}
        return {**whole, "weights": weights, "optimizer": {**whole["optimizer"], "state": own}}


def middle_of(
    costs_bytes: Sequence[int], rest_bytes: int, budgets_bytes: tuple[int, int]
) -> tuple[int, int]:
    """Return the first and the end of the blocks that are lent: as many before the last one as
    leave the fuller of both processes least full. Pure.

    Args:
        costs_bytes: What each block takes.
        rest_bytes: What the model takes beside its blocks, which the leader has.
        budgets_bytes: What the leader may hold, and what the other one may.
    """
    last, all_bytes = len(costs_bytes) - 1, rest_bytes + sum(costs_bytes)

    def fullest(first: int) -> float:
        lent_bytes = sum(costs_bytes[first:last])
        return max((all_bytes - lent_bytes) / budgets_bytes[0], lent_bytes / budgets_bytes[1])

    return min(range(1, last), key=fullest), last


def _cost_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return what parameters take in a training, as far as it is there between two parts."""
    return sum(
        each.nbytes + (_TRAINED_BYTES * each.numel() if each.requires_grad else 0)
        for each in parameters
    )


def _refuse_optimizer(task: TrainTask, optimizer: Optimizer) -> None:
    """Raise a `TaskError` if an update of a parameter may depend on others."""
    home = type(optimizer).__module__
    if isinstance(optimizer, LBFGS) or not home.startswith(("torch.optim.", "bitsandbytes.")):
        raise TaskError(
            f"the optimiser of {task.name} ({type(optimizer).__name__}) may look at all parameters "
            "together, and train.split: layers divides them; take one of torch.optim that updates "
            "each by itself, or split: data"
        )


def _refuse_shared(
    task: TrainTask, model: nn.Module, blocks: Sequence[nn.Module], middle: Sequence[nn.Module]
) -> None:
    """Raise a `TaskError` if both parts have one module with a state, or blocks one dropout."""
    inside = {each for block in middle for each in block.modules()}
    outside, waiting = set[nn.Module](), [model]
    while waiting:
        module = waiting.pop()
        if module not in outside and module not in middle:
            outside.add(module)
            waiting += module.children()
    owners: dict[Tensor, bool] = {}
    calls = Counter(each for block in blocks for each in block.modules())
    for name, module in model.named_modules():
        state = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        is_inside = module in inside
        is_shared = (state and is_inside and module in outside) or any(
            owners.setdefault(each, is_inside) != is_inside for each in state
        )
        if is_shared or (isinstance(module, nn.Dropout) and calls[module] > 1):
            raise TaskError(
                f"the model of {task.name} cannot be divided: {name} ({type(module).__name__}) is "
                "shared by several of its blocks, or by one and what lies outside of it; train it "
                "with split: data"
            )
