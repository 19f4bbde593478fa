"""Tensors in host memory that a worker's cap does not count.

On a card every tensor on the host is one. On a CPU the cap counts what is private to the process, so these share their
memory with processes that do not exist.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def like(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same type, shape and strides; pinned if this one is on a card and that is possible.

    Raises:
        RuntimeError, OSError, OverflowError: There is no memory.
    """
    if tensor.is_cuda:
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty_like(tensor, device="cpu")  # under WSL2 little can be pinned
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    layout = torch.empty_like(tensor, device="meta")  # without the gaps that a slice of another tensor has
    # Anonymous, and gone with the last tensor that uses it: no file descriptor, and no name in /dev/shm.
    block = torch.frombuffer(mmap.mmap(-1, layout.nbytes), dtype=tensor.dtype)
    return block.as_strided(layout.shape, layout.stride())


class HostArray:
    """Numbers that are added one after the other, in the memory of `like`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._room = like(torch.empty(4096, dtype=dtype, device="meta"))
        self._used = 0

    def extend(self, more: Tensor) -> None:
        """Add numbers; that may take as much memory again for a moment."""
        used = self._used + len(more)
        if used > len(self._room):
            self._room = self._copied(max(used, 2 * len(self._room)))
        self._room[self._used : used] = more
        self._used = used

    def whole(self) -> Tensor:
        """Return the numbers, in no more memory than they take."""
        return self._copied(self._used)

    def _copied(self, length: int) -> Tensor:
        room = like(torch.empty(length, dtype=self._room.dtype, device="meta"))
        if length:
            room[: self._used] = self._room[: self._used]
        return room
