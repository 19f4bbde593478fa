"""What the backward pass will need waits in host memory: each tensor is copied there when the
forward pass saves it.

It comes back when the backward pass asks for it. Copies change no bit. Weights stay where they are,
also those that autocast has made narrower, and so does what a recomputed block computes again.
The host needs room for all activations of a part of a batch. What a compiled graph saves does not
say what it came from: there such weights move.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from workers.training.host_memory import like, power_of_two

#: Smaller tensors stay: a page of host memory and a copy each would be worth more than they are.
_LEAST_BYTES: Final = 4096

#: Through these a weight becomes what autocast computes with, and what a product saves of it.
_CASTS: Final = {
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
}

_NARROW: Final = {torch.bfloat16, torch.float16}


class HostActivations:
    """The activations of one model."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._model = model
        self._device_type = device_type
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self.waiting_bytes = 0
        """What the forward pass under way, or the last one, takes of host memory, rounding
        included.
        """

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the region for a forward pass."""
        self.waiting_bytes = 0
        weights = {each.untyped_storage()._cdata for each in self._model.parameters()}
        # No graph leads to a frozen one, so its copy is known by its shape alone.
        frozen = {
            shape
            for each in self._model.parameters()
            if not each.requires_grad
            for shape in (each.shape, each.shape[::-1])
        }

        def is_weight(tensor: Tensor) -> bool:
            if tensor.untyped_storage()._cdata in weights:
                return True
            if not tensor.requires_grad:
                return tensor.dtype in _NARROW and tensor.shape in frozen
            node = tensor.grad_fn
            while node is not None and node.name() in _CASTS:
                node = node.next_functions[0][0]
            leaf = getattr(node, "variable", None)  # of the node that adds up a weight's gradient
            return leaf is not None and leaf.untyped_storage()._cdata in weights

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            if (
                tensor.nbytes < _LEAST_BYTES
                or tensor.device.type != self._device_type
                or is_weight(tensor)
            ):
                return tensor
            once = _once(tensor.detach())
            self.waiting_bytes += power_of_two(once.nbytes)
            fill = _leave if isinstance(tensor, FakeTensor) else self._copied(once)
            size, stride, kept, dtype, device = (
                tensor.shape,
                tensor.stride(),
                once.shape,
                tensor.dtype,
                tensor.device,
            )
            # With the strides that it had, though it may take gaps: a compiled backward pass
            # insists on them.
            return lambda: fill(
                torch.empty_strided(kept, stride, dtype=dtype, device=device)
            ).expand(size)

        def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed()

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _copied(self, tensor: Tensor) -> Callable[[Tensor], Tensor]:
        """Copy it to the host, and return what copies it back into another tensor."""
        host = like(tensor) if tensor.is_cuda else self._shared(tensor)
        # Pageable memory must be written before anything reads it; pinned memory is read in the
        # order of the stream.
        fast = host.is_pinned()
        host.copy_(tensor, non_blocking=fast)
        return lambda back: back.copy_(host, non_blocking=fast)

    def _shared(self, tensor: Tensor) -> Tensor:
        """Return memory that no cap counts, from blocks that stay: the kernel's highest size is
        then that of the rest.

        On a card torch keeps its pinned blocks in the same way, by powers of two.
        """
        layout = torch.empty_like(tensor, device="meta")
        size = power_of_two(layout.nbytes)
        free = self._free[size]
        block = free.pop() if free else mmap.mmap(-1, size)
        flat = torch.frombuffer(block, dtype=tensor.dtype, count=layout.numel())
        host = flat.as_strided(layout.shape, layout.stride())
        weakref.finalize(host, free.append, block).atexit = False
        return host


def _once(tensor: Tensor) -> Tensor:
    """Return the tensor without the dimensions along which it only repeats itself."""
    size = [
        1 if step == 0 else length
        for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(size, tensor.stride())


def _leave(tensor: Tensor) -> Tensor:
    """Take the memory that bringing a tensor back would take; there is no data."""
    return tensor
