"""What CUDA and torch read from the environment, set before either is loaded. Loads neither.

Settings of a shell, such as the one that ran `ray start`, must not change how a worker's cap is enforced.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

#: With another allocator, or one that grows segments in place, the cap is not kept to the byte.
_ALLOCATOR_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")

_DEFAULTS: Final = {
    # The same numbers must mean the same cards to CUDA and to NVML.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # From 2026 on torch takes cuBLAS's workspace anew for each product (pytorch #194311); a product at the wall, the
    # emergency one above all, needs it to be there. Older versions always keep it.
    "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
}


def set_for_cuda(environment: MutableMapping[str, str]) -> None:
    """Change the environment of a process that is going to use a card; what is no matter of the cap stays."""
    for name in _ALLOCATOR_SETTINGS:
        environment.pop(name, None)
    for name, value in _DEFAULTS.items():
        environment.setdefault(name, value)
