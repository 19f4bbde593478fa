"""The optimiser, the moving average of the weights, and the update, which runs once or not at all.

States are allocated before the first step, so that the first update does not increase the memory of
a training. 8-bit states are those of bitsandbytes, with one scale per 256 states; matrices of less
than 4,096 numbers keep fp32 states.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Adam, AdamW, Optimizer

from workers.oom import classify
from workers.training.errors import TaskError, UpdateInterruptedError
from workers.training.host_memory import like, like_all, wait_asleep
from workers.training.settings import TrainSettings

_BETAS: Final = (0.9, 0.95)

#: Name of the method that allocates the states of torch's Adam and AdamW.
_ADAM_INIT_GROUP: Final = Adam._init_group.__qualname__


def adamw(parameters: Sequence[nn.Parameter], settings: TrainSettings, lr: float) -> Optimizer:
    """Make AdamW. Only matrices decay: biases and norms have one dimension.

    Raises:
        TaskError: 8-bit states are asked for, and bitsandbytes is not usable.
    """
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [
        {"params": some, "weight_decay": decay}
        for some, decay in ((matrices, settings.weight_decay), (others, 0.0))
        if some
    ]
    if settings.optimizer == "adamw-8bit":
        return _adamw_8bit(groups, lr)
    return AdamW(
        groups,
        lr=lr,
        betas=_BETAS,
        fused=settings.optimizer == "adamw-fused",
        foreach=settings.optimizer == "adamw-foreach",
    )


def _adamw_8bit(groups: Sequence[dict[str, Any]], lr: float) -> Optimizer:
    try:
        kind = importlib.import_module("bitsandbytes.optim").AdamW8bit
    except Exception as error:
        raise TaskError(
            f"train.optimizer is adamw-8bit, and bitsandbytes cannot be used here ({error}); "
            "pip install 'bitsandbytes>=0.50' there, or set train.optimizer: adamw-fused"
        ) from error
    with unset_fake_temporarily():  # it makes tables of real numbers, even in a plan
        optimizer: Optimizer = kind(groups, lr=lr, betas=_BETAS)
    return optimizer


def _is_bitsandbytes(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.")


def decay_rates(
    optimizer: Optimizer, model: nn.Module, blocks: Sequence[nn.Module], decay: float
) -> None:
    """Set the learning rate of each block to `decay` times that of the next block, which preserves
    what the model has learned before.

    As in ULMFiT (Howard and Ruder, 2018, "discriminative fine-tuning"). Modules registered before
    the first block, such as an embedding, count as below all blocks. Splits the groups of the
    optimiser, which must have no states yet.

    Raises:
        TaskError: The task names no blocks.
    """
    if not blocks:
        raise TaskError(
            "train.layer_decay needs a task that names its blocks; name them, or set "
            "train.layer_decay to 1.0"
        )
    of_block = {
        parameter: len(blocks) - place
        for place, block in enumerate(blocks)
        for parameter in block.parameters()
    }
    depth: dict[nn.Parameter, int] = {}  # 0 after the last block, 1 in it, and so on
    outside = len(blocks) + 1
    for parameter in model.parameters():
        outside = 0 if parameter in of_block else outside
        depth[parameter] = of_block.get(parameter, outside)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        for below in sorted({depth[parameter] for parameter in group["params"]}):
            split = {**group, "lr": group["lr"] * decay**below}
            for key in split.keys() & {"params", "param_names"}:
                pairs = zip(group["params"], group[key], strict=True)
                split[key] = [value for parameter, value in pairs if depth[parameter] == below]
            groups.append(split)
    optimizer.param_groups[:] = groups


def refuse_closure(optimizer: Any) -> None:  # noqa: ANN401 - also a wrapped one
    """Raise a `TaskError` if an optimiser computes the loss itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TaskError(
            f"{type(optimizer).__name__} computes the loss several times in a step, which cannot "
            "be cut into parts; use an optimiser whose step() needs no closure, such as AdamW"
        )


