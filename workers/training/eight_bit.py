"""AdamW whose states have 8 bits each: that of bitsandbytes, or torchao's where that is what is
installed.

Both keep a scale for each 256 states, and matrices of less than 4,096 numbers in fp32. bitsandbytes
is preferred: it needs no compiler (torchao compiled for 45 s before its first step on a CPU). Does
not decide whether 8 bits suffice.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workers.training.errors import TaskError

#: Of bitsandbytes: states of smaller parameters stay in fp32; of others so many have one scale.
_LEAST_QUANTISED: Final = 4096
_BLOCK: Final = 256
_STATES: Final = ("state1", "state2")
_TABLES: Final = ("qmap1", "qmap2")

#: Where an `AdamW8bit` may be.
_MODULES: Final = ("bitsandbytes.optim", "torchao.optim")


def adamw_8bit(
    groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float]
) -> Optimizer:
    """Make the optimiser.

    Raises:
        TaskError: Neither package can be imported.
    """
    missing = []
    for name in _MODULES:
        try:
            made = importlib.import_module(name).AdamW8bit
        except Exception as error:  # noqa: BLE001 - these packages look for libraries when they are imported
            missing.append(f"{name.partition('.')[0]}: {error}")
        else:
            optimizer: Optimizer = made(groups, lr=lr, betas=betas)
            return optimizer
    raise TaskError(
        "train.optimizer is adamw-8bit, and no package on this machine has it "
        f"({'; '.join(missing)}); "
        "pip install 'bitsandbytes>=0.50' there, or set train.optimizer: adamw-fused"
    )


class PlannedAdamW8bit(Optimizer):
    """Has the states of bitsandbytes' AdamW8bit, so that a plan needs no package.

    Cannot do a step.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._table = torch.empty(256)

    def init_state(self, _group: object, parameter: Tensor, _number: int, _place: int) -> None:
        """Allocate the states of a parameter (Optimizer2State.init_state in
        bitsandbytes/optim/optimizer.py, 0.50).
        """
        quantised = parameter.numel() >= _LEAST_QUANTISED
        states = {
            name: torch.zeros_like(parameter, dtype=torch.uint8 if quantised else torch.float32)
            for name in _STATES
        }
        if quantised:
            blocks = -(-parameter.numel() // _BLOCK)
            scales = {
                f"absmax{number}": torch.zeros(blocks, device=parameter.device) for number in (1, 2)
            }
            states |= {**scales, **dict.fromkeys(_TABLES, self._table)}
        self.state[parameter] = {"step": 0, **states}


def allocate(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Have bitsandbytes allocate its states as in its first step, one parameter after the other.

    Yields each parameter with its states. torchao allocates in its first step only.
    """
    own: Any = optimizer
    if not isinstance(optimizer, PlannedAdamW8bit):
        # The rest of what its first step does is to bring every state to the card
        # (Optimizer8bit.step and to_gpu).
        own.check_overrides()
        own.initialized = True
    for number, group in enumerate(own.param_groups):
        for place, parameter in enumerate(group["params"]):
            if not own.state[parameter]:
                own.init_state(group, parameter, number, place)
                yield parameter, own.state[parameter]


def is_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether it is one of bitsandbytes, or stands for it in a plan."""
    return isinstance(optimizer, PlannedAdamW8bit) or type(optimizer).__module__.startswith(
        "bitsandbytes."
    )


def is_table(name: str) -> bool:
    """Whether a state of this name is a table of what codes mean, which steps do not change."""
    return name in _TABLES


def update_bytes(parameters: Sequence[Tensor], *, on_card: bool) -> int:
    """Return what a step of bitsandbytes allocates: nothing on a card, on a CPU five fp32 copies of
    one parameter.

    They hold both states and the gradient in fp32, a root and a quotient
    (bitsandbytes/backends/cpu/ops.py, 0.50).
    """
    return 0 if on_card else 5 * 4 * max((each.numel() for each in parameters), default=0)
