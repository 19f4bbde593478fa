"""States of the optimiser in host memory: those of some parameters, from none to all, changed
between any two steps.

For the update they come to the device, a few parameters at a time, and go back. So the update is
computed where it always is, to the same bits, and clipping sees all gradients. Each byte of a state
is copied twice in each optimiser step. Does not decide how many states; see `ladder`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workers.training.errors import TaskError
from workers.training.host_memory import give_back, like_all, wait_asleep
from workers.training.optimizers import allocate_states, large
from workers.units import MIB

#: States that come to the device at once, unless those of a single parameter are more.
_PART_BYTES: Final = 32 * MIB

#: All trainings of a machine may put so much of its free memory aside for states.
_HOST_SHARE: Final = 0.5

#: So many parts at least, as far as single parameters allow: of a small model too, most states stay
#: on the host.
_LEAST_PARTS: Final = 8


def hosted_of(parameters: Sequence[nn.Parameter], share_pct: int) -> list[nn.Parameter]:
    """Return whose states are on the host: at most so many per cent, the largest that fit first."""
    left_bytes = sum(parameter.nbytes for parameter in parameters) * share_pct // 100
    hosted = []
    for parameter in sorted(parameters, key=lambda parameter: -parameter.nbytes):
        if parameter.nbytes <= left_bytes:
            hosted.append(parameter)
            left_bytes -= parameter.nbytes
    return hosted


def states_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the states that can be on the host."""
    return large(optimizer.state.get(parameter, {}), parameter)


def parts_of(optimizer: Optimizer, hosted: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters that are updated together."""
    needs = {
        parameter: sum(tensor.nbytes for tensor in states_of(optimizer, parameter).values())
        for parameter in hosted
    }
    parts: list[list[nn.Parameter]] = []
    room = 0
    for parameter, needed in needs.items():
        if not parts or needed > room:
            parts.append([])
            room = min(_PART_BYTES, sum(needs.values()) // _LEAST_PARTS)
        parts[-1].append(parameter)
        room -= needed
    return parts


class HostStates:
    """Says of an optimiser's states which are where, and does its step."""

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], share_pct: int
    ) -> None:
        """Allocate all states that can be known before the first step, each where it belongs.

        Raises:
            TaskError: States are asked for on the host, and what states the optimiser has is not
                known.
        """
        self._optimizer = optimizer
        self._parameters = parameters
        self._device = parameters[0].device
        self.share_pct = share_pct
        hosted = hosted_of(parameters, share_pct)
        allocate_states(optimizer, set(hosted))
        self._hosted = {parameter: states_of(optimizer, parameter) for parameter in hosted}
        if share_pct and not optimizer.state:
            raise TaskError(
                f"train.states_on_host is {share_pct}, and the states of "
                f"{type(optimizer).__name__} are not known before its first step; set "
                "train.states_on_host: 0, or use an optimiser of torch's Adam family"
            )

    @property
    def tensors(self) -> list[Tensor]:
        """All that is in host memory."""
        return [tensor for states in self._hosted.values() for tensor in states.values()]

    def move(self, share_pct: int, free_bytes: int) -> None:
        """Have so many per cent on the host from now on, unless that is so.

        `free_bytes` is this training's share of what the host has free.

        Raises:
            MemoryError: That is less than twice of what the states take.
        """
        if share_pct == self.share_pct:
            return
        wanted_bytes = sum(
            tensor.nbytes
            for parameter in hosted_of(self._parameters, share_pct)
            for tensor in states_of(self._optimizer, parameter).values()
        )
        if wanted_bytes > _HOST_SHARE * free_bytes:
            raise MemoryError(
                f"{wanted_bytes} bytes of the optimiser's states do not go to the host, which has "
                f"{free_bytes} free for them"
            )
        self.hold(share_pct)

    def hold(self, share_pct: int) -> None:
        """Have so many per cent on the host. After running out of memory, call it again."""
        hosted = hosted_of(self._parameters, share_pct)
        leaving = set(self._hosted).difference(hosted)
        for parameter in leaving:
            self._optimizer.state[parameter].update(
                _copied(self._hosted[parameter], parameter.device)
            )
        wait_asleep(self._device)
        for parameter in leaving:
            del self._hosted[parameter]
        # Those that stay move to other blocks if some leave: a block is pinned as long as one of
        # its tensors lives.
        moving = [
            (parameter, name, tensor)
            for parameter in hosted
            for name, tensor in states_of(self._optimizer, parameter).items()
            if leaving or self._hosted.get(parameter, {}).get(name) is not tensor
        ]
        hosts = like_all([tensor for *_, tensor in moving])
        for (parameter, name, state), host in zip(moving, hosts, strict=True):
            self._optimizer.state[parameter][name] = host.copy_(state)
        self._hosted = {parameter: states_of(self._optimizer, parameter) for parameter in hosted}
        if moving:
            del moving, hosts, host, state
            give_back(self._device)
        self.share_pct = share_pct

    def step(self) -> None:
        """Do the optimiser's step for what is on the device, then for the rest part by part."""
        if not self._hosted:
            self._optimizer.step()
            return
        gradients = {parameter: parameter.grad for parameter in self._hosted}
        for parameter in self._hosted:
            parameter.grad = None  # an optimiser leaves out what has no gradient
        if len(gradients) < len(self._parameters):
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        for part in parts_of(self._optimizer, self._hosted):
            self._step(part, gradients)
        # The copies to pinned memory must have ended before the host reads them, as for a
        # checkpoint.
        wait_asleep(self._device)

    def _step(
        self, part: Iterable[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor | None]
    ) -> None:
        try:
            for parameter in part:
                here = _copied(self._hosted[parameter], parameter.device)
                self._optimizer.state[parameter].update(here)
                parameter.grad = gradients[parameter]
            self._optimizer.step()
            for parameter in part:
                for name, tensor in self._hosted[parameter].items():
                    tensor.copy_(self._optimizer.state[parameter][name], non_blocking=True)
        finally:
            # After a failure too: what they hold then belongs to no step, and the update says that
            # it was cut off.
            for parameter in part:
                self._optimizer.state[parameter].update(self._hosted[parameter])
                parameter.grad = None


def _copied(states: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {
        name: tensor.to(device, non_blocking=True, copy=True) for name, tensor in states.items()
    }
