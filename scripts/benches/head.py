"""What the head costs by itself: processor time and growth of its store, by the number of workers.

The real supervisor, lifecycle, memory broker, event log, store and table run on a scripted fleet: every worker reports
once a second with counters, memory, sensors and a resume state, and nothing goes wrong. Ray is not there. What the
script itself takes is measured and left out. Each figure comes from a process of its own.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import random
import socket
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benches.common import Result, progress
from orchestrator.config.load import config_from_data, dump_config
from orchestrator.core.fleet import DeathCause, NodeFact, Reservation, SliceReported
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from workers.messages import DeviceInfo, Directive, MemoryInfo, Report, StepCounts, Verdict, WorkerState
from workers.readings import SensorReading
from workers.settings import Learned, LimitKey, StoredLimit
from workers.units import GIB, MIB

#: One card to a node, with so many workers on it.
_WORKERS_PER_NODE: Final = 10
_CARD_BYTES: Final = 24 * GIB
_CONTEXT_BYTES: Final = 320 * MIB

#: SQLite writes its log back into the file and begins it anew after about so much; up to there it does not grow.
_LOG_BYTES: Final = 1100 * 4096

_TARGET_PCT: Final = 10.0
_TARGET_WITH_TABLE_PCT: Final = 12.0
_TARGET_BYTES_PER_S: Final = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one head took in the window."""

    core_pct: float
    """Processor time of the head's process, the script's apart, as a share of one core."""
    store_bytes_per_s: float
    reports_per_s: float


@dataclass(slots=True)
class _Worker:
    plan: SlotPlan
    free_at_s: float
    """When the slices that it was sent are done."""
    learned_at_unix_s: float = field(default_factory=time.time)
    reports: int = 0


class ScriptedFleet:
    """A fleet whose workers do their slices on time. See `orchestrator.core.fleet.Fleet`."""

    def __init__(self, plans: tuple[SlotPlan, ...]) -> None:
        """Prepare; workers start when they are placed, one after the other."""
        self._plans = {plan.reservation.slot: plan for plan in plans}
        self._random = random.Random(1)  # noqa: S311 - repeatable is what is wanted
        self._workers: dict[str, _Worker] = {}
        self._due: list[tuple[float, int, Directive]] = []
        self._number = 0
        self.reports = 0
        self.script_s = 0.0
        """Processor time of the script, which is not the head's."""
        names = dict.fromkeys(plan.spec.node for plan in plans)
        self._nodes = tuple(
            NodeFact(name=name, node_id=f"id-{name}", address="127.0.0.1", cpus=64.0, gpus=1.0) for name in names
        )

    def nodes(self) -> tuple[NodeFact, ...]:
        """See `Fleet.nodes`."""
        return self._nodes

    def address(self) -> str:
        """See `Fleet.address`."""
        return "127.0.0.1:6379"

    def count_cards(self, node: str) -> int:  # noqa: ARG002 - the protocol's
        """See `Fleet.count_cards`."""
        return 1

    def place(self, reservation: Reservation) -> None:
        """See `Fleet.place`."""
        starts_s = time.monotonic() + 0.5 + self._random.random()
        self._workers[reservation.slot] = _Worker(self._plans[reservation.slot], starts_s)

    def submit(self, directive: Directive) -> None:
        """See `Fleet.submit`."""
        worker = self._workers[directive.spec.slot]
        took_s = directive.duration_s * self._random.uniform(0.95, 1.05)
        worker.free_at_s = max(worker.free_at_s, time.monotonic()) + took_s
        self._number += 1
        heapq.heappush(self._due, (worker.free_at_s, self._number, directive))

    def wait(self, timeout_s: float) -> tuple[SliceReported, ...]:
        """See `Fleet.wait`."""
        began_s = time.thread_time()
        wait_s = min(timeout_s, self._due[0][0] - time.monotonic() if self._due else 0.0)
        if wait_s > 0:
            time.sleep(wait_s)
        now_s = time.monotonic()
        done = []
        while self._due and self._due[0][0] <= now_s:
            directive = heapq.heappop(self._due)[2]
            worker = self._workers[directive.spec.slot]
            done.append(SliceReported(report=_report(worker, directive, self._random)))
        self.reports += len(done)
        self.script_s += time.thread_time() - began_s
        return tuple(done)

    def forget(self, slot: str) -> None:
        """See `Fleet.forget`."""
        self._due = [entry for entry in self._due if entry[2].spec.slot != slot]
        heapq.heapify(self._due)

    def restart(self, slot: str) -> None:
        """See `Fleet.restart`."""

    def abandon(self, slot: str) -> None:
        """See `Fleet.abandon`."""

    def why_ended(self, slot: str) -> DeathCause | None:  # noqa: ARG002 - the protocol's
        """See `Fleet.why_ended`."""
        return None

    def end_node(self, node: str) -> None:
        """See `Fleet.end_node`."""

    def start_node(self, node: str) -> None:
        """See `Fleet.start_node`."""


