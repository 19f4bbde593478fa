"""What the whole head and the engine cost: the product's work per second against the same torch loop without them.

Both run in an actor of one rehearsal cluster and take turns, each in a process of its own, with the same matrices,
threads, element type, ring and kernel limit. The product is driven by the supervisor with its event log and its
store, and counted from the outside: work in the reports over the time between the first report's arrival and the
last one's. Whatever lies between two slices counts against it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.common import Result, progress, spread, status_bytes
from benches.heads import supervise
from orchestrator.config.load import config_from_data
from orchestrator.core.placement import Target, plan_slots
from workers.messages import DeviceInfo, Report

_NODE = "bench"
_TARGET = 0.98


class BareLoop:
    """The same work with nothing around it. The body of a Ray actor."""

    def run(self, seconds: float, dtype: str, size: int, claim_bytes: int, device: DeviceInfo) -> float:
        """Multiply for so long, and return the work per second."""
        import ctypes
        import resource

        import torch

        ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD, as the product sets it
        torch.set_num_threads(device.threads)
        limit_bytes = status_bytes("VmData") + device.cap_bytes + device.context_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))

        torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        each_bytes = size * size * torch_dtype.itemsize
        block = torch.empty(claim_bytes, dtype=torch.uint8)
        matrices = block[: claim_bytes // each_bytes * each_bytes].view(torch_dtype).view(-1, size, size)
        matrices[:2].normal_(generator=torch.Generator().manual_seed(0))
        left, right, *ring = matrices.unbind()
        torch.mm(left, right, out=ring[0])  # the product's first report comes after one product, too
        started = time.perf_counter()
        products = 0
        while (took_s := time.perf_counter() - started) < seconds:
            products += 1
            torch.mm(left, right, out=ring[products % len(ring)])
        return 2.0 * size**3 * products / took_s


def run(rounds: int, seconds: float, size: int, dtype: str, slice_s: float) -> Result:
    """Let product and bare loop take turns."""
    from orchestrator.cluster.local_cluster import rehearsed
    from orchestrator.cluster.raylets import RayletPlan

    node = {"gpu": "cpu", "gpus": 0, "workers": 1, "cpus_per_worker": 2, "vram_per_worker_gib": 0.25, "size": size}
    data = {
        "nodes": {_NODE: node},
        "workload": {"dtype": dtype},
        "memory": {"floor_mib": 16},
        "compute_share_mode": "none",
        "verify": {"share": 0.0},  # `watching` tells what checks cost
        "run": {"slice_s": slice_s},
    }
    config = config_from_data(data, "bench")
    plans = plan_slots(config, Target(device="cpu", one_machine=True))
    rows: list[dict[str, Any]] = []

    with rehearsed([RayletPlan(name=_NODE, cpus=8, gpus=0)]) as fleet:
        import ray  # not earlier: it reads the rehearsal's token settings when it is imported

        def product(turn_s: float) -> Sequence[tuple[float, Report]]:
            arrived: list[tuple[float, Report]] = []
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                heard = lambda at_s, report: arrived.append((at_s, report))  # noqa: E731 - a name for one line
                supervise(config, plans, fleet, heard, Path(folder), turn_s)
            fleet.abandon(plans[0].reservation.slot)
            return arrived

        last = product(1.0)[-1][1]  # tells what the bare loop must be given; not counted
        device = last.device
        if device is None:
            raise RuntimeError(f"the worker did not come up: {last.reason}")

        def bare() -> float:
            cpus = plans[0].reservation.num_cpus
            actor: Any = ray.remote(BareLoop).options(num_cpus=cpus, max_restarts=0).remote()
            flop_per_s = ray.get(actor.run.remote(seconds, device.dtype, size, last.claim_bytes, device))
            ray.kill(actor)
            return float(flop_per_s)

        for number in range(rounds):
            bare_flop_per_s = bare() if number % 2 else None
            row = {"round": number + 1, **_shares(product(seconds))}
            row["bare_gflops"] = (bare_flop_per_s or bare()) / 1e9
            row["ratio"] = row["product_gflops"] / row["bare_gflops"]
            rows.append(row)
            progress(f"{number + 1}/{rounds}  ratio {row['ratio']:.3f}")
    ratios = spread([row["ratio"] for row in rows])
    figures = {
        "size": size,
        "dtype": device.dtype,
        "threads": device.threads,
        "slice_s": slice_s,
        "seconds": seconds,
        "rounds": rows,
        **{f"ratio_{key}": value for key, value in ratios.items()},
        "in_slices_median": spread([row["in_slices"] for row in rows])["median"],
        "in_steps_median": spread([row["in_steps"] for row in rows])["median"],
        "target": _TARGET,
        "target_met": ratios["median"] >= _TARGET,
    }
    return Result(bench="overhead", figures=figures)


def _shares(arrived: Sequence[tuple[float, Report]]) -> dict[str, float]:
    """Return the product's work per second, and the shares of the time inside slices and inside steps.

    The rest of the time is the head's and Ray's; the rest of a slice is the engine's.
    """
    (began_s, _), *later = arrived
    window_s = later[-1][0] - began_s
    return {
        "product_gflops": sum(report.counts.work_flop for _, report in later) / window_s / 1e9,
        "in_slices": sum(report.wall_s for _, report in later) / window_s,
        "in_steps": sum(report.counts.busy_s for _, report in later) / window_s,
    }
