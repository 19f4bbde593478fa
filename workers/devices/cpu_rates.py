"""Measures at what rate a CPU multiplies matrices of each number type: a program, for a head that
must not load torch.

    python -m workers.devices.cpu_rates

prints one line of JSON: operations a second by type, on one thread. What /proc/cpuinfo lists does
not tell: a type may be listed and computed 50 times slower than fp32, by the library or by the
virtual machine. Says nothing about cards.
"""

from __future__ import annotations

import json
import time

import torch

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

#: Both types together take 50 ms where both are fast.
_EACH_S = 0.025
_EDGE = 256


def rates() -> dict[str, float]:
    """Return floating-point operations a second by number type."""
    torch.set_num_threads(1)
    return {name: _rate(dtype) for name, dtype in _DTYPES.items()}


def _rate(dtype: torch.dtype) -> float:
    ones = torch.ones((_EDGE, _EDGE), dtype=dtype)
    torch.mm(ones, ones)  # the library makes its kernel
    count, began_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < _EACH_S:
        torch.mm(ones, ones)
        count += 1
    return 2 * _EDGE**3 * count / elapsed_s


if __name__ == "__main__":
    print(json.dumps(rates()))  # noqa: T201 - its output
