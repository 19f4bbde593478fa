"""Failures to inject in tests of your own workload: torch's real exceptions. Does not allocate.

class MyWorkload(Workload):
    fails = 2

    def step(self, size, batch):
        if self.fails:
            self.fails -= 1
            raise injected_error(FailureKind.DEFINITE)
        ...
"""

from __future__ import annotations

from typing import Final

import torch

from workers.settings import FailureKind

#: Type and text of each kind: of torch's allocator, of cuBLAS, of CUDA, and of a wrong shape.
_ERRORS: Final = {
    FailureKind.DEFINITE: (torch.OutOfMemoryError, "CUDA out of memory."),
    FailureKind.PROBABLE: (
        RuntimeError,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    FailureKind.CONTEXT_CORRUPTED: (
        torch.AcceleratorError,
        "CUDA error: an illegal memory access was encountered",
    ),
    FailureKind.OTHER: (RuntimeError, "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
}


def injected_error(kind: FailureKind) -> RuntimeError:
    """Return an exception that `workers.oom.classify` classifies as `kind`."""
    error_type, text = _ERRORS[kind]
    error: RuntimeError = error_type(f"{text} (injected)")
    if kind is FailureKind.CONTEXT_CORRUPTED:
        error.error_code = 700  # type: ignore[attr-defined]  # cudaErrorIllegalAddress; torch sets it in C++
    return error
