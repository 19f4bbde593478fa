"""The environment variables that CUDA and torch read, set before either is loaded. Loads neither.

Settings of a shell, such as the one that ran `ray start`, must not change how a worker's cap is
enforced.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

#: With another allocator, or one that grows segments in place, the cap is not exact to the byte.
_ALLOCATOR_SETTINGS: Final = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)

#: The workspace of cuBLAS, `:SIZE_KIB:COUNT` and so on, read once at the first product (cuBLAS,
#: "Results reproducibility"). The default is what torch uses on cards before Hopper; on Hopper it
#: would take 32 MiB by itself.
WORKSPACE: Final = ":4096:2:16:8"
#: The larger of the two with which torch computes deterministically; `:16:8` makes products slow.
DETERMINISTIC_WORKSPACE: Final = ":4096:8"

_DEFAULTS: Final = {
    # CUDA and NVML must give the cards the same numbers.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # From 2026 on torch allocates cuBLAS's workspace again for each product (pytorch #194311), but
    # a product at the cap, above all the emergency product, needs it to exist. Older versions
    # always keep it.
    "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
}


def workspace_bytes(config: str) -> int:
    """Return the bytes that `CUBLAS_WORKSPACE_CONFIG` makes cuBLAS take for each of its handles."""
    numbers = [int(number) for number in config.split(":") if number]
    return 1024 * sum(
        size_kib * count for size_kib, count in zip(numbers[::2], numbers[1::2], strict=True)
    )


def workspace_of(train: Mapping[str, object]) -> str:
    """Return the workspace for the section `train:` of cluster.yaml, which may be empty."""
    return DETERMINISTIC_WORKSPACE if train.get("deterministic") else WORKSPACE


def set_for_cuda(environment: MutableMapping[str, str], workspace: str | None = WORKSPACE) -> None:
    """Set the environment of a process that will use a card; variables that do not affect the cap
    stay.

    A `workspace` of `None` leaves cuBLAS's to the processes that this one starts.
    """
    for name in _ALLOCATOR_SETTINGS:
        environment.pop(name, None)
    for name, value in _DEFAULTS.items():
        environment.setdefault(name, value)
    if workspace is not None:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", workspace)
