"""How many threads a worker computes with: the real cores, shared by the workers of the machine.

Not Ray's `num_cpus`, which only admits: Ray sets OMP_NUM_THREADS to it, and seven workers with 8 each would run 56
threads on an ordinary PC.
"""

from __future__ import annotations

import os

import psutil


def threads_for(workers_on_host: int) -> int:
    """Return this worker's share of the physical cores here, one at the least."""
    return threads_per_worker(psutil.cpu_count(logical=False) or os.cpu_count() or 1, workers_on_host)


def threads_per_worker(physical_cores: int, workers_on_host: int) -> int:
    """Return how many threads each worker may run so that together they do not exceed the cores."""
    return max(1, physical_cores // workers_on_host)
