"""Injected failures for tests of your own workload: torch's real exception types, on command.

In the style of spark-rapids' `injectRetryOOM`: so many failures, after so many good allocations.
Does not allocate.

    class MyWorkload(Workload):
        injector = OomInjector(num=2, skip=10)

        def step(self, size, batch):
            self.injector.check()  # before anything that allocates
            ...
"""

from __future__ import annotations

from typing import Final

import torch

from workers.settings import FailureKind

#: What each kind is in the words of torch's allocator, of cuBLAS, of CUDA, and of a wrong shape.
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


class OomInjector:
    """Lets `skip` checks pass, then fails `num` of those that follow, then lets all pass."""

    def __init__(self, num: int, skip: int = 0, kind: FailureKind = FailureKind.DEFINITE) -> None:
        """Prepare; nothing fails before `check` is called.

        Args:
            num: Failures in all.
            skip: Checks before the first that may fail.
            kind: What `workers.oom.classify` will make of the failure.

        Raises:
            ValueError: `num` or `skip` is negative.
        """
        if num < 0 or skip < 0:
            raise ValueError(f"num and skip must not be negative, not {num} and {skip}")
        self.checks = 0
        """Steps or allocations that asked."""
        self.injected = 0
        """Times one failed."""
        self._num = num
        self._skip = skip
        self._kind = kind

    def check(self) -> None:
        """Raise what `injected_error` makes of the kind, if it is time to."""
        if self.due():
            raise injected_error(self._kind)

    def due(self) -> bool:
        """Count a check, and return whether it is to fail, for callers that do more than raise."""
        self.checks += 1
        if self.checks <= self._skip or self.injected >= self._num:
            return False
        self.injected += 1
        return True


def injected_error(kind: FailureKind) -> RuntimeError:
    """Make the exception that `workers.oom.classify` takes for `kind`."""
    error_type, text = _ERRORS[kind]
    error: RuntimeError = error_type(f"{text} (injected)")
    if kind is FailureKind.CONTEXT_CORRUPTED:
        error.error_code = 700  # type: ignore[attr-defined]  # cudaErrorIllegalAddress; torch sets it in C++
    return error
