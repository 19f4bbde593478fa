"""Where a training's time goes: shares that are always told, and a pass of torch.profiler on
request.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from workers.settings import Scalar
from workers.training.host_memory import wait_asleep

_Span: TypeAlias = tuple[float, float, str, object]
"""Beginning and end, in microseconds, name, and thread."""

#: Of categories of a trace's events (libkineto/src/output_json.cpp).
_KINDS: Final = {
    "kernel": "kernels",
    "gpu_memset": "kernels",
    "gpu_memcpy": "copies",
    "cuda_runtime": "calls",
    "cuda_driver": "calls",
    "cpu_op": "operators",
}

#: Of these the longest are named.
_LONGEST: Final = 3
_LONGEST_NAME: Final = 60

#: Optimiser steps of this process before a pass: they choose kernels, and fill the allocator's
#: pool.
_WARM_UP_STEPS: Final = 2

_TRACE: Final = "trace.json.gz"


class Part(StrEnum):
    """What time is counted for."""

    COPIES = "copies"
    """A part of a batch, from the host to the device."""
    OPTIMIZER = "optimizer"
    """The norm of the gradient, clipping, the update of the weights, and their average."""


class TimeShares:
    """Shares of a training's time that go to copies to the device and to the optimiser.

    On a card the time is that between two events in its stream, so nothing waits for the card to
    learn it; on a CPU it is the time that passed. Does not count the wait for data (see `loader`),
    nor copies that torch makes inside a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began_s: float | None = None
        self._sums_s = dict.fromkeys(Part, 0.0)
        self._on_card: deque[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """Add the time of the `with` block to that of `part`, whether it ends well or not."""
        began_s = time.perf_counter()
        self._began_s = began_s if self._began_s is None else self._began_s
        if self._device.type != "cuda":
            try:
                yield
            finally:
                self._sums_s[part] += time.perf_counter() - began_s
            return
        stream = torch.cuda.current_stream(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # no types here
        began.record(stream)
        # Not in `finally`: after an error the card may not even take an event.
        yield
        ended.record(stream)
        self._on_card.append((part, began, ended))
        self._collect()

    def pct(self, part: Part) -> float | None:
        """Return the share of the time since the beginning; `None`: nothing was timed yet."""
        if self._began_s is None:
            return None
        self._collect()
        elapsed_s = time.perf_counter() - self._began_s
        return min(100.0, 100 * self._sums_s[part] / elapsed_s) if elapsed_s > 0 else 0.0

    def _collect(self) -> None:
        """Add up what the card has finished; the events are in the order of its stream."""
        while self._on_card and self._on_card[0][2].query():  # type: ignore[no-untyped-call]
            part, began, ended = self._on_card.popleft()
            self._sums_s[part] += began.elapsed_time(ended) / 1e3


class StepProfile:
    """A pass of torch.profiler over some optimiser steps: a Chrome trace in a file, for
    chrome://tracing or ui.perfetto.dev, and its shares.

    Call `begin` before each micro-batch and `end` after it. The profiler slows the steps that it
    looks at, and keeps some kilobytes of host memory for each of their operators.
    """

    def __init__(self, steps: int, device: torch.device, folder: Path | None) -> None:
        """Start nothing yet.

        Args:
            steps: Optimiser steps to look at; 0: none.
            device: That computes them.
            folder: Where the trace is written; `None`: only its shares are told.
        """
        self._steps = steps
        self._folder = folder
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
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
            path = (self._folder or Path(spare)) / _TRACE
            unfinished = path.with_name("new-" + _TRACE)
            profiler.export_chrome_trace(os.fspath(unfinished))
            unfinished.replace(path)
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                shares = trace_shares(json.load(file)["traceEvents"])
        where: dict[str, Scalar] = {} if self._folder is None else {"trace": os.fspath(path)}
        return {"steps": step - first, **shares, **where}


def trace_shares(events: Iterable[Mapping[str, Any]]) -> dict[str, Scalar]:
    """Return where the time of the `traceEvents` of a Chrome trace went; empty: nothing took time.

    Pure. Each moment counts once: as computing if a kernel runs, else as copying, else as
    synchronising if the host is still waiting for the device, else as idle; these four add up to
    100 %. `host_waits_pct` counts all waits, also while the device computes, and `longest` names
    the kernels with the most time. On a CPU the operators are the kernels, and copies are taken out
    of them.
    """
    spans: defaultdict[str, list[_Span]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _KINDS and event.get("ph") == "X" and "dur" in event:
            began_us = float(event["ts"])
            span = began_us, began_us + float(event["dur"]), event["name"], event.get("tid")
            spans[_KINDS[event["cat"]]].append(span)
    every = [span for some in spans.values() for span in some]
    window_us = max((span[1] for span in every), default=0.0) - min(
        (span[0] for span in every), default=0.0
    )
    if window_us <= 0:
        return {}
    waits = [
        span
        for span in spans["calls"]
        if span[2].endswith("Synchronize") or span[2] == "cudaMemcpy"
    ]
    kernels, copies = spans["kernels"], spans["copies"]
    if kernels:
        kernels_us = _covered_us(kernels)
        busy_us = _covered_us(kernels + copies)
        copies_us, waits_us = busy_us - kernels_us, _covered_us(kernels + copies + waits) - busy_us
    else:
        kernels = _outermost(spans["operators"])
        copies = [span for span in spans["operators"] if span[2] == "aten::copy_"]
        copies_us, waits_us = _covered_us(copies), 0.0
        kernels_us = _covered_us(kernels + copies) - copies_us
    share = 100 / window_us
    sums: defaultdict[str, float] = defaultdict(float)
    for begin, end, name, _ in kernels:
        sums[name[:_LONGEST_NAME]] += share * (end - begin)
    longest = sorted(sums, key=lambda name: -sums[name])[:_LONGEST]
    return {
        "duration_s": window_us / 1e6,
        "kernels_pct": share * kernels_us,
        "copies_pct": share * copies_us,
        "synchronisations_pct": share * waits_us,
        "idle_pct": max(0.0, 100 - share * (kernels_us + copies_us + waits_us)),
        "host_waits_pct": share * _covered_us(waits),
        "longest": ", ".join(f"{name} {sums[name]:.0f} %" for name in longest),
    }


def _covered_us(spans: Iterable[_Span]) -> float:
    """Return the length of the union."""
    covered, until = 0.0, float("-inf")
    for begin, end, *_ in sorted(spans, key=lambda span: span[:2]):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def _outermost(operators: Iterable[_Span]) -> list[_Span]:
    """Return the operators that no other operator of their thread has called."""
    outermost: list[_Span] = []
    ends: defaultdict[object, float] = defaultdict(lambda: float("-inf"))
    for begin, end, name, thread in sorted(operators, key=lambda span: (span[0], -span[1])):
        if begin >= ends[thread]:
            outermost.append((begin, end, name, thread))
            ends[thread] = end
    return outermost
