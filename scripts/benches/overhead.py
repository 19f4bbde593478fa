"""What the whole head and the engine cost: the product's work per second against the same torch loop without them.

Both run in an actor of one rehearsal cluster and take turns, each in a process of its own, with the same matrices,
threads, element type, ring and kernel limit. The product is driven by the supervisor with its event log and its
store, and counted from the outside: work in the reports over the time between the first report's arrival and the
last one's. Whatever lies between two slices counts against it.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.common import Result, progress, spread
from orchestrator.config.load import config_from_data
from orchestrator.core.fleet import Fleet, SliceEnded, SliceReported
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from workers.messages import DeviceInfo, Report

_NODE = "bench"
_TARGET = 0.98


class BareLoop:
    """The same work with nothing around it. The body of a Ray actor."""

    def run(self, seconds: float, dtype: str, size: int, claim_bytes: int, device: DeviceInfo) -> tuple[float, float]:
        """Multiply for so long, and return the work done and the time it took."""
        import ctypes
        import resource

        import torch

        ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD, as the product sets it
        torch.set_num_threads(device.threads)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        data_bytes = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + device.cap_bytes + device.context_bytes, hard))

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
        return 2.0 * size**3 * products, took_s


class Recording:
    """A fleet that notes when each report arrived, and passes everything on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.arrived: list[tuple[float, Report]] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the fleet has
        return getattr(self._fleet, name)

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        """See `Fleet.wait`."""
        outcomes = self._fleet.wait(timeout_s)
        now_s = time.perf_counter()
        self.arrived += [(now_s, outcome.report) for outcome in outcomes if isinstance(outcome, SliceReported)]
        return outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the product."""

    flop_per_s: float
    in_slices: float
    """Share of the time that lies inside slices; the rest is the head's and Ray's."""
    in_steps: float
    """Share of the time that lies inside steps; the rest of a slice is the engine's."""
    last: Report


def run(rounds: int, seconds: float, size: int, dtype: str, slice_s: float) -> Result:
    """Let product and bare loop take turns."""
    from orchestrator.cluster.local_cluster import RayletPlan, rehearsed

    data = {
        "nodes": {
            _NODE: {
                "gpu": "cpu",
                "gpus": 0,
                "workers": 1,
                "cpus_per_worker": 2,
                "vram_per_worker_gib": 0.25,
                "size": size,
            }
        },
        "workload": {"dtype": dtype},
        "memory": {"floor_mib": 16},
        "compute_share_mode": "none",
        "verify": {"share": 0.0},  # `watching` tells what checks cost
        "run": {"slice_s": slice_s},
    }
    config = config_from_data(data, "bench")
    (plan,) = plan_slots(config, Target(device="cpu", one_machine=True))
    rows: list[dict[str, Any]] = []

    with rehearsed([RayletPlan(name=_NODE, cpus=8, gpus=0)]) as fleet:
        import ray  # not earlier: it reads the rehearsal's token settings when it is imported

        first = _product(fleet, config, plan, seconds=1.0)  # tells what the bare loop must be given; not counted
        device = first.last.device
        if device is None:
            raise RuntimeError(f"the worker did not come up: {first.last.reason}")

        def bare() -> float:
            actor: Any = ray.remote(BareLoop).options(num_cpus=plan.reservation.num_cpus, max_restarts=0).remote()
            flop, took_s = ray.get(actor.run.remote(seconds, device.dtype, size, first.last.claim_bytes, device))
            ray.kill(actor)
            return float(flop) / float(took_s)

        for number in range(rounds):
            if number % 2:
                bare_flop_per_s = bare()
                turn = _product(fleet, config, plan, seconds)
            else:
                turn = _product(fleet, config, plan, seconds)
                bare_flop_per_s = bare()
            rows.append(
                {
                    "round": number + 1,
                    "product_gflops": turn.flop_per_s / 1e9,
                    "bare_gflops": bare_flop_per_s / 1e9,
                    "ratio": turn.flop_per_s / bare_flop_per_s,
                    "in_slices": turn.in_slices,
                    "in_steps": turn.in_steps,
                }
            )
            progress(f"{number + 1}/{rounds}  ratio {rows[-1]['ratio']:.3f}")
    ratios = spread([row["ratio"] for row in rows])
    figures = {
        "size": size,
        "dtype": device.dtype,
        "threads": device.threads,
        "slice_s": slice_s,
        "seconds": seconds,
        "rounds": rows,
        "ratio_median": ratios["median"],
        "ratio_least": ratios["least"],
        "ratio_most": ratios["most"],
        "in_slices_median": spread([row["in_slices"] for row in rows])["median"],
        "in_steps_median": spread([row["in_steps"] for row in rows])["median"],
        "target": _TARGET,
        "target_met": ratios["median"] >= _TARGET,
    }
    return Result(bench="overhead", figures=figures)


def _product(fleet: Fleet, config: Any, plan: SlotPlan, seconds: float) -> Turn:  # noqa: ANN401 - the head's Config
    from orchestrator.run.learned_limits import LearnedLimits
    from orchestrator.run.run_info import RunInfo
    from orchestrator.run.supervisor import Supervisor
    from orchestrator.watch.events import EventLog
    from orchestrator.watch.sinks import Outlets
    from orchestrator.watch.store import RunStore

    recording = Recording(fleet)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        store = RunStore(Path(folder) / "run.sqlite")
        events = EventLog(Path(folder) / "events.jsonl", also=store.event)
        Supervisor(
            info=RunInfo(run_id="bench", started_at_unix_s=time.time(), duration_s=seconds),
            config=config,
            plans=(plan,),
            fleet=recording,
            outlets=Outlets(watchers=(), events=events, store=store),
            interrupted=lambda: False,
            learned_limits=LearnedLimits(None, events),
        ).run()
        store.end("good", 0, None, ())
        events.close()
    fleet.abandon(plan.reservation.slot)
    (began_s, _), *later = recording.arrived
    window_s = later[-1][0] - began_s
    reports = [report for _, report in later]
    return Turn(
        flop_per_s=sum(report.counts.work_flop for report in reports) / window_s,
        in_slices=sum(report.wall_s for report in reports) / window_s,
        in_steps=sum(report.counts.busy_s for report in reports) / window_s,
        last=reports[-1],
    )
