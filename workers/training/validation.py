"""The loss of samples that a training never sees, without what only a training adds to it (smoothing, dropout).

Trainings whose losses mean different things are compared by it. Covers made data; a text of the user's is trained on
as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from workers.training.loader import on_device

#: Samples, one computed after the other: that never takes more memory than the training itself.
SAMPLES: Final = 32


def validation(
    samples: Callable[[], Iterable[Any]],
    loss: Callable[[nn.Module, Any], Tensor],
    count: Callable[[Any], int],
    **figures: Callable[[nn.Module, Any], Tensor],
) -> Callable[[nn.Module], Mapping[str, float]]:
    """Return a `TrainTask.evaluate` that gives the mean loss of all items of `samples`, as `validation_loss`.

    `figures`: others, by their names; each returns a sum over items, and its mean is given.
    """
    figures = {"validation_loss": loss, **figures}

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        device = next(model.parameters()).device
        totals, items = dict.fromkeys(figures, 0.0), 0
        for batch in samples():
            part = on_device(batch, device)
            for name, figure in figures.items():
                totals[name] += float(figure(model, part))
            items += count(part)
        return {name: total / items for name, total in totals.items()}

    return evaluate
