"""Divides the blocks of a model between two processes: chooses the blocks, removes the others'
weights from each process, and merges the states of both into that of the whole model.

One process leads: it keeps what comes before the blocks, the first blocks, the last block, the head
and the loss. The other process lends its memory: it keeps the blocks between. So tied embeddings
need no exchange, and logits stay where the loss is. A block that the other process computes stays
in its list without weights, because models look up settings of a block by its place there. Sends
nothing (`workers/team/layers.py` does).
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
"""The state of a training, as returned by `Trainer.state`."""

#: The leader keeps the first and the last block, and lends at least one.
_FEWEST_BLOCKS: Final = 3

#: Bytes for each trained number beside the weight: its sum in fp32 and two states of Adam.
_TRAINED_BYTES: Final = 4 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Which part of a model a process gets."""

    leads: bool
    budgets_bytes: tuple[int, int]
    """Memory budgets of the leader and of the other process."""


class OtherPart(Protocol):
    """The process that has the other blocks, as the leader calls it."""

    def agree(self, loss: float, norm: float, /) -> tuple[float, float]:
        """See `agreed` of `Accumulator.finish`; the other process updates its weights as well."""

    def state(self) -> State:
        """Return the state of that process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass of the leader, as the other process must know it."""

    number: int
    step: int
    batch: int
    """`Accumulator.beginnings` of the leader: the other process begins its sums when it changes."""
    done: int
    """Rows of the batch that are in the sums."""
    first: int
    """Number of the first sample in the training; it keys dropout."""
    rows: int
    recomputed: float
    """Share of the blocks that are recomputed in the backward pass."""
    on_host_pct: int
    """Per cent of the optimiser's states in host memory, if free memory decides it."""
    widened: bool
    """Whether the pass is computed in fp32 regardless of the settings."""
    trains: bool
    """Whether the model is in training mode."""


