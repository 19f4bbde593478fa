"""The loss of samples that a training never sees, without what only a training adds to it
(smoothing, dropout).

Trainings whose losses mean different things are compared by it. Of made data such samples are made;
of a text of the user's the last ones are held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from workers.training.host_memory import wait_asleep
from workers.training.loader import on_device

#: Samples, one computed after the other: that never takes more memory than the training itself.
SAMPLES: Final = 32

#: Samples of a text of the user's are held out up from so many, and then at least `SAMPLES`: at
#: most a tenth.
_LEAST_TO_HOLD_OUT: Final = 10 * SAMPLES

_HELD_OUT_SHARE: Final = 100


def held_out(samples: int) -> range:
    """Return which of so many samples are never trained on: the last 1 %, and none of few."""
    if samples < _LEAST_TO_HOLD_OUT:
        return range(samples, samples)
    return range(samples - max(SAMPLES, samples // _HELD_OUT_SHARE), samples)


def spread(held: range) -> list[int]:
    """Return those that are computed, at most `SAMPLES`, evenly spread."""
    count = min(SAMPLES, len(held))
    return [held[place * len(held) // count] for place in range(count)]


def validation(
    samples: Callable[[], Iterable[Any]],
    loss: Callable[[nn.Module, Any], Tensor],
    count: Callable[[Any], int],
    **figures: Callable[[nn.Module, Any], Tensor],
) -> Callable[[nn.Module], Mapping[str, float]]:
    """Return a `TrainTask.evaluate` that gives the mean loss of all items of `samples`, as
    `validation_loss`.

    `figures`: others, by their names; each returns a sum over items, and its mean is given.
    """
    figures = {"validation_loss": loss, **figures}

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        device = next(model.parameters()).device
        totals, items = dict.fromkeys(figures, 0.0), 0
        for batch in samples():
            part = on_device(batch, device)
            for name, figure in figures.items():
                total = figure(model, part)
                wait_asleep(device)
                totals[name] += float(total)
            items += count(part)
        return {name: total / items for name, total in totals.items()}

    return evaluate
