"""The values that a pass over a model changes besides gradients: buffers, and numbers that modules
keep, such as counts of passes. Copies, compares and restores them. Does not decide how the parts of
a batch may change them (`batch_in_parts.py` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Final, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from workers.training.random_state import RandomState
from workers.units import MIB

Place: TypeAlias = tuple[nn.Module, str]
"""The location of a buffer, or of a number that a module keeps as an attribute: module and name."""

BufferValue: TypeAlias = Tensor | float
"""The value of a buffer or number."""

BufferChange: TypeAlias = Literal["once", "mean", "sum", "other", "unknown"]
"""How a pass changes a buffer or number. `once`: equally for any samples; `mean` or `sum`: to the
mean or sum of the results of parts; `other`: in another way; `unknown`: in no checked pass.
"""

#: Upper limit for buffers that a pass may change; tables and quantised weights are larger.
_SMALL_BYTES: Final = MIB


class Snapshot:
    """The values of buffers and numbers at one moment."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._kept = {place: kept for place in places if (kept := _value_at(place)) is not None}
        self.saved = {place: copied(kept) for place, kept in self._kept.items()}

    def changed(
        self, among: Iterable[Place] | None = None, *, restore: bool = False
    ) -> dict[Place, BufferValue]:
        """Return copies of the present values, all or some, that differ from the saved ones."""
        places = self.saved if among is None else among
        now = {place: kept for place in places if (kept := _value_at(place)) is not None}
        changed = {
            place: copied(kept)
            for place, kept in now.items()
            if not _is_same(kept, self.saved[place])
        }
        if restore:
            self.restore()
        return changed

    @torch.no_grad()
    def restore(self) -> None:
        """Put the saved values back."""
        for place, saved in self.saved.items():
            kept = self._kept[place]
            _bind(place, kept if _is_expanded(kept) or _write(kept, saved) else saved)


def _write(there: BufferValue | None, kept: BufferValue) -> bool:
    """Copy `kept` into a tensor of the same shape; return whether that was possible."""
    if not isinstance(there, Tensor) or not isinstance(kept, Tensor) or _is_expanded(there):
        return False
    if there.shape != kept.shape:
        return False
    there.copy_(kept)
    return True


def _is_expanded(kept: BufferValue) -> bool:
    """Whether a tensor is expanded, so that torch refuses to write into it."""
    if not isinstance(kept, Tensor):
        return False
    return any(not step and size > 1 for step, size in zip(kept.stride(), kept.shape, strict=True))


def _value_at(place: Place) -> BufferValue | None:
    """Return the value at a place; `None`: there is no buffer or number."""
    module, name = place
    if name in module._buffers:
        return module._buffers[name]
    kept = vars(module).get(name)
    return cast("BufferValue", kept) if _is_number(kept) else None


def _is_number(value: object) -> bool:
    """Whether a value may count passes or samples: a number, also of NumPy, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.requires_grad or value.is_inference())
    return isinstance(value, Real)


@torch.no_grad()
def put(place: Place, kept: BufferValue) -> None:
    """Store a value at a place; if possible in the present tensor, which others may hold too."""
    if not _write(_value_at(place), kept):
        _bind(place, kept)


def _bind(place: Place, kept: BufferValue) -> None:
    module, name = place
    if name in module._buffers:
        module._buffers[name] = cast("Tensor", kept)
    elif vars(module).get(name) is not kept:
        vars(module)[name] = kept


def copied(kept: BufferValue) -> BufferValue:
    """Return a copy that no pass changes."""
    return kept.clone() if isinstance(kept, Tensor) else kept


def l1_norms(model: nn.Module, known: Snapshot) -> dict[Place, float]:
    """Return the L1 norm of each weight, and of each buffer that `known` lacks: of tables and of
    buffers outside the `state_dict`.
    """
    places = [
        (module, name)
        for module in model.modules()
        for name, kept in (*module._parameters.items(), *module._buffers.items())
        if kept is not None and kept.is_floating_point() and (module, name) not in known.saved
    ]
    tensors = [getattr(module, name).detach() for module, name in places]
    norms = torch._foreach_norm(tensors, 1, torch.float64) if tensors else []
    return dict(zip(places, map(float, norms), strict=True))


def _is_same(one: BufferValue, other: BufferValue) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def is_fraction(kept: BufferValue) -> bool:
    """Whether a value has a floating-point type."""
    return kept.is_floating_point() if isinstance(kept, Tensor) else isinstance(kept, float)


def is_flag(kept: BufferValue) -> bool:
    """Whether a value is a bool."""
    return kept.dtype == torch.bool if isinstance(kept, Tensor) else isinstance(kept, bool)


def places_of(modules: Iterable[nn.Module], *, small: bool = False) -> list[Place]:
    """Return the places of all buffers of modules. If `small`, return numbers, buffers of one
    number, and those small buffers that are part of the `state_dict`.
    """
    places = list[Place]()
    for module in modules:
        for name, buffer in module._buffers.items():
            if not small or (
                buffer is not None
                and buffer.nbytes <= _SMALL_BYTES
                and (buffer.numel() == 1 or name not in module._non_persistent_buffers_set)
            ):
                places.append((module, name))
        # No pass changes the arguments of a layer of torch, such as its sizes.
        fixed = {"training", *getattr(type(module), "__constants__", ())}
        numbers = sorted(vars(module).keys() - fixed) if small else ()
        places += [(module, name) for name in numbers if _is_number(vars(module)[name])]
    return places


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore buffers, modes, other attributes and shared random numbers after the block."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    buffers = Snapshot({*places_of(model.modules()), *places_of(model.modules(), small=True)})
    drawn = RandomState(device)
    try:
        yield
    finally:
        for now, before in attributes:
            now.clear()
            now.update(before)
        buffers.restore()
        drawn.restore()
