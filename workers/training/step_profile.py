"""A pass of torch.profiler over some optimiser steps, on request: a Chrome trace in a file, and its
shares.

Open the file in chrome://tracing or ui.perfetto.dev. Does not say what the shares mean (see
`trace_shares`). The profiler slows the steps that it looks at, and keeps some kilobytes of host
memory for each of their operators.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from workers.settings import Scalar
from workers.training.host_memory import wait_asleep
from workers.training.trace_shares import trace_shares

#: Optimiser steps of this process before the pass: they choose kernels, and fill the allocator's
#: pool.
_WARM_UP_STEPS: Final = 2

_NAME: Final = "trace.json.gz"


class StepProfile:
    """One pass. Call `begin` before each micro-batch and `end` after it."""

    def __init__(self, steps: int, device: torch.device, folder: Path | None) -> None:
        """Start nothing yet.

        Args:
            steps: Optimiser steps to look at; 0: none.
            device: That computes them.
            folder: Where the trace is written; `None`: only its shares are told.
        """
        self._steps = steps
        self._folder = folder
        on_card = device.type == "cuda"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
        self._device = device
        self._profiler: profile | None = None
        self._begins_at: int | None = None

    def begin(self, step: int) -> None:
        """Start the profiler if `step` optimiser steps are enough for that.

        Raises:
            Exception: Whatever torch's profiler raises; the pass is then over.
        """
        if not self._steps or self._profiler is not None:
            return
        if self._begins_at is None:
            self._begins_at = step + _WARM_UP_STEPS
        if step >= self._begins_at:
            profiler = profile(activities=self._activities)
            steps, self._steps = self._steps, 0
            profiler.start()
            self._steps, self._begins_at, self._profiler = steps, step, profiler

    def abandon(self) -> None:
        """Stop a pass that is under way, and begin another later: torch has one profiler for a
        process.

        Raises:
            Exception: Whatever torch's profiler raises; there is no pass then.
        """
        profiler, self._profiler, self._begins_at = self._profiler, None, None
        if profiler is not None:
            profiler.stop()

    def end(self, step: int, *, finished: bool) -> dict[str, Scalar] | None:
        """Stop after the last step, write the trace, and return what to tell; `None`: it goes on,
        or there is none.

        Takes some seconds. Call it where host memory is not capped.

        Raises:
            Exception: The trace cannot be written or read, or the profiler fails; the pass is then
                over.
        """
        profiler, first = self._profiler, self._begins_at or 0
        if profiler is None or (step < first + self._steps and not finished):
            return None
        self._profiler, self._steps = None, 0
        wait_asleep(self._device)
        profiler.stop()
        with tempfile.TemporaryDirectory() as spare:
            if self._folder is not None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = (self._folder or Path(spare)) / _NAME
            unfinished = path.with_name("new-" + _NAME)
            profiler.export_chrome_trace(os.fspath(unfinished))
            unfinished.replace(path)
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                shares = trace_shares(json.load(file)["traceEvents"])
        where: dict[str, Scalar] = {} if self._folder is None else {"trace": os.fspath(path)}
        return {"steps": step - first, **({} if shares is None else asdict(shares)), **where}