def allocate_states(optimizer: Any, on_host: Set[nn.Parameter] = frozenset()) -> None:  # noqa: ANN401 - with methods of its own
    """Allocate the states that an Adam of torch or bitsandbytes would allocate in its first step.
    Does nothing for other optimisers.

    The states of the parameters `on_host` are allocated in host memory; see `host_states`.
    """
    is_8bit = _is_bitsandbytes(optimizer)
    if is_8bit:
        # Otherwise its first step only moves states to the card (Optimizer8bit.step, to_gpu).
        optimizer.check_overrides()
        optimizer.initialized = True
    # Compared by name: a subclass may have other states, and the compiler wraps this method.
    elif getattr(getattr(optimizer, "_init_group", None), "__qualname__", "") != _ADAM_INIT_GROUP:
        return
    places = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            states = optimizer.state[parameter]
            if (states and not _has_other_type(states, parameter)) or not parameter.requires_grad:
                continue
            states.clear()
            if is_8bit:
                optimizer.init_state(group, parameter, number, place)
            else:
                # Without a gradient it would get no states.
                gradient, parameter.grad = parameter.grad, parameter.detach()
                optimizer._init_group({**group, "params": [parameter]}, *([] for _ in range(6)))
                parameter.grad = gradient
            # The states of only one parameter at a time are on the device.
            own = states_of(optimizer, parameter) if parameter in on_host else {}
            for name, tensor in own.items():
                states[name] = torch.empty_like(tensor, device="meta")
                places.append((states, name))
    on_card = any(parameter.is_cuda for parameter in on_host)
    hosts = like_all([states[name] for states, name in places], pinned=on_card)
    for (states, name), host in zip(places, hosts, strict=True):
        states[name] = host.zero_()


def _has_other_type(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Whether states from before the first step have another type than their parameter has now."""
    moment = state.get("exp_avg")
    moved = isinstance(moment, Tensor) and moment.dtype != parameter.dtype
    return moved and not state["step"]


def states_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the states that can move to the host, those as large as the parameter: no step counts,
    scales or shared tables.
    """
    least = max(2, parameter.numel())
    return {
        name: tensor
        for name, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, Tensor) and tensor.numel() >= least
    }


def number_attributes(optimizer: Optimizer) -> dict[str, float]:
    """Return the numbers among an optimiser's attributes; no `state_dict` contains them."""
    attributes = vars(optimizer).items()
    return {name: value for name, value in attributes if type(value) in {int, float}}


def update_bytes(optimizer: Optimizer, parameters: Sequence[Tensor], *, on_card: bool) -> int:
    """Return the bytes that a step of AdamW allocates (torch/optim/adam.py); a guess for others."""
    if _is_bitsandbytes(optimizer):
        # On a CPU: five fp32 copies of one parameter, namely both states, the gradient, a root and
        # a quotient (bitsandbytes/backends/cpu/ops.py, 0.50).
        return 0 if on_card else 5 * 4 * max((weight.numel() for weight in parameters), default=0)
    sizes = [0, *(weight.nbytes for weight in parameters)]
    if optimizer.defaults.get("fused"):
        return 0
    if optimizer.defaults.get("foreach"):
        return sum(sizes)  # the roots of all second moments at once
    return 2 * max(sizes)  # of one parameter, the root and the root divided


