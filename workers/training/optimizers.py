"""The optimiser and the update, which is done once or not at all.

The states are allocated before the first step, so that the memory of a training does not grow in
its first update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from workers.oom import classify
from workers.settings import FailureKind
from workers.training import eight_bit
from workers.training.averaging import Average
from workers.training.errors import UpdateInterruptedError
from workers.training.host_memory import like_all
from workers.training.settings import TrainSettings

_BETAS: Final = (0.9, 0.95)


def adamw(
    parameters: Sequence[nn.Parameter], settings: TrainSettings, lr: float, *, planned: bool = False
) -> Optimizer:
    """Make AdamW, or what only has its memory if that is to be `planned`.

    Only matrices decay: biases and norms have one dimension.

    Raises:
        TaskError: Its states shall have 8 bits, and no package for that is installed.
    """
    groups = [
        {
            "params": [each for each in parameters if each.dim() > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "adamw-8bit":
        return (
            eight_bit.PlannedAdamW8bit(groups)
            if planned
            else eight_bit.adamw_8bit(groups, lr, _BETAS)
        )
    return AdamW(
        groups,
        lr=lr,
        betas=_BETAS,
        fused=settings.optimizer == "adamw-fused",
        foreach=settings.optimizer == "adamw-foreach",
    )


def allocate_states(optimizer: Optimizer, on_host: Set[nn.Parameter] = frozenset()) -> None:
    """Allocate what an Adam would allocate in its first step. Of other optimisers nothing is known.

    The states of `on_host` are allocated in host memory; see `host_states`.
    """
    if eight_bit.is_bitsandbytes(optimizer):
        for parameter, states in eight_bit.allocate(optimizer):
            if parameter in on_host:  # one parameter's states at a time are on the device
                states.update(_without_data(large(states, parameter)))
    for group in optimizer.param_groups if isinstance(optimizer, Adam) else ():
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        for parameter in group["params"]:
            if not optimizer.state[parameter] and parameter.requires_grad:
                # Where torch itself keeps the number of steps: on the device only if a kernel reads
                # it.
                device = parameter.device if group["fused"] or group["capturable"] else None
                step = torch.zeros((), dtype=torch.float32, device=device)
                state = dict.fromkeys(names, parameter.detach())
                state = _without_data(state) if parameter in on_host else _zeros_like(state)
                optimizer.state[parameter] = {"step": step, **state}
    _fill_on_host(optimizer, on_host)


def large(states: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the states that grow with the parameter.

    Not the number of steps, scales, or a table that others share.
    """
    least = max(2, parameter.numel())
    return {
        name: each
        for name, each in states.items()
        if isinstance(each, Tensor) and each.numel() >= least
    }


def _zeros_like(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(each) for name, each in states.items()}


def _without_data(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(each, device="meta") for name, each in states.items()}


def _fill_on_host(optimizer: Optimizer, on_host: Set[nn.Parameter]) -> None:
    """Put zeros in host memory in the place of all states without data, together: see
    `host_memory`.
    """
    places = [
        (optimizer.state[parameter], name, each)
        for parameter in on_host
        for name, each in optimizer.state.get(parameter, {}).items()
        if isinstance(each, Tensor) and each.is_meta
    ]
    on_card = any(parameter.is_cuda for parameter in on_host)
    for (state, name, _), host in zip(
        places, like_all([each for *_, each in places], pinned=on_card), strict=True
    ):
        state[name] = host.zero_()


def forget_states(optimizer: Optimizer) -> None:
    """Go back to the states before the first step.

    Where they are known, in the memory that they have.
    """
    if not isinstance(optimizer, Adam) and not eight_bit.is_bitsandbytes(optimizer):
        optimizer.state.clear()
        allocate_states(optimizer)
        return
    for state in optimizer.state.values():
        for name, each in state.items():
            if not isinstance(each, Tensor):
                state[name] = 0  # bitsandbytes counts steps in Python
            elif not eight_bit.is_table(name):
                each.zero_()


def load_states(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Go on from a saved `state_dict`; into the tensors that are there, if they are alike."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    own = {
        place: optimizer.state[each]
        for place, each in enumerate(parameters)
        if optimizer.state.get(each)
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
    """Return the states of a parameter by their own names: bitsandbytes saves most of them in a
    mapping within it.
    """
    inner = [each for each in state.values() if isinstance(each, Mapping)]
    flat = {name: each for name, each in state.items() if not isinstance(each, Mapping)}
    for each in inner:
        flat.update(each)
    return flat


def _alike(mine: object, value: object) -> bool:
    if isinstance(mine, Tensor) and isinstance(value, Tensor):
        return mine.shape == value.shape
    return type(mine) is type(value) is int


class Update:
    """Changes the weights, and says whether it was cut off. What was cut off is never run again."""

    def __init__(
        self,
        optimizer: Optimizer,
        average: Average | None = None,
        step: Callable[[], object] | None = None,
    ) -> None:
        """Take an optimiser, what averages its weights, and what does its step where that is not
        its own.
        """
        self.optimizer = optimizer
        self._step = optimizer.step if step is None else step
        self.cut = False
        """Whether weights, moments and average belong to no step: an update began and did not end.
        """
        self._average = average
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    def check(self) -> None:
        """Raise `UpdateInterruptedError` if weights belong to no step."""
        if self.cut:
            raise UpdateInterruptedError(
                "an update of the weights was cut off, so the training cannot go on from them; "
                "load the last checkpoint"
            )

    def run(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        factor: float,
        rate_share: float | None,
    ) -> None:
        """Do one step with `gradients` times `factor`.

        The learning rate is a share of what each group began with; `None` leaves it as it is.

        Raises:
            UpdateInterruptedError: Memory ran out in it, now or before.
        """
        self.check()
        self.cut = True
        failure: str | None = None
        try:
            self._change(parameters, gradients, factor, rate_share)
        except Exception as error:
            found = classify(error)
            if found.kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
                raise
            failure = found.text
        if (
            failure is not None
        ):  # outside the handler: the error must hold no tensor, and must not look like its cause
            raise UpdateInterruptedError(
                f"memory ran out while the weights were being updated ({failure}); the update is "
                "not run again, "
                "because a part of it may have been done; load the last checkpoint"
            )
        self.cut = False

    @torch.no_grad()
    def _change(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        factor: float,
        rate_share: float | None,
    ) -> None:
        if factor != 1:
            torch._foreach_mul_(list(gradients), factor)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(
                parameter.dtype
            )  # itself, unless the weights are half precision
        if rate_share is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                if isinstance(
                    group["lr"], Tensor
                ):  # torchao compiles its step, and keeps the rate in a tensor
                    group["lr"].fill_(rate * rate_share)
                else:
                    group["lr"] = rate * rate_share
        self._step()
        if self._average is not None:
            self._average.update()
