"""The optimiser, the average of the weights, and the update, which is done once or not at all.

The states are allocated before the first step, so that the memory of a training does not grow in
its first update.

States of 8 bits are those of bitsandbytes, with a scale for each 256 states; matrices of less than
4,096 numbers stay in fp32.
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

#: What makes the states of torch's Adam and AdamW.
_ADAMS: Final = Adam._init_group.__qualname__


def adamw(parameters: Sequence[nn.Parameter], settings: TrainSettings, lr: float) -> Optimizer:
    """Make AdamW.

    Only matrices decay: biases and norms have one dimension.

    Raises:
        TaskError: Its states shall have 8 bits, and no package for that is installed.
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
    with unset_fake_temporarily():  # it makes tables of numbers, also for a plan
        optimizer: Optimizer = kind(groups, lr=lr, betas=_BETAS)
    return optimizer


def _is_bitsandbytes(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.")


def decay_rates(
    optimizer: Optimizer, model: nn.Module, blocks: Sequence[nn.Module], decay: float
) -> None:
    """Give each block the rate of the block after it, times `decay`, which keeps what a model has
    learned before.

    As in ULMFiT (Howard and Ruder, 2018, "discriminative fine-tuning"). What the model registers
    before its first block, such as an embedding, is below all blocks. The groups of the optimiser,
    which has no states yet, are split.

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
            own = {**group, "lr": group["lr"] * decay**below}
            for key in own.keys() & {"params", "param_names"}:
                pairs = zip(group["params"], group[key], strict=True)
                own[key] = [value for parameter, value in pairs if depth[parameter] == below]
            groups.append(own)
    optimizer.param_groups[:] = groups


def refuse_closure(optimizer: Any) -> None:  # noqa: ANN401 - also a wrapped one
    """Raise a `TaskError` where an optimiser calls the loss itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TaskError(
            f"{type(optimizer).__name__} computes the loss several times in a step, which cannot "
            "be cut into parts; use an optimiser whose step() needs no closure, such as AdamW"
        )


def allocate_states(optimizer: Any, on_host: Set[nn.Parameter] = frozenset()) -> None:  # noqa: ANN401 - with methods of its own
    """Have an Adam, of torch or of bitsandbytes, allocate what it would in its first step. Of other
    optimisers nothing is known.

    The states of `on_host` are allocated in host memory; see `host_states`.
    """
    is_8bit = _is_bitsandbytes(optimizer)
    if is_8bit:
        # The rest of what its first step does is to bring every state to the card
        # (Optimizer8bit.step and to_gpu).
        optimizer.check_overrides()
        optimizer.initialized = True
    # A subclass may have other states; by name, since the compiler wraps this method.
    elif getattr(getattr(optimizer, "_init_group", None), "__qualname__", "") != _ADAMS:
        return
    places = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            states = optimizer.state[parameter]
            if (states and not _is_outdated(states, parameter)) or not parameter.requires_grad:
                continue
            states.clear()
            if is_8bit:
                optimizer.init_state(group, parameter, number, place)
            else:
                gradient, parameter.grad = parameter.grad, parameter.detach()  # else it is left out
                optimizer._init_group({**group, "params": [parameter]}, *([] for _ in range(6)))
                parameter.grad = gradient
            # One parameter's states at a time are on the device.
            own = states_of(optimizer, parameter) if parameter in on_host else {}
            for name, tensor in own.items():
                states[name] = torch.empty_like(tensor, device="meta")
                places.append((states, name))
    on_card = any(parameter.is_cuda for parameter in on_host)
    hosts = like_all([states[name] for states, name in places], pinned=on_card)
    for (states, name), host in zip(places, hosts, strict=True):
        states[name] = host.zero_()


def _is_outdated(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Whether states before the first step are those of another type or device than now."""
    moment = state.get("exp_avg")
    moved = isinstance(moment, Tensor) and moment.dtype != parameter.dtype
    return moved and not state["step"]


def states_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the states that can be on the host, which grow with the parameter: no steps, scales or
    shared tables.
    """
    least = max(2, parameter.numel())
    return {
        name: tensor
        for name, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, Tensor) and tensor.numel() >= least
    }


def own_numbers(optimizer: Optimizer) -> dict[str, float]:
    """Return the numbers that are attributes of an optimiser itself: no saved state has them."""
    own = vars(optimizer).items()
    return {name: value for name, value in own if type(value) in {int, float}}


def update_bytes(optimizer: Optimizer, parameters: Sequence[Tensor], *, on_card: bool) -> int:
    """Return what a step of AdamW allocates (torch/optim/adam.py); of others little is known."""
    if _is_bitsandbytes(optimizer):
        # On a CPU five fp32 copies of one parameter: both states and the gradient, a root and a
        # quotient (bitsandbytes/backends/cpu/ops.py, 0.50).
        return 0 if on_card else 5 * 4 * max((weight.numel() for weight in parameters), default=0)
    sizes = [0, *(weight.nbytes for weight in parameters)]
    if optimizer.defaults.get("fused"):
        return 0
    if optimizer.defaults.get("foreach"):
        return sum(sizes)  # the roots of all second moments at once
    return 2 * max(sizes)  # of one parameter, the root and the root divided


def load_states(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Go on from a saved `state_dict`; into the tensors that are there, if they are alike."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {
        place: optimizer.state[parameter]
        for place, parameter in enumerate(parameters)
        if optimizer.state.get(parameter)
    }
    states = {int(place): _flat(state) for place, state in saved["state"].items() if state}
    pairs = [
        (own.get(place, {}), name, value)
        for place, state in states.items()
        for name, value in state.items()
    ]
    if own.keys() == states.keys() and all(
        _alike(state.get(name), value) for state, name, value in pairs
    ):
        for state, name, value in pairs:
            if not isinstance(value, Tensor):
                state[name] = value
            elif value is not state[name]:
                state[name].copy_(value)
    else:
        # Copied: torch would go on with the very tensors that were saved, and change them.
        numbered = {int(place): state for place, state in saved["state"].items()}
        copies = copy.deepcopy({"state": numbered, "param_groups": saved["param_groups"]})
        optimizer.state.clear()  # so that memory never holds both
        optimizer.load_state_dict(copies)


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return states by their own names: bitsandbytes saves most of them in an inner mapping."""
    flat = {name: value for name, value in state.items() if not isinstance(value, Mapping)}
    for value in state.values():
        flat |= value if isinstance(value, Mapping) else {}
    return flat


def _alike(mine: object, value: object) -> bool:
    if isinstance(mine, Tensor) and isinstance(value, Tensor):
        return mine.shape == value.shape
    return type(mine) is type(value) is int


class Average:
    """An exponential moving average of the weights, on their device or in host memory.

    In host memory it takes nothing of the device, and each update copies all weights there. The
    weights are the same to the bit; the average may differ in the last bit on a card, where the
    host then computes it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], decay: float, *, on_host: bool = False
    ) -> None:
        """Begin at the weights."""
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
        """Go on from these."""
        torch._foreach_copy_(self.tensors, list(tensors))

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights. Allocates nothing on the device."""
        if self._staging is None:
            torch._foreach_lerp_(self.tensors, list(self._parameters), 1 - self._decay)
            return
        # The first copy would wait for the whole update, in a loop.
        wait_asleep(self._parameters[0].device)
        for own, weight in zip(self.tensors, self._parameters, strict=True):
            own.lerp_(self._on_host(weight, own), 1 - self._decay)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Let the model compute with the average for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for place, parameter in enumerate(self._parameters):
            if self.on_host:
                own = self.tensors[place]  # which stays, with the block that it shares
                weight = self._on_host(parameter, own)
                parameter.copy_(own)
                own.copy_(weight)
            else:
                self.tensors[place], parameter.data = parameter.data, self.tensors[place]

    def _on_host(self, weight: Tensor, own: Tensor) -> Tensor:
        """Return a copy of a weight on the host, until the next call."""
        if self._staging is None or weight.dtype != self._staging.dtype:
            return like(weight.detach()).copy_(weight)
        return self._staging[: weight.numel()].as_strided(own.shape, own.stride()).copy_(weight)


class Update:
    """Changes the weights, and says whether it was cut off. What was cut off is never run again."""

    def __init__(
        self,
        step: Callable[[], object],
        average: Average | None = None,
    ) -> None:
        """Take what does the step of the optimiser, and what averages the weights."""
        self._step = step
        self.cut = False
        """Whether weights, moments and average belong to no step: an update began and did not end.
        """
        self.why_cut = "an update of the weights was cut off"
        self._average = average

    def check(self) -> None:
        """Raise `UpdateInterruptedError` if weights belong to no step."""
        if self.cut:
            raise UpdateInterruptedError(
                f"{self.why_cut}, so the training cannot go on from its weights; load the last "
                "checkpoint"
            )

    def run(self, pairs: Sequence[tuple[nn.Parameter, Tensor]], factor: float) -> None:
        """Do one step with the gradient of each parameter, times `factor`.

        Raises:
            UpdateInterruptedError: Memory ran out in it, now or before.
        """
        self.check()
        self.cut = True
        failure: str | None = None
        try:
            self._change(pairs, factor)
        except Exception as error:
            verdict = classify(error)
            if not verdict.is_out_of_memory:
                raise
            failure = verdict.text
        finally:
            for parameter, _ in pairs:  # as `zero_grad` leaves them
                parameter.grad = None
        # Outside the handler: the error must hold no tensor, and must not look like its cause.
        if failure is not None:
            raise UpdateInterruptedError(
                f"memory ran out while the weights were being updated ({failure}); the update is "
                "not run again, because a part of it may have been done; load the last checkpoint"
            )
        self.cut = False

    @torch.no_grad()
    def _change(self, pairs: Sequence[tuple[nn.Parameter, Tensor]], factor: float) -> None:
        if factor != 1 and pairs:
            torch._foreach_mul_([gradient for _, gradient in pairs], factor)
        for parameter, gradient in pairs:
            # Itself, unless the weights are half precision.
            parameter.grad = gradient.to(parameter.dtype)
        self._step()
        if self._average is not None:
            self._average.update()
