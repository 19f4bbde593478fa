"""What the head costs by itself: processor time and growth of its store, by the number of workers.

The real supervisor, lifecycle, memory broker, event log, store and table run on a scripted fleet: every worker reports
once a second with counters, memory, sensors and a resume state, and nothing goes wrong. Ray is not there. What the
script itself takes is measured and left out. Each figure comes from a process of its own.

With `jump` the clock jumps to what is due. That is quick, and a busy machine disturbs it less,
but caches stay warmer than those of a head that waits in between.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benches.common import Result, progress
from benches.head_fleet import JumpingClock, ScriptedFleet
from orchestrator.config.load import config_from_data, dump_config
from orchestrator.core.placement import Target, plan_slots
from orchestrator.run.clock import Clock, SystemClock

#: One card to a node, with so many workers on it.
_WORKERS_PER_NODE: Final = 10

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


class _Window:
    """Takes the figures at both ends of the window; the supervisor asks it at every turn whether to stop."""

    def __init__(self, fleet: ScriptedFleet, clock: Clock, store: Path, warm_up_s: float, window_s: float) -> None:
        self._fleet = fleet
        self._clock = clock
        self._store = store
        self._begins_s = clock.monotonic_s() + warm_up_s
        self._window_s = window_s
        self._before: tuple[float, float, int, int] | None = None
        self.cost: Cost | None = None

    def is_over(self) -> bool:
        """Whether the head has worked for long enough."""
        now_s = self._clock.monotonic_s()
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
        return self._clock.monotonic_s(), cpu_s, stored_bytes(self._store), self._fleet.reports


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


def run(workers: list[int], warm_up_s: float, window_s: float, *, jump: bool) -> Result:
    """Measure a head for each number of workers, without a table and with one."""
    rows: list[dict[str, Any]] = []
    for count in workers:
        without = _measured(count, warm_up_s, window_s, table=False, jump=jump)
        with_table = _measured(count, warm_up_s, window_s, table=True, jump=jump)
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
        "jump": jump,
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


def _measured(workers: int, warm_up_s: float, window_s: float, *, table: bool, jump: bool) -> Cost:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, workers, warm_up_s, window_s, table=table, jump=jump).result()


def measure(workers: int, warm_up_s: float, window_s: float, *, table: bool, jump: bool) -> Cost:
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
    clock: Clock = JumpingClock() if jump else SystemClock()
    fleet = ScriptedFleet(plans, clock)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Path(os.devnull).open("w", encoding="utf-8") as screen:
        path = Path(folder) / STORE_NAME
        store = RunStore(path, clock.monotonic_s)
        events = EventLog(Path(folder) / "events.jsonl", unix_s=clock.unix_s, also=store.event)
        started_at_unix_s = clock.unix_s()
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
        window = _Window(fleet, clock, path, warm_up_s, window_s)
        Supervisor(
            info=RunInfo(run_id="bench", started_at_unix_s=started_at_unix_s, duration_s=config.run.duration_s),
            config=config,
            plans=plans,
            fleet=fleet,
            outlets=Outlets(
                watchers=(LiveTable(console, clock.monotonic_s),) if table else (), events=events, store=store
            ),
            interrupted=window.is_over,
            learned_limits=LearnedLimits(None, events),
            clock=clock,
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
