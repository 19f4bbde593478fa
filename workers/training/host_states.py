"""Optimiser states in host memory: those of any share of the parameters, which may change between
two steps.

For the update, the states of a few parameters at a time move to the device and back. So the update
gives the same bits as without, and clipping uses all gradients. Each optimiser step copies each
byte of a state twice. Does not decide the share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workers.training.errors import TaskError
from workers.training.host_memory import give_back, to_device, to_host, wait_asleep
from workers.training.optimizers import allocate_states, states_of
from workers.units import MIB

#: Bytes of states that are on the device at once, unless one parameter has more.
_PART_BYTES: Final = 32 * MIB

#: Share of the free host memory that all trainings of a machine may use for states.
_HOST_SHARE: Final = 0.5

#: Fewest parts of an update, if single parameters allow it: so most states stay on the host even
#: for a small model.
_LEAST_PARTS: Final = 8


def hosted_of(parameters: Sequence[nn.Parameter], share_pct: int) -> list[nn.Parameter]:
    """Return the parameters whose states are on the host: the largest that fit in this share."""
    left_bytes = sum(parameter.nbytes for parameter in parameters) * share_pct // 100
    hosted = []
    for parameter in sorted(parameters, key=lambda parameter: -parameter.nbytes):
        if parameter.nbytes <= left_bytes:
            hosted.append(parameter)
            left_bytes -= parameter.nbytes
    return hosted


def parts_of(optimizer: Optimizer, hosted: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return groups of parameters that are updated together."""
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


def _free_share_bytes() -> int:
    """Return this training's share of the free RAM: that of its torch threads among the cores."""
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    cores = min(torch.get_num_threads(), physical)
    return psutil.virtual_memory().available * cores // physical


class HostStates:
    """Moves an optimiser's states between host and device, and runs its step."""

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], share_pct: int
    ) -> None:
        """Allocate all states that are known before the first step, each in its place.

        Raises:
            TaskError: States must be on the host, but those of this optimiser are not known yet.
        """
        self._optimizer = optimizer
        self._parameters = parameters
        self._device = parameters[0].device
        self.share_pct = share_pct
        self._hosted = hosted_of(parameters, share_pct)
        allocate_states(optimizer, set(self._hosted))
        self.tensors = self._states(self._hosted)
        """All states in host memory."""
        if share_pct and not optimizer.state:
            raise TaskError(
                f"train.states_on_host is {share_pct}, and the states of "
                f"{type(optimizer).__name__} are not known before its first step; set "
                "train.states_on_host: 0, or use an optimiser of torch's Adam family"
            )

    def _states(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [
            tensor
            for parameter in parameters
            for tensor in states_of(self._optimizer, parameter).values()
        ]

    def move(self, share_pct: int) -> None:
        """Move `share_pct` per cent to the host, unless that is so.

        Raises:
            MemoryError: The states would take more than half of this training's share of the free
                host memory.
        """
        if share_pct == self.share_pct:
            return
        wanted = self._states(hosted_of(self._parameters, share_pct))
        wanted_bytes = sum(tensor.nbytes for tensor in wanted)
        free_bytes = _free_share_bytes()
        if wanted_bytes > _HOST_SHARE * free_bytes:
            raise MemoryError(
                f"{wanted_bytes} bytes of the optimiser's states do not fit into half of the "
                f"{free_bytes} bytes of host memory that are free for them"
            )
        self.hold(share_pct)

    def hold(self, share_pct: int) -> None:
        """Move `share_pct` per cent to the host. After an out-of-memory, call it again."""
        hosted = hosted_of(self._parameters, share_pct)
        leaving = self._states(set(self._hosted).difference(hosted))
        to_device(leaving, self._device)
        # If some states leave, those that stay move to other blocks: a block stays pinned while one
        # of its tensors exists. A state that was loaded may not be on the host yet.
        there = {id(tensor) for tensor in self.tensors if not leaving}
        wanted = self._states(hosted)
        to_host([tensor for tensor in wanted if id(tensor) not in there], self._device)
        self._hosted, self.tensors, self.share_pct = hosted, wanted, share_pct
        give_back(self._device)

    def step(self) -> None:
        """Run the optimiser's step for the states on the device, then for the rest part by part."""
        if not self._hosted:
            self._optimizer.step()
            return
        gradients = {parameter: parameter.grad for parameter in self._hosted}
        for parameter in self._hosted:
            parameter.grad = None  # an optimiser skips parameters without gradient
        if len(gradients) < len(self._parameters):
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        for part in parts_of(self._optimizer, self._hosted):
            self._step(part, gradients)
        # Copies to pinned memory must end before the host reads them, as for a checkpoint.
        wait_asleep(self._device)

    def _step(
        self, part: Sequence[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor | None]
    ) -> None:
        states = self._states(part)
        hosts = [tensor.data for tensor in states]
        try:
            for tensor in states:
                tensor.data = tensor.to(self._device, non_blocking=True, copy=True)
            for parameter in part:
                parameter.grad = gradients[parameter]
            self._optimizer.step()
            for tensor, host in zip(states, hosts, strict=True):
                host.copy_(tensor, non_blocking=True)
        finally:
            # Also after a failure: the states then belong to no step, and the update reports that
            # it was interrupted.
            for tensor, host in zip(states, hosts, strict=True):
                tensor.data = host
            for parameter in part:
                parameter.grad = None
