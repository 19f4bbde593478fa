"""A storm of real out-of-memory errors in one process, which must survive a million and stay as it was.

Fills the CPU device's kernel cap with blocks from 64 KiB to more than all of it until the kernel refuses, classifies,
releases, and begins again. Uses the product's device and its classification, and not the engine's loop around them.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benches.common import Result, lone_worker, progress
from workers.settings import FailureKind, WorkerSpec
from workers.units import MIB

_LEAST_BLOCK_BYTES = 64 * 1024
_LARGEST_SHARE = 1.25
"""Of the cap: some blocks are refused although nothing is held."""

_EMERGENCY_EVERY = 1000
_POINTS = 10

#: The last of ten looks at the resident set may be this much above the first.
_RSS_GROWTH = 1.05

#: At the end the process may hold this much more than after the first tenth: the stacks of two threads that Ray
#: starts late (8 MiB each) and small objects, and no tensor.
_LEFT_BYTES = 20 * MIB


@dataclass(slots=True)
class Gale:
    """What one part of a storm did."""

    errors: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    blocks: int = 0
    """Blocks granted before the refusals."""
    emergencies: int = 0
    left_bytes: int = 0
    """Held at the end, more than when the process began: threads, small objects, and what was not given back."""
    seconds: float = 0.0
    rss_bytes: int = 0
    pid: int = 0


class Storm:
    """One process in the storm; also the body of a Ray actor."""

    def __init__(self, spec: WorkerSpec) -> None:
        from workers.devices.cpu import CpuDevice

        self._device = CpuDevice(spec)
        self._chance = random.Random(0)  # noqa: S311 - repeatable is what is wanted
        self._errors = 0
        self._held: list[Any] = []
        self._opened_bytes = _data_bytes()
        # As the engine does: torch's modules live for ever, and a collection must not walk them every time.
        gc.collect()
        gc.freeze()

    def provoke(self, errors: int) -> Gale:
        """Run into the wall `errors` times."""
        gale = Gale(pid=os.getpid())
        started = time.perf_counter()
        while gale.errors < errors:
            kind, blocks = self._run_into_the_wall()
            # As the engine recovers: the workload lets go, the device collects, and what is left is measured.
            with self._device.enforced():
                self._held.clear()
            self._device.release()
            self._device.rebase()
            gale.errors += 1
            gale.blocks += blocks
            gale.kinds[kind.value] += 1
            self._errors += 1
            if self._errors % _EMERGENCY_EVERY == 0:
                self._device.emergency()
                gale.emergencies += 1
        gale.seconds = time.perf_counter() - started
        gale.left_bytes = _data_bytes() - self._opened_bytes
        gale.rss_bytes = psutil.Process().memory_info().rss
        return gale

    def _run_into_the_wall(self) -> tuple[FailureKind, int]:
        import torch

        from workers import oom

        cap_bytes = self._device.info.cap_bytes
        span = math.log(_LARGEST_SHARE * cap_bytes / _LEAST_BLOCK_BYTES)
        try:
            with self._device.enforced():
                while True:
                    size_bytes = int(_LEAST_BLOCK_BYTES * math.exp(span * self._chance.random()))
                    block = torch.empty(size_bytes, dtype=torch.uint8)
                    block[0] = 1  # so that a page of it is really there
                    self._held.append(block)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is classified
            kind = oom.classify(error).kind
        return kind, len(self._held)


def _data_bytes() -> int:
    """Private writable memory as the kernel counts it; the device's own account may be what is wrong."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))


def run(errors: int, budget_bytes: int, *, bare: bool) -> Result:
    """Provoke `errors` out-of-memory errors in one process, in a Ray actor or here."""
    spec = lone_worker(budget_bytes=budget_bytes)
    if bare:
        return _judged(errors, Storm(spec).provoke, where="plain process")
    from orchestrator.cluster.local_cluster import RayletPlan, rehearsed

    with rehearsed([RayletPlan(name="bench", cpus=2, gpus=0)]):
        import ray  # not earlier: it reads the rehearsal's token settings when it is imported

        # No second life: a crash must be seen.
        actor: Any = ray.remote(Storm).options(num_cpus=2, max_restarts=0).remote(spec)
        return _judged(errors, lambda part: ray.get(actor.provoke.remote(part)), where="Ray actor")


def _judged(errors: int, provoke: Callable[[int], Gale], *, where: str) -> Result:
    gales: list[Gale] = []
    crash = ""
    for point in range(_POINTS):
        part = errors * (point + 1) // _POINTS - errors * point // _POINTS
        try:
            gales.append(provoke(part))
        except Exception as error:  # noqa: BLE001 - a dead process is a finding, not the end of the benchmark
            words = " ".join(str(error).split())[:1000]
            crash = f"the process did not survive part {point + 1}: {type(error).__name__}: {words}"
            break
        gale = gales[-1]
        progress(
            f"{point + 1:>2}/{_POINTS}  {gale.errors / gale.seconds:,.0f} errors/s, {gale.rss_bytes / MIB:.1f} MiB"
        )
    return Result(
        bench="oom-storm", figures=_figures(gales, where), broken=[*_broken(errors, gales), *filter(None, [crash])]
    )


def _figures(gales: list[Gale], where: str) -> dict[str, Any]:
    seconds = sum(gale.seconds for gale in gales)
    count = sum(gale.errors for gale in gales)
    return {
        "where": where,
        "errors": count,
        "seconds": seconds,
        "errors_per_s": count / seconds if seconds else None,
        "kinds": dict(sum((gale.kinds for gale in gales), Counter())),
        "blocks_granted": sum(gale.blocks for gale in gales),
        "emergency_products": sum(gale.emergencies for gale in gales),
        "left_bytes": [gale.left_bytes for gale in gales],
        "rss_bytes": [gale.rss_bytes for gale in gales],
        "rss_last_to_first": gales[-1].rss_bytes / gales[0].rss_bytes if gales else None,
    }


def _broken(errors: int, gales: list[Gale]) -> list[str]:
    found = []
    if sum(gale.errors for gale in gales) != errors:
        found.append(f"{sum(gale.errors for gale in gales)} errors survived, {errors} were to be provoked")
    if any(set(gale.kinds) - {FailureKind.DEFINITE.value} for gale in gales):
        found.append("some were not classified as a definite out-of-memory")
    if len({gale.pid for gale in gales}) > 1:
        found.append("the process was replaced on the way")
    if gales and gales[-1].rss_bytes > _RSS_GROWTH * gales[0].rss_bytes:
        found.append(f"the resident set grew by more than {_RSS_GROWTH - 1:.0%} after the first tenth")
    if gales and gales[-1].left_bytes > gales[0].left_bytes + _LEFT_BYTES:
        found.append("memory was not given back")
    return found
