"""Activation recomputation of a model's first blocks, as many as one likes, changed at any time
between two steps.

A recomputed block keeps only its input and computes the rest again in the backward pass. That
changes memory and time, and no bit of the result: the second computation repeats the first, keyed
dropout included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputation:
    """Takes over the `forward` of each block; `level` says how many of them are recomputed."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.most = len(blocks)
        self.level = 0
        for place, block in enumerate(blocks):
            setattr(block, "forward", partial(self._run, place, block.forward))  # noqa: B010 - mypy has methods constant

    def level_of(self, wanted: str | int, offered: int) -> int:
        """Return the level for `train.recompute`; `auto` takes what the caller offers."""
        level = (
            {"auto": offered, "none": 0, "all": self.most}.get(wanted, wanted)
            if isinstance(wanted, str)
            else wanted
        )
        return max(0, min(int(level), self.most))

    def _run(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a block's own
        if place < self.level and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)
