"""Which kernel computes attention: the one that is asked for, where it can, and which one it really was.

A kernel that cannot compute a model's attention on this device is replaced by the next one, so that a training never
fails for it. Covers `scaled_dot_product_attention` of torch, not attention that a model writes out itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from torch.nn.attention import SDPBackend, sdpa_kernel

from workers.training.settings import Attention

_KERNELS: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

#: Operators as a profiler names them, and the kernel that each one is.
_OPERATORS: Final = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
}


def kernels(wanted: Attention, *, deterministic: bool) -> AbstractContextManager[object]:
    """Return the region for forward and backward pass: what is checkpointed must choose the same kernel again.

    `auto` leaves the choice to torch. cuDNN's backward pass is never the replacement where bits must be the same.
    """
    if wanted == "auto":
        return nullcontext()
    if wanted == "math":
        return sdpa_kernel(SDPBackend.MATH)
    others = [name for name in _KERNELS if name != wanted and not (deterministic and name == "cudnn")]
    return sdpa_kernel([_KERNELS[name] for name in (wanted, *others)], set_priority=True)


def kernels_of(operators: Iterable[str]) -> str:
    """Return the kernels among these operators, such as `flash`; empty: there was no attention."""
    found = {kernel for operator in operators for start, kernel in _OPERATORS.items() if operator.startswith(start)}
    return "+".join(sorted(found))
