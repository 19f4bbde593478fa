"""The bytes of tensors: their number, and their hash. No NumPy."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping

import torch

from workers.training.host_memory import wait_asleep


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from tensors_in(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from tensors_in(each)


def state_bytes(state: object) -> int:
    """Bytes of all tensors of a state."""
    return sum(each.nbytes for each in tensors_in(state))


def weights_sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and values, in the order of the names.

    Equal on every device.
    """
    digest = hashlib.sha256()
    for device in {each.device for each in weights.values()}:
        wait_asleep(device)
    for name in sorted(weights):
        weight = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        if weight.nbytes:
            digest.update((ctypes.c_char * weight.nbytes).from_address(weight.data_ptr()))
    return digest.hexdigest()