def load_states(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a saved `state_dict`, into the existing tensors if they match."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    current = {
        place: optimizer.state[parameter]
        for place, parameter in enumerate(parameters)
        if optimizer.state.get(parameter)
    }
    states = {int(place): _flattened(state) for place, state in saved["state"].items() if state}
    values = [
        (current.get(place, {}), name, value)
        for place, state in states.items()
        for name, value in state.items()
    ]
    if current.keys() == states.keys() and all(
        _same_form(state.get(name), value) for state, name, value in values
    ):
        for state, name, value in values:
            if not isinstance(value, Tensor):
                state[name] = value
            elif value is not state[name]:
                state[name].copy_(value)
    else:
        # Copied, because torch would otherwise use the saved tensors themselves, and change them.
        numbered = {int(place): state for place, state in saved["state"].items()}
        copies = copy.deepcopy({"state": numbered, "param_groups": saved["param_groups"]})
        optimizer.state.clear()  # so that memory never holds both
        optimizer.load_state_dict(copies)


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return states by name; bitsandbytes saves most of them in a nested mapping."""
    flat = {name: value for name, value in state.items() if not isinstance(value, Mapping)}
    for value in state.values():
        flat |= value if isinstance(value, Mapping) else {}
    return flat


def _same_form(current: object, value: object) -> bool:
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        return current.shape == value.shape
    return type(current) is type(value) is int


class Average:
    """An exponential moving average of the weights, on their device or in host memory.

    In host memory it takes no device memory, and each update copies all weights to the host. The
    weights stay the same to the bit. On a card the average may differ in the last bit, because the
    host computes it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], decay: float, *, on_host: bool = False
    ) -> None:
        """Initialise the average with the weights."""
        self._parameters = parameters
        self._decay = decay
        self.on_host = on_host
        weights = [parameter.detach() for parameter in parameters]
        new = like_all(weights) if on_host else [torch.empty_like(weight) for weight in weights]
        self.tensors: list[Tensor] = [
            own.copy_(weight) for own, weight in zip(new, weights, strict=True)
        ]
        self._staging: Tensor | None = None
        if on_host and parameters[0].is_cuda:
            largest = max(weights, key=lambda weight: weight.nbytes)
            self._staging = like(largest.flatten())

    @torch.no_grad()
    def load(self, tensors: Sequence[Tensor]) -> None:
        """Load a saved average."""
        torch._foreach_copy_(self.tensors, list(tensors))

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights. Allocates nothing on the device."""
        if self._staging is None:
            torch._foreach_lerp_(self.tensors, list(self._parameters), 1 - self._decay)
            return
        # Without this, the first copy would busy-wait for the whole update.
        wait_asleep(self._parameters[0].device)
        for average, weight in zip(self.tensors, self._parameters, strict=True):
            average.lerp_(self._on_host(weight, average), 1 - self._decay)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Give the model the averaged weights within the `with` block."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        for place, parameter in enumerate(self._parameters):
            if self.on_host:
                average = self.tensors[place]  # stays in its shared block
                weight = self._on_host(parameter, average)
                parameter.copy_(average)
                average.copy_(weight)
            else:
                self.tensors[place], parameter.data = parameter.data, self.tensors[place]

    def _on_host(self, weight: Tensor, mean: Tensor) -> Tensor:
        """Return a copy of a weight on the host, valid until the next call."""
        if self._staging is None or weight.dtype != self._staging.dtype:
            return like(weight.detach()).copy_(weight)
        return self._staging[: weight.numel()].as_strided(mean.shape, mean.stride()).copy_(weight)


class Update:
    """Updates the weights, and records an interrupted update, which is never repeated."""

    def __init__(
        self,
        step: Callable[[], object],
        average: Average | None = None,
    ) -> None:
        """Set the function that does the optimiser's step, and the average to update after it."""
        self._step = step
        self.interrupted = False
        """Whether an update began and did not end: weights, moments, average belong to no step."""
        self.why_interrupted = "an update of the weights was cut off"
        self._average = average

    def check(self) -> None:
        """Raise `UpdateInterruptedError` if the weights belong to no step."""
        if self.interrupted:
            raise UpdateInterruptedError(
                f"{self.why_interrupted}, so the training cannot continue from its weights; load "
                "the last checkpoint"
            )

    def run(self, pairs: Sequence[tuple[nn.Parameter, Tensor]], factor: float) -> None:
        """Do one step with the gradient of each parameter, times `factor`.

        Raises:
            UpdateInterruptedError: Memory ran out in this update, or in an earlier one.
        """
        self.check()
        self.interrupted = True
        failure: str | None = None
        try:
            self._apply(pairs, factor)
        except Exception as error:
            verdict = classify(error)
            if not verdict.is_out_of_memory:
                raise
            failure = verdict.text
        finally:
            for parameter, _ in pairs:  # as `zero_grad` leaves them
                parameter.grad = None
        # Outside the handler: the new error must hold no tensor, nor the old one as its context.
        if failure is not None:
            raise UpdateInterruptedError(
                f"memory ran out while the weights were being updated ({failure}); the update is "
                "not run again, because a part of it may have been done; load the last checkpoint"
            )
        self.interrupted = False

    @torch.no_grad()
    def _apply(self, pairs: Sequence[tuple[nn.Parameter, Tensor]], factor: float) -> None:
        if factor != 1 and pairs:
            torch._foreach_mul_([gradient for _, gradient in pairs], factor)
        for parameter, gradient in pairs:
            # No copy, unless the weights have half precision.
            parameter.grad = gradient.to(parameter.dtype)
        self._step()
        if self._average is not None:
            self._average.update()
