"""All tensors of a training in host memory for a while, and back on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from workers.training.host_memory import like

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

    def park(self, model: nn.Module, containers: Iterable[Container], on_host: Iterable[Tensor] = ()) -> int:
        """Move all tensors of the device to host memory, one by one; return the bytes that wait there.

        What is `on_host` anyway stays there, also after `unpark`.
        """
        stay = {id(each) for each in on_host}
        for place in _places(model, containers):
            if place.tensor().device == self._device and id(place.tensor()) not in stay:
                place.put(like(place.tensor()).copy_(place.tensor()))
                self._parked.append(place)
        return sum(place.tensor().nbytes for place in self._parked)

    def unpark(self) -> None:
        """Move back what was parked: all of it, or, if the device has no memory for it, nothing."""
        back = [torch.empty_like(each.tensor(), device=self._device) for each in self._parked]
        for place, tensor in zip(self._parked, back, strict=True):
            tensor.copy_(place.tensor(), non_blocking=True)
            place.put(tensor)
        self._parked = []


def _places(model: nn.Module, containers: Iterable[Container]) -> Iterator[_Place]:
    for each in (*model.parameters(), *model.buffers()):
        yield _Place(None, each)
    for container in containers:
        keys = list(container) if isinstance(container, MutableMapping) else range(len(container))
        yield from (_Place(container, key) for key in keys if isinstance(container[key], Tensor))
