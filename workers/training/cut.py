"""A model whose blocks are divided between two processes: which of them, what is left of the model
in each, and how the states of both make that of the whole.

One process leads: it keeps what comes before the blocks, the first ones and the last one, head and
loss. The other lends its memory: it keeps the blocks between. So tied embeddings need no exchange,
and logits stay where the loss is. A block that is elsewhere stays in its list without weights,
because models look up what belongs to a block by its place there. Sends nothing
(`workers/team/layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias

from torch import Tensor, nn

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
    """Stands in the place of blocks that another process computes: hidden states pass through, and
    come from `compute` after the last one.
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
        self._in_tuple = False
        example.register_forward_hook(self._saw)
        for place, block in enumerate(blocks):
            setattr(block, "forward", partial(self._pass, place))  # noqa: B010 - mypy has methods constant

    def _saw(self, _: nn.Module, __: object, out: object) -> None:
        self._in_tuple = isinstance(out, tuple)

    def _pass(self, place: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a block's own
        named = dict(kwargs)
        hidden = args[0] if args else named.pop("hidden_states", None)
        if not isinstance(hidden, Tensor):
            raise TaskError(
                "a block is not called with hidden states as its first argument, so train.split: "
                "layers cannot divide this model; train it with split: data"
            )
        if place == 0:
            self._given = Given()
        self._given.add(args[1:], named)
        if place == self._last and self.compute is not None:
            hidden = self.compute(hidden, self._given)
        return (hidden,) if self._in_tuple else hidden


class Cut:
    """A model after it was cut: `model` itself is changed, and has the own weights alone."""

    def __init__(
        self, task: TrainTask, settings: TrainSettings, model: nn.Module, portion: Portion
    ) -> None:
        """Cut a whole model, which is still in host memory.

        Raises:
            TaskError: It has too few blocks, or shares weights between both parts.
        """
        blocks = list(task.blocks(model))
        if len(blocks) < _FEWEST_BLOCKS:
            raise TaskError(
                f"the model of {task.name} cannot be divided: it names {len(blocks)} blocks, and "
                f"train.split: layers needs {_FEWEST_BLOCKS} or more; name them in the TrainTask, "
                "or take a larger model"
            )
        self.leads = portion.leads
        self.forms = Identity.of(task.name, model.state_dict()).weights
        """Types and shapes of all weights."""
        trained = {name for name, each in model.named_parameters() if each.requires_grad}
        names = {each: name for name, each in model.named_parameters()}
        self._groups = [
            [names[each] for each in group["params"]]
            for group in task.new_optimizer(model, settings).param_groups
        ]
        """Names of the parameters in each group of the optimiser of the whole."""
        costs = [_cost_bytes(block.parameters()) for block in blocks]
        rest_bytes = _cost_bytes(model.parameters()) - sum(costs)
        first, end = middle_of(costs, rest_bytes, portion.budgets_bytes)
        middle = blocks[first:end]
        self.lent = LentBlocks(middle, blocks[0]) if portion.leads else None
        """What stands for the blocks that the other process computes for this one."""
        self.blocks = [*blocks[:first], *blocks[end:]] if portion.leads else middle
        """Those that are computed here."""
        self.lent_share = len(middle) / len(blocks)
        inside = {module for block in middle for module in block.modules()}
        prefixes = tuple(f"{name}." for name, each in model.named_modules() if each in middle)
        _refuse_shared(task, model, inside)
        self._of_middle = {name for name in self.forms if name.startswith(prefixes)}
        if not trained & self._of_middle or not trained - self._of_middle:
            raise TaskError(
                f"the model of {task.name} has nothing to train in one of its two parts; leave out "
                "train.split: layers"
            )
        for module in model.modules():
            if (module in inside) is portion.leads:
                module._parameters.clear()
                module._buffers.clear()

    def merged(self, own: State, other: State) -> dict[str, Any]:
        """Return the state of the whole from that of the leader and that of the other process."""
        weights = {**own["weights"], **other["weights"]}
        numbers = {name: number for number, name in enumerate(chain(*self._groups))}
        sides = ((own, self._names(of_middle=False)), (other, self._names(of_middle=True)))
        states: dict[int, Any] = {}
        groups: dict[int, Any] = {}
        for side, names in sides:
            for place, state in side["optimizer"]["state"].items():
                states[numbers[names[int(place)]]] = state
            given = iter(side["optimizer"]["param_groups"])
            for number, group in enumerate(self._groups):
                if set(group) & set(names):
                    params = [numbers[name] for name in group]
                    groups[number] = {**next(given), "params": params}
        return {
            **own,
            "weights": {name: weights[name] for name in self.forms},
            "optimizer": {
                "state": dict(sorted(states.items())),
                "param_groups": [groups[number] for number in sorted(groups)],
            },
        }

    def parts(self, whole: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the leader and that of the other process."""
        return self._part(whole, of_middle=False), self._part(whole, of_middle=True)

    def _part(self, whole: State, *, of_middle: bool) -> dict[str, Any]:
        names = self._names(of_middle=of_middle)
        numbers = {name: number for number, name in enumerate(chain(*self._groups))}
        own = {name: place for place, name in enumerate(names)}
        states = {int(number): state for number, state in whole["optimizer"]["state"].items()}
        groups = zip(self._groups, whole["optimizer"]["param_groups"], strict=True)
        return {
            **whole,
            "weights": {
                name: weight
                for name, weight in whole["weights"].items()
                if (name in self._of_middle) is of_middle
            },
            "optimizer": {
                "state": {
                    place: states[numbers[name]]
                    for name, place in own.items()
                    if numbers[name] in states
                },
                "param_groups": [
                    {**group, "params": [own[name] for name in of_group if name in own]}
                    for of_group, group in groups
                    if set(of_group) & set(names)
                ],
            },
        }

    def _names(self, *, of_middle: bool) -> list[str]:
        """Return the names of what one process trains, as its optimiser numbers them."""
        return [name for name in chain(*self._groups) if (name in self._of_middle) is of_middle]


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


def _refuse_shared(task: TrainTask, model: nn.Module, inside: set[nn.Module]) -> None:
    """Raise a `TaskError` if a weight belongs to both parts."""
    owners: dict[Tensor, bool] = {}
    for name, module in model.named_modules():
        for weight_name, weight in module.named_parameters(recurse=False):
            if owners.setdefault(weight, module in inside) != (module in inside):
                raise TaskError(
                    f"the model of {task.name} cannot be divided: {name}.{weight_name} is shared by "
                    "a block and what lies outside of it; train it with split: data"
                )