def _report(worker: _Worker, directive: Directive, drawn: random.Random) -> Report:
    """Return what a worker on a card says of a slice, every value an object of its own as if it had travelled."""
    spec = worker.plan.spec
    cap_bytes = spec.budget_bytes - _CONTEXT_BYTES
    held_bytes = int(0.8 * cap_bytes)
    first = directive.duration_s == 0
    steps = 1 if first else drawn.randint(18, 22)
    wall_s = 0.05 if first else directive.duration_s
    used_bytes = min(_CARD_BYTES, spec.workers_on_host * (_CONTEXT_BYTES + held_bytes) + drawn.randrange(64) * MIB)
    # The footprint that the policy has learned settles, and then changes now and then.
    worker.reports += 1
    settled = min(worker.reports, 5) + worker.reports // 20
    return Report(
        slot=spec.slot,
        incarnation=directive.incarnation,
        sequence=directive.sequence,
        verdict=Verdict.OK,
        state=WorkerState.RUNNING,
        reason="",
        device=DeviceInfo(
            kind="cuda",
            name="NVIDIA GeForce RTX 3090",
            uuid=f"GPU-{spec.node}",
            total_bytes=_CARD_BYTES,
            context_bytes=_CONTEXT_BYTES,
            context_source="measured",
            cap_bytes=cap_bytes,
            dtype="fp16",
            threads=1,
            pid=4000 + directive.incarnation,
            hostname=spec.node,
            torch_version="2.9.0+cu128",
            driver="580.95.05",
        ),
        memory=MemoryInfo(
            device_total_bytes=_CARD_BYTES,
            device_used_bytes=used_bytes,
            free_bytes=min(cap_bytes - held_bytes, _CARD_BYTES - used_bytes),
            allocated_bytes=held_bytes - drawn.randrange(32) * MIB,
            reserved_bytes=held_bytes,
            peak_bytes=held_bytes,
            alloc_retries=0,
        ),
        size=spec.workload.size,
        batch=spec.workload.batch,
        claim_bytes=held_bytes,
        counts=StepCounts(steps_ok=steps, work_flop=steps * 1.1e12, busy_s=0.6 * wall_s),
        wall_s=wall_s,
        verify_checks=drawn.randrange(2),
        sensors=SensorReading(
            temperature_c=drawn.randint(58, 66),
            margin_c=20.0,
            power_w=drawn.uniform(300.0, 345.0),
            power_limit_w=350.0,
            sm_clock_mhz=drawn.randrange(1695, 1740, 15),
            sm_clock_max_mhz=2100,
            memory_clock_mhz=9501,
            utilisation_pct=97.0,
            throttle_bits=4,
            throttle_pct=0.0,
            fan_pct=61.0,
        ),
        rss_bytes=900 * MIB + drawn.randrange(8) * MIB,
        resume={"policy": "adaptive", "units": held_bytes, "fixed_bytes": 1.0e6 + settled, "unit_bytes": 1.0},
        learned=StoredLimit(
            key=LimitKey(
                card="NVIDIA GeForce RTX 3090",
                total_bytes=_CARD_BYTES,
                driver="580.95.05",
                torch="2.9.0+cu128",
                dtype="fp16",
                workload="matmul@1.0 batch=128 size=8192",
                cap_bytes=cap_bytes,
            ),
            learned=Learned(size=held_bytes, fixed_bytes=1.0e6 + settled, unit_bytes=1.0),
            peak_bytes=held_bytes,
            learned_at_unix_s=worker.learned_at_unix_s + worker.reports,
        ),
    )


class _Window:
    """Takes the figures at both ends of the window; the supervisor asks it at every turn whether to stop."""

    def __init__(self, fleet: ScriptedFleet, store: Path, warm_up_s: float, window_s: float) -> None:
        self._fleet = fleet
        self._store = store
        self._begins_s = time.monotonic() + warm_up_s
        self._window_s = window_s
        self._before: tuple[float, float, int, int] | None = None
        self.cost: Cost | None = None

    def is_over(self) -> bool:
        """Whether the head has worked for long enough."""
        now_s = time.monotonic()
        if self._before is None and now_s >= self._begins_s:
            self._before = self._look()
        if self._before is None or now_s < self._before[0] + self._window_s:
            return False
        if self.cost is None:
            began_s, cpu_s, stored_bytes, reports = self._before
            ended_s, cpu_after_s, stored_after_bytes, reports_after = self._look()
            took_s = ended_s - began_s
            self.cost = Cost(
                core_pct=100.0 * (cpu_after_s - cpu_s) / took_s,
                store_bytes_per_s=(stored_after_bytes - stored_bytes) / took_s,
                reports_per_s=(reports_after - reports) / took_s,
            )
        return True

    def _look(self) -> tuple[float, float, int, int]:
        cpu_s = time.process_time() - self._fleet.script_s
        return time.monotonic(), cpu_s, stored_bytes(self._store), self._fleet.reports