@dataclass(slots=True)
class BlockArgs:
    """The inputs of blocks besides the hidden states."""

    kinds: list[dict[str, Any]] = field(default_factory=list)
    """Distinct inputs, each with `args` and `kwargs`."""
    of_block: list[int] = field(default_factory=list)
    """The place in `kinds` for each block."""
    keys: list[object] = field(default_factory=list)

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Add the inputs of the next block."""
        kind = {"args": list(args), "kwargs": dict(kwargs)}
        key = [id(each) for each in tensors_in(kind)], repr(map_tensors(lambda _: None, kind))
        if key not in self.keys:
            self.keys.append(key)
            self.kinds.append(kind)
        self.of_block.append(self.keys.index(key))


class LentBlocks:
    """Replaces the `forward` of blocks that another process computes: it takes the hidden states
    before the first block, and returns the result of `compute` after the last. Between blocks it
    passes NaN, so that the loss becomes NaN if the model uses those states otherwise.
    """

    def __init__(self, blocks: Sequence[nn.Module], example: nn.Module) -> None:
        """Replace the `forward` of each block. `example`, a block that stays, shows whether blocks
        return tuples.
        """
        self.compute: Callable[[Tensor, BlockArgs], Tensor] | None = None
        """Computes the hidden states after all blocks; `None`: returns them as they are, as when
        operations are counted.
        """
        self._inputs, self._last = BlockArgs(), len(blocks) - 1
        self._before: Tensor | None = None
        """Hidden states before the first block."""
        self._between: Tensor | None = None
        self._extra_outputs: int | None = None
        """Number of `None` that blocks return after hidden states; `None`: they return no tuple."""
        example.register_forward_hook(self._note_output)
        for place, block in enumerate(blocks):
            setattr(block, "forward", partial(self._pass, place))  # noqa: B010 - mypy has methods constant

    def _note_output(self, _: nn.Module, __: object, out: object) -> None:
        self._extra_outputs = len(out) - 1 if isinstance(out, tuple) else None
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
            self._inputs, self._before = BlockArgs(), hidden
        elif hidden is not self._between or self._before is None:
            raise TaskError(
                "the model does more between its blocks than pass on hidden states, as an "
                "encoder and a decoder do, so split: layers cannot divide it; use split: data"
            )
        self._inputs.add(args[1:], named)
        if place < self._last:
            out = self._between = hidden.new_full((), math.nan).expand(hidden.shape)
        else:
            before = self._before
            out = before if self.compute is None else self.compute(before, self._inputs)
            self._before = self._between = None
        return out if self._extra_outputs is None else (out, *[None] * self._extra_outputs)


def only_hidden(out: Any) -> Tensor:  # noqa: ANN401 - whatever a block returns
    """Return the hidden states from the output of a block.

    Raises:
        TaskError: The block returns more than that.
    """
    hidden, *rest = out if isinstance(out, tuple) else (out,)
    if not isinstance(hidden, Tensor) or any(each is not None for each in rest):
        raise TaskError(
            "the blocks of this model return more than hidden states, so train.split: layers "
            "cannot divide it; train it with split: data"
        )
    return hidden


class Cut:
    """A model after the cut: `model` itself is changed, and keeps only its own weights."""

    def __init__(
        self, task: TrainTask, settings: TrainSettings, model: nn.Module, portion: Portion
    ) -> None:
        """Cut a whole model in host memory.

        Raises:
            TaskError: The model has too few blocks, or its parts, modules or optimiser forbid it.
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
        """Names of the trained weights of both processes."""
        names = {each: name for name, each in model.named_parameters()}
        self.optimizer = task.new_optimizer(model, settings)
        """Optimiser of the whole model, with empty tensors for the other process's parameters."""
        _refuse_optimizer(task, self.optimizer)
        costs = [_cost_bytes(block.parameters()) for block in blocks]
        rest_bytes = _cost_bytes(model.parameters()) - sum(costs)
        first, end = choose_lent_range(costs, rest_bytes, portion.budgets_bytes)
        middle = blocks[first:end]
        self.lent_range = first, end
        """The numbers of the lent blocks: the first, and the one after the last."""
        self.lent = LentBlocks(middle, blocks[0]) if portion.leads else None
        """Replaces the blocks that the other process computes for this one."""
        self.blocks = [*blocks[:first], *blocks[end:]] if portion.leads else middle
        """The blocks that this process computes."""
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
        """The optimiser's numbers of the trained weights, keyed by name."""
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
                # A layer of 4 bits would need its weight here.
                setattr(module, "_save_to_state_dict", lambda *_, **__: None)  # noqa: B010 - a method

    def merged(self, own: State, other: State) -> dict[str, Any]:
        """Return the state of the whole from those of the leader (`own`) and the other process."""
        first, second = self._part(own, of_middle=False), self._part(other, of_middle=True)
        weights = {**first["weights"], **second["weights"]}
        states = {**first["optimizer"]["state"], **second["optimizer"]["state"]}
        return {
            **own,
            "weights": {name: weights[name] for name in self.forms},
            "optimizer": {**own["optimizer"], "state": dict(sorted(states.items()))},
        }

    def parts(self, whole: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the state of the whole model into those of the leader and of the other process."""
        return self._part(whole, of_middle=False), self._part(whole, of_middle=True)

    def _part(self, whole: State, *, of_middle: bool) -> dict[str, Any]:
        def is_in_part(name: str) -> bool:
            return (name in self._of_middle) is of_middle

        weights = {name: each for name, each in whole["weights"].items() if is_in_part(name)}
        there = {number for name, number in self._numbers.items() if is_in_part(name)}
        states = {int(number): state for number, state in whole["optimizer"]["state"].items()}
        own = {number: state for number, state in states.items() if number in there}
        return {**whole, "weights": weights, "optimizer": {**whole["optimizer"], "state": own}}


def choose_lent_range(
    costs_bytes: Sequence[int], rest_bytes: int, budgets_bytes: tuple[int, int]
) -> tuple[int, int]:
    """Return the first lent block and the one after the last. They end before the last block of
    all, and balance both processes: the larger load, relative to its budget, is smallest. Pure.

    Args:
        costs_bytes: Memory of each block.
        rest_bytes: Memory of the rest of the model, which the leader keeps.
        budgets_bytes: Memory budgets of the leader and of the other process.
    """
    last, all_bytes = len(costs_bytes) - 1, rest_bytes + sum(costs_bytes)

    def fullest(first: int) -> float:
        lent_bytes = sum(costs_bytes[first:last])
        return max((all_bytes - lent_bytes) / budgets_bytes[0], lent_bytes / budgets_bytes[1])

    return min(range(1, last), key=fullest), last


def _cost_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the memory of parameters in a training, without what exists only during a part."""
    return sum(
        each.nbytes + (_TRAINED_BYTES * each.numel() if each.requires_grad else 0)
        for each in parameters
    )


def _refuse_optimizer(task: TrainTask, optimizer: Optimizer) -> None:
    """Raise a `TaskError` if the update of a parameter may depend on others."""
    home = type(optimizer).__module__
    if isinstance(optimizer, LBFGS) or not home.startswith(("torch.optim.", "bitsandbytes.")):
        raise TaskError(
            f"the optimiser of {task.name} ({type(optimizer).__name__}) may combine all "
            "parameters, and train.split: layers divides them; take one of torch.optim that "
            "updates each by itself, or split: data"
        )


def _refuse_shared(
    task: TrainTask, model: nn.Module, blocks: Sequence[nn.Module], middle: Sequence[nn.Module]
) -> None:
    """Raise a `TaskError` if both parts share a module with a state, or blocks share a dropout."""
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
                "shared by several of its blocks, or by a block and other modules; train it "
                "with split: data"
            )
