"""Tensors in host memory that a worker's cap does not count.

A card's cap counts no tensor in host memory. A CPU's cap counts the private memory of the process,
so these tensors use shared memory, which no other process maps.

For a card, the tensors are pinned. torch rounds a pinned block up to a power of two and keeps it
when it is free (aten/src/ATen/core/CachingHostAllocator.h). So `like_all` puts several tensors into
few blocks, and `give_back` returns the free ones to the system.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

#: Alignment of a tensor in a block that it shares: that of the caching allocator of a card.
_ALIGNED_BYTES: Final = 512


def like(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same type, shape and strides in host memory; pinned, if
    possible, for a tensor on a card.

    Raises:
        RuntimeError, OSError, OverflowError: There is no memory.
    """
    return like_all([tensor])[0]


def like_all(tensors: Sequence[Tensor], *, pinned: bool = False) -> list[Tensor]:
    """Return an empty tensor for each, as `like` does. Those for a card, or all if `pinned`, share
    few pinned blocks.

    A block stays pinned while one of its tensors exists. torch does not track the copies of a
    shared block: wait for them before its last tensor is freed (`wait_asleep`).

    Raises:
        RuntimeError, OSError, OverflowError: There is no memory.
    """
    on_card = [number for number, tensor in enumerate(tensors) if pinned or tensor.is_cuda]
    sizes, places = blocks_for([tensors[number].nbytes for number in on_card])
    blocks = [_pinned(size) for size in sizes]
    parts = {
        number: blocks[block].untyped_storage()[offset : offset + tensors[number].nbytes]
        for number, (block, offset) in zip(on_card, places, strict=True)
    }
    return [_over(parts.get(number), tensor) for number, tensor in enumerate(tensors)]


def blocks_for(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return block sizes, all powers of two, and the block and offset of each of `sizes`, in bytes.
    Pure.

    The largest size is placed first. A new block is no larger than all remaining sizes together,
    unless one size needs more.
    """
    whole = [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
    blocks: list[int] = []
    free: list[int] = []
    places = [(0, 0)] * len(sizes)
    left = sum(whole)
    for number in sorted(range(len(whole)), key=lambda number: -whole[number]):
        size = whole[number]
        block = next((place for place, room in enumerate(free) if room >= size), len(blocks))
        if block == len(blocks):
            blocks.append(max(power_of_two(size), 1 << max(0, left.bit_length() - 1)))
            free.append(blocks[block])
        places[number] = block, blocks[block] - free[block]
        free[block] -= size
        left -= size
    return blocks, places


def power_of_two(size: int) -> int:
    """Return the bytes that torch pins for a block of `size` bytes."""
    return 1 << max(0, size - 1).bit_length()


def host_bytes(sizes: Sequence[int], *, on_card: bool) -> int:
    """Return the bytes that `like_all` allocates for tensors of these sizes."""
    return sum(blocks_for(sizes)[0]) if on_card else sum(sizes)


@contextmanager
def uncapped() -> Iterator[None]:
    """Lift the kernel's memory limit during the block. It would count the host memory in which a
    model is made before it moves to a card; a card's cap does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def give_back(device: torch.device) -> None:
    """Return unused pinned blocks of a card to the system."""
    if device.type == "cuda":
        # `torch.accelerator` has this function since 2.12; older versions only have the binding.
        empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        empty()


def wait_asleep(device: torch.device) -> None:
    """Wait until the current stream of a card is idle, without keeping a processor busy.

    Reading a value of the card, or `synchronize` of a stream, waits in a loop that keeps a whole
    processor busy.
    """
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no types here
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def _pinned(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8, device="cpu")  # WSL2 limits pinned memory


def _over(part: torch.UntypedStorage | None, tensor: Tensor) -> Tensor:
    """Return a tensor like `tensor` in a part of a block, or in memory that no cap counts."""
    # The layout without the gaps of a slice of another tensor.
    layout = torch.empty_like(tensor, device="meta")
    if part is not None:
        # Use a separate storage: `torch.save` refuses a storage with two types.
        return torch.empty(0, dtype=tensor.dtype).set_(part, 0, layout.shape, layout.stride())
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    # Anonymous memory, freed with its last tensor: no descriptor, no name in /dev/shm.
    block = torch.frombuffer(mmap.mmap(-1, layout.nbytes), dtype=tensor.dtype)
    return block.as_strided(layout.shape, layout.stride())


def to_host(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Move tensors of a device to host memory, one by one: each is freed before the next is copied.

    Raises:
        RuntimeError, OSError, OverflowError: There is no memory.
    """
    wait_asleep(device)
    hosts = like_all([tensor.detach() for tensor in tensors], pinned=device.type == "cuda")
    for tensor, host in zip(tensors, hosts, strict=True):
        tensor.data = host.copy_(tensor.data)


def to_device(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Move tensors to a device: all, or none if the device lacks the memory."""
    moved = [torch.empty_like(tensor.data, device=device) for tensor in tensors]
    for tensor, there in zip(tensors, moved, strict=True):
        there.copy_(tensor.data, non_blocking=True)
    wait_asleep(device)
    for tensor, there in zip(tensors, moved, strict=True):
        tensor.data = there
    give_back(device)


class Parking:
    """Moves tensors of a device to host memory for a while."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parked: list[Tensor] = []

    def park(self, tensors: Iterable[Tensor], on_host: Iterable[Tensor] = ()) -> int:
        """Move the tensors that are on the device (its number may be missing) to host memory;
        return the bytes that they occupy there, rounding included.

        Tensors of `on_host` stay there, also after `unpark`.
        """
        stay = {id(tensor) for tensor in (*on_host, *self._parked)}
        moving = {
            id(tensor): tensor
            for tensor in tensors
            if tensor.device.type == self._device.type and id(tensor) not in stay
        }
        to_host([*moving.values()], self._device)
        self._parked += moving.values()
        sizes = [tensor.nbytes for tensor in self._parked]
        return host_bytes(sizes, on_card=self._device.type == "cuda")

    def unpark(self) -> None:
        """Move the parked tensors back: all, or none if the device lacks the memory."""
        to_device(self._parked, self._device)
        self._parked = []
