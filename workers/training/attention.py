"""Which kernel computes attention: the one that is asked for, where it can, and which one it really
was.

A kernel that cannot compute a model's attention on this device is replaced by the next one, so that
a training never fails for it. Covers `scaled_dot_product_attention` of torch, not attention that a
model writes out itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from workers.training.settings import Attention

_KERNELS: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

#: Operators, and the kernel that each one is. The last one is called by torch's `math` alone.
_OPERATORS: Final = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_safe_softmax": "math",
}


def kernels(wanted: Attention, *, deterministic: bool) -> AbstractContextManager[object]:
    """Return the region for forward and backward pass: what is recomputed must choose the same
    kernel again.

    `auto` leaves the choice to torch. cuDNN's backward pass is never the replacement where bits
    must be the same.
    """
    if wanted == "auto":
        return nullcontext()
    if wanted == "math":
        return sdpa_kernel(SDPBackend.MATH)
    others = [
        name for name in _KERNELS if name != wanted and not (deterministic and name == "cudnn")
    ]
    return sdpa_kernel([_KERNELS[name] for name in (wanted, *others)], set_priority=True)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # missing in torch's stubs
    """Sees which kernels run.

    Not a profiler: that would write to the terminal, and there is one of it in a process.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels: set[str] = set()

    @property
    def ran(self) -> str:
        """The kernels that have run, such as `flash`; empty: there was no attention."""
        return "+".join(sorted(self._kernels))

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        name = func._schema.name  # type: ignore[attr-defined]  # of an operator
        self._kernels.update(
            kernel for start, kernel in _OPERATORS.items() if name.startswith(start)
        )
        return func(*args, **(kwargs or {}))
