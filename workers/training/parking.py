"""All tensors of a training in host memory for a while, and back on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from workers.training.host_memory import give_back, host_bytes, like_all, wait_asleep

Container: TypeAlias = MutableMapping[Any, Any] | MutableSequence[Any]


@dataclass(slots=True)
class _Place:
    """Where one tensor is held: by a list or mapping, or as the data of a parameter or buffer."""

    container: Container | None
    key: Any
    """In the container, or the parameter or buffer itself."""

    def tensor(self) -> Tensor:
        held: Tensor = self.key.data if self.container is None else self.container[self.key]
        return held

    def put(self, tensor: Tensor) -> None:
        if self.container is None:
            self.key.data = tensor
        else:
            self.container[self.key] = tensor


class Parking:
    """Moves tensors that are held by a model, and by lists and mappings."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parked: list[_Place] = []

    def park(
        self, model: nn.Module, containers: Iterable[Container], on_host: Iterable[Tensor] = ()
    ) -> int:
        """Move all tensors of the device to host memory; return the bytes that they take there,
        rounding included.

        What is `on_host` anyway stays there, also after `unpark`.
        """
        stay = {id(each) for each in on_host}
        moving = [
            place
            for place in _places(model, containers)
            if place.tensor().device == self._device and id(place.tensor()) not in stay
        ]
        wait_asleep(self._device)
        # One by one from here on: each tensor of the device goes before the next one is copied.
        for place, host in zip(moving, like_all([place.tensor() for place in moving]), strict=True):
            place.put(host.copy_(place.tensor()))
            self._parked.append(place)
        sizes = [place.tensor().nbytes for place in self._parked]
        return host_bytes(sizes, on_card=self._device.type == "cuda")

    def unpark(self) -> None:
        """Move back what was parked: all of it, or, if the device has no memory for it, nothing."""
        back = [torch.empty_like(each.tensor(), device=self._device) for each in self._parked]
        for place, tensor in zip(self._parked, back, strict=True):
            tensor.copy_(place.tensor(), non_blocking=True)
        wait_asleep(self._device)
        for place, tensor in zip(self._parked, back, strict=True):
            place.put(tensor)
        self._parked = []
        give_back(self._device)


def _places(model: nn.Module, containers: Iterable[Container]) -> Iterator[_Place]:
    for each in (*model.parameters(), *model.buffers()):
        yield _Place(None, each)
    for container in containers:
        keys = list(container) if isinstance(container, MutableMapping) else range(len(container))
        yield from (_Place(container, key) for key in keys if isinstance(container[key], Tensor))
