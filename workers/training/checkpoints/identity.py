"""What a checkpoint belongs to: a model by its name, shapes and types, and the settings that it was
trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

Lever: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Two trainings whose identities are equal can go on from each other's checkpoints."""

    model: str
    weights: Mapping[str, str]
    """For each name the type and shape, such as `float32 64x256`."""
    levers: Mapping[str, Lever] = field(default_factory=dict)
    """Settings that change what the weights become; not those that only move memory."""

    @classmethod
    def of(
        cls,
        model: str,
        weights: Mapping[str, torch.Tensor],
        levers: Mapping[str, Lever] | None = None,
    ) -> Identity:
        """Describe these weights."""
        return cls(
            model=model,
            weights={name: _described(each) for name, each in weights.items()},
            levers=dict(levers or {}),
        )

    def plain(self) -> dict[str, Any]:
        """Return it as what a file can hold."""
        return {"model": self.model, "weights": dict(self.weights), "levers": dict(self.levers)}

    def difference(self, saved: object) -> str | None:
        """Say what `saved`, once made by `plain`, has that this training has not, or the reverse;
        `None`: nothing.
        """
        match saved:
            case {"model": str(model), "weights": dict(weights), "levers": dict(levers)}:
                pass
            case _:
                return "it does not say which model it holds"
        if model != self.model:
            return f"it holds the model {model}, and this run trains {self.model}"
        for name, then, now in _differing(weights, self.weights):
            return (
                f"its weight {name} is {then or 'absent'}, and that of this model is "
                f"{now or 'absent'}"
            )
        for name, then, now in _differing(levers, self.levers):
            return f"it was trained with {name}={then}, and this run has {name}={now}"
        return None


def _differing(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*saved, *own}):
        if saved.get(name) != own.get(name):
            yield name, saved.get(name), own.get(name)


def _described(weight: torch.Tensor) -> str:
    shape = "x".join(str(length) for length in weight.shape) or "scalar"
    return f"{str(weight.dtype).removeprefix('torch.')} {shape}"
