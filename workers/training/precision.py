"""The precision in which a model is computed: fp32, tf32, bf16 or fp16.

Weights, gradients and moments stay fp32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from workers.host.cuda_environment import DETERMINISTIC_WORKSPACE
from workers.training.settings import Precision

_HALVES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: As in torch's GradScaler: double after these good steps, halve after a bad one.
_FIRST_SCALE: Final = 2.0**16
_GOOD_STEPS: Final = 2000
_LARGEST_SCALE: Final = 2.0**24


class LossScaler:
    """Scales the loss, so that fp16 does not round small gradients to zero. Handles no tensors."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = _FIRST_SCALE if enabled else 1.0
        self.good_steps = 0
        """Number of good steps since the scale changed."""

    def succeeded(self) -> None:
        """Record that the gradients of an effective batch were finite."""
        if not self.enabled:
            return
        self.good_steps += 1
        if self.good_steps == _GOOD_STEPS:
            self.scale, self.good_steps = min(self.scale * 2, _LARGEST_SCALE), 0

    def overflowed(self) -> bool:
        """Record an overflow; return whether to skip the update and use a smaller scale."""
        if not self.enabled or self.scale <= 1:
            return False
        self.scale, self.good_steps = self.scale / 2, 0
        return True

    def state(self) -> dict[str, float]:
        """Return what `load` needs."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for one forward pass, in which it caches half-precision weights."""
    if precision not in _HALVES:
        return nullcontext()
    return torch.autocast(device.type, dtype=_HALVES[precision])


def allow_tf32(*, allowed: bool) -> None:
    """Allow tf32 for fp32 products and convolutions, or forbid it; for the whole process.

    Uses the older of torch's two families of switches. After a switch of the newer family
    (`fp32_precision`) was set, readers of the older one raise, and users' code and inductor contain
    such readers (torch, notes/cuda.rst, "TensorFloat-32").
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def set_up(precision: Precision, *, deterministic: bool, cudnn_benchmark: bool = False) -> None:
    """Set torch's process-wide switches."""
    torch.backends.cudnn.benchmark = cudnn_benchmark
    allow_tf32(allowed=precision == "tf32")
    if deterministic:
        # For a loop without an actor, which would have set it: torch refuses any other value, and
        # cuBLAS reads it at its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACE)
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(False)
