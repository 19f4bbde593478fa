"""What the whole head and the engine cost: the product's work per second against the same torch
loop without them.

Both take turns in an actor of one rehearsal cluster, each in a process of its own, with the same
matrices, threads, element type, ring and kernel limit. The product is driven by the supervisor with
its event log and its store, and counted from outside: work in the reports over the time from the
first report's arrival to the last one's.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.common import Result, in_turn, progress, spread, status_bytes
from benches.heads import Arrivals, supervise
from orchestrator.config.load import config_from_data
from orchestrator.core.placement import Target, plan_slots
from workers.messages import DeviceInfo, Report

_NODE = "bench"
_TARGET = 0.98


class BareLoop:
    """The same work with nothing around it. The body of a Ray actor."""

    def run(
        self, seconds: float, dtype: str, size: int, claim_bytes: int, device: DeviceInfo
    ) -> float:
        import resource

        import torch

        from benches import bodies

        torch.set_num_threads(device.threads)
        limit_bytes = status_bytes("VmData") + device.cap_bytes + device.context_bytes
        resource.setrlimit(
            resource.RLIMIT_DATA, (limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1])
        )
        return bodies.BareLoop((dtype, size, claim_bytes), torch.device("cpu")).flop_per_s(seconds)


def run(rounds: int, seconds: float, size: int, dtype: str, slice_s: float) -> Result:
    from orchestrator.cluster.local_cluster import rehearsed
    from orchestrator.cluster.raylets import RayletPlan

    node = {
        "gpu": "cpu",
        "gpus": 0,
        "workers": 1,
        "cpus_per_worker": 2,
        "vram_per_worker_gib": 0.25,
        "size": size,
    }
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
            arrivals = Arrivals(fleet, lambda at_s, report: arrived.append((at_s, report)))
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                supervise(config, plans, arrivals, Path(folder), turn_s)
            fleet.abandon(plans[0].spec.slot)
            return arrived

        last = product(1.0)[-1][1]  # tells what the bare loop must be given; not counted
        device = last.device
        if device is None:
            raise RuntimeError(f"the worker did not come up: {last.reason}")

        def bare() -> float:
            cpus = plans[0].num_cpus
            actor: Any = ray.remote(BareLoop).options(num_cpus=cpus, max_restarts=0).remote()
            flop_per_s = ray.get(
                actor.run.remote(seconds, device.dtype, size, last.claim_bytes, device)
            )
            ray.kill(actor)
            return float(flop_per_s) / 1e9

        for number in range(rounds):
            turns: dict[str, Any] = in_turn(
                number, {"product": lambda: _shares(product(seconds)), "bare": bare}
            )
            row = {"round": number + 1, **turns["product"], "bare_gflops": turns["bare"]}
            row["ratio"] = row["product_gflops"] / row["bare_gflops"]
            rows.append(row)
            progress(f"{number + 1}/{rounds}  ratio {row['ratio']:.3f}")
    ratios = spread("ratio", [row["ratio"] for row in rows])
    figures = {
        "size": size,
        "dtype": device.dtype,
        "threads": device.threads,
        "slice_s": slice_s,
        "seconds": seconds,
        "rounds": rows,
        **ratios,
        **{
            f"{key}_median": statistics.median(row[key] for row in rows)
            for key in ("in_slices", "in_steps")
        },
        "target": _TARGET,
        "target_met": ratios["ratio_median"] >= _TARGET,
    }
    return Result(bench="overhead", figures=figures)


def _shares(arrived: Sequence[tuple[float, Report]]) -> dict[str, float]:
    """Return the product's work per second, and the shares of the time inside slices and inside
    steps.

    The rest of the time is the head's and Ray's; the rest of a slice is the engine's.
    """
    (began_s, _), *later = arrived
    window_s = later[-1][0] - began_s
    return {
        "product_gflops": sum(report.counts.work_flop for _, report in later) / window_s / 1e9,
        "in_slices": sum(report.wall_s for _, report in later) / window_s,
        "in_steps": sum(report.counts.busy_s for _, report in later) / window_s,
    }
