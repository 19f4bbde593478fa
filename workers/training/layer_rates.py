"""Learning rates that fall from the last layer to the first one, which keeps what a model has
learned before.

As in ULMFiT (Howard and Ruder, 2018, "discriminative fine-tuning"): each block has the rate of the
block after it, times `decay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from workers.training.errors import TaskError


def depths(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Parameter, int]:
    """Return how far each parameter lies below the top: 0 after the last block, 1 in it, and so on.

    What the model registers before its first block is below all of them; an embedding is.

    Raises:
        TaskError: The task names no blocks.
    """
    if not blocks:
        raise TaskError(
            "train.layer_decay needs a task that names its blocks; name them, or set "
            "train.layer_decay to 1.0"
        )
    own = {
        parameter: len(blocks) - place
        for place, block in enumerate(blocks)
        for parameter in block.parameters()
    }
    found: dict[nn.Parameter, int] = {}
    outside = len(blocks) + 1
    for parameter in model.parameters():
        if parameter in own:
            outside = 0
        found[parameter] = own.get(parameter, outside)
    return found


def decay_rates(optimizer: Optimizer, depth: dict[nn.Parameter, int], decay: float) -> None:
    """Split the groups of an optimiser that has no states yet, so that each depth has a rate of its
    own.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        for each in sorted({depth[parameter] for parameter in group["params"]}):
            members = [parameter for parameter in group["params"] if depth[parameter] == each]
            groups.append({**group, "params": members, "lr": group["lr"] * decay**each})
    optimizer.param_groups[:] = groups
