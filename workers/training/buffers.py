"""What a pass over a model changes besides gradients: its buffers, and numbers that its modules
keep, such as counts of passes. They are copied, compared and put back. Says not how parts of a
batch are to change them (`batch_in_parts.py` does).
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
"""Where a buffer is, or a number that a module keeps as an attribute, such as a count of its
passes: a module, and its name there.
"""

Kept: TypeAlias = Tensor | float
"""A buffer or a number."""

Kind: TypeAlias = Literal["once", "mean", "sum", "other", "unknown"]
"""How a pass changes one: once, whatever its samples are; to the mean of what parts of its samples
would make of it; by the sum; in another way; or not in any pass that was looked at.
"""

#: What a pass changes is smaller, unlike a table or a quantised weight.
_SMALL_BYTES: Final = MIB


class Snapshot:
    """Buffers and numbers, as they are at one moment."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._kept = {place: kept for place in places if (kept := _at(place)) is not None}
        self.saved = {place: copied(kept) for place, kept in self._kept.items()}

    def changed(
        self, among: Iterable[Place] | None = None, *, restore: bool = False
    ) -> dict[Place, Kept]:
        """Return copies of those, or of some of them, that are something else now."""
        places = self.saved if among is None else among
        now = {place: kept for place in places if (kept := _at(place)) is not None}
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
        """Put them back."""
        for place, saved in self.saved.items():
            kept = self._kept[place]
            _bind(place, kept if _is_spread(kept) or _write(kept, saved) else saved)


def _write(there: Kept | None, kept: Kept) -> bool:
    """Write into a tensor that has the same form; say whether that was possible."""
    if not isinstance(there, Tensor) or not isinstance(kept, Tensor) or _is_spread(there):
        return False
    if there.shape != kept.shape:
        return False
    there.copy_(kept)
    return True


def _is_spread(kept: Kept) -> bool:
    """Whether it was expanded, so that torch refuses a write into it."""
    if not isinstance(kept, Tensor):
        return False
    return any(not step and size > 1 for step, size in zip(kept.stride(), kept.shape, strict=True))


def _at(place: Place) -> Kept | None:
    """Return what is there; `None`: nothing, or something else than a buffer or a number."""
    module, name = place
    if name in module._buffers:
        return module._buffers[name]
    kept = vars(module).get(name)
    return cast("Kept", kept) if _is_number(kept) else None


def _is_number(value: object) -> bool:
    """Whether it may count passes or samples: a number, of NumPy as well, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.requires_grad or value.is_inference())
    return isinstance(value, Real)


@torch.no_grad()
def put(place: Place, kept: Kept) -> None:
    """Have this there; in the tensor that is there, which others may hold as well."""
    if not _write(_at(place), kept):
        _bind(place, kept)


def _bind(place: Place, kept: Kept) -> None:
    module, name = place
    if name in module._buffers:
        module._buffers[name] = cast("Tensor", kept)
    elif vars(module).get(name) is not kept:
        vars(module)[name] = kept


def copied(kept: Kept) -> Kept:
    """Return one that no pass changes."""
    return kept.clone() if isinstance(kept, Tensor) else kept


def sizes_of(model: nn.Module, known: Snapshot) -> dict[Place, float]:
    """Return the sum of all of each weight, and of each buffer that a snapshot has not: of tables,
    and of what no `state_dict` has. Signs do not count.
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


def _is_same(one: Kept, other: Kept) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def is_fraction(kept: Kept) -> bool:
    """Whether it is no whole number."""
    return kept.is_floating_point() if isinstance(kept, Tensor) else isinstance(kept, float)


def is_flag(kept: Kept) -> bool:
    """Whether it is true or false."""
    return kept.dtype == torch.bool if isinstance(kept, Tensor) else isinstance(kept, bool)


def places_of(modules: Iterable[nn.Module], *, small: bool = False) -> list[Place]:
    """Return where modules have buffers; or only those of a `state_dict` that are no tables, those
    of one number, and numbers.
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
        # How a layer of torch was made, such as its sizes, no pass changes.
        fixed = {"training", *getattr(type(module), "__constants__", ())}
        numbers = sorted(vars(module).keys() - fixed) if small else ()
        places += [(module, name) for name in numbers if _is_number(vars(module)[name])]
    return places


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Leave buffers, modes, other attributes and torch's random numbers as they were."""
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
