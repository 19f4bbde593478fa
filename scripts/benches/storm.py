"""A storm of real out-of-memory errors in one process, which must survive a million and stay as it
was.

Fills the CPU device's kernel cap with blocks from 64 KiB to more than all of it until the kernel
refuses, classifies, releases, and begins again, with the product's device and classification and
without the engine.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from benches.common import Result, amiss, lone_worker, progress, status_bytes
from workers.settings import FailureKind, WorkerSpec
from workers.units import MIB

_LEAST_BLOCK_BYTES = 64 * 1024
_LARGEST_SHARE = 1.25  # of the cap: some blocks are refused although nothing is held
_EMERGENCY_EVERY = 1000
_POINTS = 10
#: The last of ten looks at the resident set may be this much above the first.
_RSS_GROWTH = 1.05
#: At the end the process may hold this much more than after the first tenth: the stacks of two
#: threads that Ray starts late (8 MiB each) and small objects, and no tensor.
_LEFT_BYTES = 20 * MIB


class Storm:
    """One process in the storm; also the body of a Ray actor."""

    def __init__(self, spec: WorkerSpec) -> None:
        from workers.devices.cpu import CpuDevice

        self._device = CpuDevice(spec)
        self._chance = random.Random(0)  # noqa: S311 - repeatable is what is wanted
        self._errors = 0
        self._held: list[Any] = []
        # Private writable memory as the kernel counts it: the device's own account may be what is
        # wrong.
        self._opened_bytes = status_bytes("VmData")
        # As the engine does: torch's modules stay, and a collection must not walk them every time.
        gc.collect()
        gc.freeze()

    def provoke(self, errors: int) -> Mapping[str, Any]:
        """Run into the wall `errors` times.

        Return what was counted, and what the process holds now.
        """
        kinds: Counter[str] = Counter()
        blocks = emergencies = 0
        started = time.perf_counter()
        for _ in range(errors):
            kind, granted = self._run_into_the_wall()
            # As the engine recovers: the workload lets go, the device collects, and what is left is
            # measured.
            with self._device.enforced():
                self._held.clear()
            self._device.release()
            self._device.rebase()
            blocks += granted
            kinds[kind.value] += 1
            self._errors += 1
            if self._errors % _EMERGENCY_EVERY == 0:
                self._device.emergency()
                emergencies += 1
        return {
            "errors": errors,
            "kinds": kinds,
            "blocks": blocks,
            "emergencies": emergencies,
            "seconds": time.perf_counter() - started,
            "left_bytes": status_bytes("VmData") - self._opened_bytes,
            "rss_bytes": psutil.Process().memory_info().rss,
            "pid": os.getpid(),
        }

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


def run(errors: int, budget_mib: float, *, bare: bool) -> Result:
    spec = lone_worker(budget_bytes=int(budget_mib * MIB))
    if bare:
        return _judged(errors, Storm(spec).provoke, where="plain process")
    from orchestrator.cluster.local_cluster import RayletPlan, rehearsed

    with rehearsed([RayletPlan(name="bench", cpus=2, gpus=0)]):
        import ray  # not earlier: it reads the rehearsal's token settings when it is imported

        # No second life: a crash must be seen.
        actor: Any = ray.remote(Storm).options(num_cpus=2, max_restarts=0).remote(spec)
        return _judged(errors, lambda part: ray.get(actor.provoke.remote(part)), where="Ray actor")


def _judged(errors: int, provoke: Callable[[int], Mapping[str, Any]], *, where: str) -> Result:
    parts: list[Mapping[str, Any]] = []
    broken: list[str] = []
    for point in range(_POINTS):
        try:
            parts.append(provoke(errors * (point + 1) // _POINTS - errors * point // _POINTS))
        except Exception as error:  # noqa: BLE001 - a dead process is a finding, not the end of the benchmark
            words = " ".join(str(error).split())[:1000]
            broken.append(
                f"the process did not survive part {point + 1}: {type(error).__name__}: {words}"
            )
            break
        last = parts[-1]
        rate = last["errors"] / last["seconds"]
        progress(
            f"{point + 1:>2}/{_POINTS}  {rate:,.0f} errors/s, {last['rss_bytes'] / MIB:.1f} MiB"
        )
    names = ("errors", "seconds", "blocks", "emergencies")
    count, seconds, blocks, emergencies = (sum(part[key] for part in parts) for key in names)
    kinds = sum((part["kinds"] for part in parts), Counter[str]())
    rss_bytes, left_bytes = ([part[key] for part in parts] for key in ("rss_bytes", "left_bytes"))
    figures = {
        "where": where,
        "errors": count,
        "seconds": seconds,
        "errors_per_s": count / seconds if seconds else None,
        "kinds": dict(kinds),
        "blocks_granted": blocks,
        "emergency_products": emergencies,
        "left_bytes": left_bytes,
        "rss_bytes": rss_bytes,
        "rss_last_to_first": rss_bytes[-1] / rss_bytes[0] if parts else None,
    }
    holds = {
        f"{count} errors survived, {errors} were to be provoked": count == errors,
        "some were not classified as a definite out-of-memory": not set(kinds)
        - {FailureKind.DEFINITE.value},
        "the process was replaced on the way": len({part["pid"] for part in parts}) <= 1,
        f"the resident set grew by more than {_RSS_GROWTH - 1:.0%} after the first tenth": (
            not parts or rss_bytes[-1] <= _RSS_GROWTH * rss_bytes[0]
        ),
        "memory was not given back": not parts or left_bytes[-1] <= left_bytes[0] + _LEFT_BYTES,
    }
    broken += amiss(holds)
    return Result(bench="oom-storm", figures=figures, broken=broken)