def stored_bytes(path: Path) -> int:
    """Return what a store takes on disk, the log that is not written back yet included.

    The log is reused once it has reached its size: up to there it counts as if it had reached it.
    """
    import sqlite3

    reader = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        # As a reader sees the file: with the pages that are in the log alone.
        (pages,), (page_bytes,) = (reader.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    finally:
        reader.close()
    log = path.with_name(f"{path.name}-wal")
    return int(pages * page_bytes) + max(_LOG_BYTES, log.stat().st_size if log.exists() else 0)


def run(workers: list[int], warm_up_s: float, window_s: float) -> Result:
    """Measure a head for each number of workers, without a table and with one."""
    rows: list[dict[str, Any]] = []
    for count in workers:
        without = _measured(count, warm_up_s, window_s, table=False)
        with_table = _measured(count, warm_up_s, window_s, table=True)
        rows.append(
            {
                "workers": count,
                "core_pct": without.core_pct,
                "core_pct_with_table": with_table.core_pct,
                "store_bytes_per_s": without.store_bytes_per_s,
                "reports_per_s": without.reports_per_s,
            }
        )
        progress(f"{count} workers: {without.core_pct:.2f} %, with the table {with_table.core_pct:.2f} %")
    figures = {
        "rows": rows,
        "warm_up_s": warm_up_s,
        "window_s": window_s,
        "load": os.getloadavg()[0],
        "target_pct": _TARGET_PCT,
        "target_with_table_pct": _TARGET_WITH_TABLE_PCT,
        "target_store_bytes_per_s": _TARGET_BYTES_PER_S,
        "target_met": all(
            row["core_pct"] <= _TARGET_PCT
            and row["core_pct_with_table"] <= _TARGET_WITH_TABLE_PCT
            and row["store_bytes_per_s"] <= _TARGET_BYTES_PER_S
            for row in rows
        ),
    }
    return Result(bench="head", figures=figures)


def _measured(workers: int, warm_up_s: float, window_s: float, *, table: bool) -> Cost:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, workers, warm_up_s, window_s, table=table).result()


def measure(workers: int, warm_up_s: float, window_s: float, *, table: bool) -> Cost:
    """Run a head in this process, and return what it took."""
    from rich.console import Console

    from orchestrator.run.learned_limits import LearnedLimits
    from orchestrator.run.run_info import RunInfo
    from orchestrator.run.supervisor import Supervisor
    from orchestrator.watch.events import EventLog
    from orchestrator.watch.live import LiveTable
    from orchestrator.watch.records import STORE_NAME, RunFacts
    from orchestrator.watch.sinks import Outlets
    from orchestrator.watch.store import RunStore

    config = config_from_data(_cluster(workers), "bench")
    plans = plan_slots(config, Target())
    fleet = ScriptedFleet(plans)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Path(os.devnull).open("w", encoding="utf-8") as screen:
        path = Path(folder) / STORE_NAME
        store = RunStore(path)
        events = EventLog(Path(folder) / "events.jsonl", also=store.event)
        started_at_unix_s = time.time()
        store.begin(
            RunFacts(
                run_id="bench",
                started_at_unix_s=started_at_unix_s,
                duration_s=config.run.duration_s,
                min_success_rate=config.run.min_success_rate,
                mode="cluster",
                device=None,
                one_machine=False,
                config_yaml=dump_config(config),
                chaos=None,
                nodes_planned=tuple(config.nodes),
                head_pid=os.getpid(),
                head_started=None,
                host=socket.gethostname(),
            )
        )
        console = Console(file=screen, force_terminal=True, width=200, height=60)
        window = _Window(fleet, path, warm_up_s, window_s)
        Supervisor(
            info=RunInfo(run_id="bench", started_at_unix_s=started_at_unix_s, duration_s=config.run.duration_s),
            config=config,
            plans=plans,
            fleet=fleet,
            outlets=Outlets(watchers=(LiveTable(console),) if table else (), events=events, store=store),
            interrupted=window.is_over,
            learned_limits=LearnedLimits(None, events),
        ).run()
        store.end("interrupted", 130, None, ())
        events.close()
    if window.cost is None:
        raise RuntimeError("the run ended before the window did")
    return window.cost


def _cluster(workers: int) -> dict[str, Any]:
    """Return a cluster of full nodes, the last one apart."""
    nodes = {}
    for number, first in enumerate(range(0, workers, _WORKERS_PER_NODE), start=1):
        nodes[f"pc{number}"] = {
            "gpu": "rtx-3090",
            "workers": min(_WORKERS_PER_NODE, workers - first),
            "gpu_share": 0.60,
            "vram_per_worker_gib": 2.2,
            "memory_fraction": 0.99,
            "size": 8192,
        }
    return {"nodes": nodes, "run": {"duration": "1h", "stop_grace_s": 0}}
