"""What makes a training depend on how its batches are split, found by trying and told in sentences.

A user's model may hold such things without a fault of its own; a training with them is still a
training, but another split, or a resumed run on another card, leads it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from workers.training.trainer import Trainer

#: The second time the loss is scaled by this, so that all is rounded differently, whatever the
#: parts are.
_SCALE: Final = 0.7

#: Two computations of a gradient agree to 1e-6 or so, unless it is zero but for rounding: then they
#: differ wholly.
_LARGEST_DIFFERENCE: Final = 0.1

#: Some elements of any gradient happen to be next to zero. A key bias that is one with query's and
#: value's is a third.
_LEAST_SHARE: Final = 0.1


def hazards(trainer: Trainer, rows: int = 4) -> list[str]:
    """Return a sentence for each hazard, from the next batch's first samples; the training stays as
    it is.

    Call it between two optimiser steps. It computes the samples twice, and may run out of memory as
    a step may.
    """
    rows = min(rows, trainer.settings.batch)
    found = [
        f"{name or 'the model'} ({type(module).__name__}) normalises over the samples that are "
        "computed together, so "
        "the result depends on the micro-batch; use GroupNorm or LayerNorm, or set train.exact to "
        "true"
        for name, module in trainer.model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    before = _random_states(trainer.device)
    together = trainer.probe([rows])
    if any(
        not one.equal(other)
        for one, other in zip(before, _random_states(trainer.device), strict=True)
    ):
        return [
            *found,
            (
                "the model draws from torch's own random numbers, so the result depends on the "
                "micro-batch; use "
                "nn.Dropout modules in place of functional.dropout and of dropout inside the "
                "attention: they become "
                "keyed by sample"
            ),
        ]
    if rows > 1 and not found:
        found.extend(_rounding(together, trainer.probe([1] * rows, _SCALE)))
    return found


def _rounding(together: dict[str, Tensor], apart: dict[str, Tensor]) -> Iterator[str]:
    for name, one in together.items():
        other = apart[name]
        largest = torch.maximum(one.abs(), other.abs())
        noise = (one - other).abs() > _LARGEST_DIFFERENCE * largest
        share = int(noise.sum()) / max(1, int((largest > 0).sum()))
        if share > _LEAST_SHARE:
            yield (
                f"{share:.0%} of the gradient of {name} is nothing but rounding, which Adam "
                "scales up to full steps, "
                "so the result depends on the micro-batch; a bias of the keys of an attention is "
                "such a parameter: "
                "leave it out (bias=False)"
            )


def _random_states(device: torch.device) -> list[Tensor]:
    own = [] if device.type != "cuda" else [torch.cuda.get_rng_state(device)]
    return [torch.get_rng_state(), *own]
