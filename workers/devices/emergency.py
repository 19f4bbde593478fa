"""The emergency product: two small matrices and memory for their product, allocated when the device is opened.

Running it allocates nothing: the operands, the result and (on CUDA) the cuBLAS handle and workspace exist since the
device was opened. It answers one question, whether the device still computes, so its value is checked too.
Does not decide when to run.
"""

from __future__ import annotations

import torch

from workers.errors import ContextCorruptedError


class EmergencyProduct:
    """C = A B for square matrices of ones and twos, whose every element is exactly `2 x size`.

    fp32 whatever the workload's type: the value stays exact up to 2^24, and the kernel is never missing.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate and run once, so that handle, workspace and kernel are loaded.

        Args:
            size: Rows and columns, the guides' 128.
            device: Where the product runs.
        """
        self.size = size
        self._left = torch.ones((size, size), dtype=torch.float32, device=device)
        self._right = torch.full((size, size), 2.0, dtype=torch.float32, device=device)
        self._result = torch.empty((size, size), dtype=torch.float32, device=device)
        self.run()

    def run(self) -> None:
        """Compute and check the product.

        Raises:
            RuntimeError: The device's own error.
            ContextCorruptedError: The device returned a wrong value.
        """
        self._result.zero_()  # a result left over from the last run must not pass for this one
        torch.mm(self._left, self._right, out=self._result)
        corner = self._result[-1, -1].item()
        if corner != 2.0 * self.size:
            raise ContextCorruptedError(
                f"the {self.size}x{self.size} emergency product gave {corner}, not {2.0 * self.size}"
            )
