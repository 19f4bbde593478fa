"""What the head costs by itself: processor time and growth of its store, by the number of workers.

The real supervisor, lifecycle, memory broker, event log, store and table run on a scripted fleet
without Ray: every worker reports once a second and nothing goes wrong. What the script itself takes
is measured and left out. With `jump` the clock jumps to what is due: quick and hardly disturbed,
but caches stay warmer than in a head that waits.

`times_bare` compares it with a loop in the same process that decodes as many of the same reports
and stores as many of the same rows in as many transactions, and does nothing else: a ratio that a
faster machine does not change much.
"""

from __future__ import annotations

import heapq
import os
import pickle
import random
import sqlite3
import tempfile
import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benches.common import Result, progress, told_by
from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.core.fleet import NodeFact, SliceReported
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.record import store as tables
from orchestrator.run.supervisor import Clock
from workers import messages
from workers.messages import Directive, Report
from workers.readings import SensorReading
from workers.settings import Learned, LimitKey, StoredLimit, WorkerSpec
from workers.units import GIB, MIB

#: One card to a node, with so many workers on it.
_WORKERS_PER_NODE: Final = 10
#: SQLite writes its log back into the file and begins it anew after about so much; up to there it
#: does not grow.
_LOG_BYTES: Final = 1100 * 4096
#: The most that each figure of a row should be.
_TARGETS: Final = {"core_pct": 10.0, "core_pct_with_table": 12.0, "store_bytes_per_s": 10_000.0}
#: A worker's policy learns something new in one of so many reports.
_REPORTS_TO_LEARN: Final = 20
_CARD_BYTES: Final = 24 * GIB
_CONTEXT_BYTES: Final = 320 * MIB


class JumpingClock(Clock):
    """A clock that moves only in `sleep`."""

    _slept_s = 0.0

    def monotonic_s(self) -> float:
        return 1000.0 + self._slept_s

    def unix_s(self) -> float:
        return 1.8e9 + self._slept_s

    def sleep(self, duration_s: float) -> None:
        self._slept_s += duration_s


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    free_at_s: float  # when the slices that it was sent are done
    learned_at_unix_s: float = field(default_factory=time.time)
    reports: int = 0


class ScriptedFleet:
    """The part of `orchestrator.core.fleet.Fleet` that is used where all slices succeed in time."""

    def __init__(self, plans: tuple[SlotPlan, ...], clock: Clock) -> None:
        self._clock = clock
        self._random = random.Random(1)  # noqa: S311 - repeatable is what is wanted
        self._workers: dict[str, _Worker] = {}
        self._due: list[tuple[float, int, _Worker, Directive]] = []
        self._number = 0
        self.reports = self.turns = 0
        self.last: dict[str, Report] = {}
        self.script_s = 0.0  # processor time of the script, which is not the head's
        names = dict.fromkeys(plan.spec.node for plan in plans)
        self._nodes = tuple(
            NodeFact(name=name, node_id=f"id-{name}", address="127.0.0.1", cpus=64.0, gpus=1.0)
            for name in names
        )

    def nodes(self) -> tuple[NodeFact, ...]:
        return self._nodes

    def address(self) -> str:
        return "127.0.0.1:6379"

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:  # noqa: ARG002
        starts_s = self._clock.monotonic_s() + 0.5 + self._random.random()
        self._workers[spec.slot] = _Worker(spec, starts_s)

    def submit(self, slot: str, directive: Directive) -> None:
        worker = self._workers[slot]
        took_s = directive.duration_s * self._random.uniform(0.95, 1.05)
        worker.free_at_s = max(worker.free_at_s, self._clock.monotonic_s()) + took_s
        self._number += 1
        heapq.heappush(self._due, (worker.free_at_s, self._number, worker, directive))

    def wait(self, timeout_s: float) -> tuple[SliceReported, ...]:
        began_s = time.thread_time()
        wait_s = min(timeout_s, self._due[0][0] - self._clock.monotonic_s() if self._due else 0.0)
        if wait_s > 0:
            self._clock.sleep(wait_s)
        now_s = self._clock.monotonic_s()
        done = []
        while self._due and self._due[0][0] <= now_s:
            _, _, worker, directive = heapq.heappop(self._due)
            self.last[worker.spec.slot] = _report(worker, directive, self._random)
            done.append(SliceReported(report=self.last[worker.spec.slot]))
        self.reports += len(done)
        self.turns += 1
        self.script_s += time.thread_time() - began_s
        return tuple(done)

    def watch(self, silent: Collection[str]) -> dict[str, messages.Activity | None]:  # noqa: ARG002 - nothing is silent here
        return {}

    def forget(self, slot: str) -> None:
        self._due = [entry for entry in self._due if entry[2].spec.slot != slot]
        heapq.heapify(self._due)


def _report(worker: _Worker, directive: Directive, drawn: random.Random) -> Report:
    """Return what a worker on a card says of a slice, each value an object of its own."""
    spec = worker.spec
    card = "NVIDIA GeForce RTX 3090"
    cap_bytes = spec.budget_bytes - _CONTEXT_BYTES
    held_bytes = int(0.8 * cap_bytes)
    first = directive.duration_s == 0
    steps = 1 if first else drawn.randint(18, 22)
    wall_s = 0.05 if first else directive.duration_s
    all_bytes = spec.workers_on_host * (_CONTEXT_BYTES + held_bytes) + drawn.randrange(64) * MIB
    used_bytes = min(_CARD_BYTES, all_bytes)
    # The footprint that the policy has learned settles, and then changes now and then.
    worker.reports += 1
    settled = min(worker.reports, 5) + worker.reports // _REPORTS_TO_LEARN
    device = messages.DeviceInfo(
        kind="cuda", name=card, uuid=f"GPU-{spec.node}", total_bytes=_CARD_BYTES,
        context_bytes=_CONTEXT_BYTES, context_source="measured", peak_source="measured",
        cap_bytes=cap_bytes, dtype="fp16", threads=1, pid=4000 + directive.incarnation,
        hostname=spec.node, torch_version="2.9.0+cu128", driver="580.95.05",
    )  # fmt: skip
    memory = messages.MemoryInfo(
        device_total_bytes=_CARD_BYTES, device_used_bytes=used_bytes,
        free_bytes=min(cap_bytes - held_bytes, _CARD_BYTES - used_bytes),
        allocated_bytes=held_bytes - drawn.randrange(32) * MIB, reserved_bytes=held_bytes,
        peak_bytes=held_bytes, alloc_retries=0,
    )  # fmt: skip
    counts = messages.StepCounts(
        steps_ok=steps, work_flop=steps * 1.1e12, busy_s=0.6 * wall_s,
        verify_checks=drawn.randrange(2),
    )  # fmt: skip
    sensors = SensorReading(
        temperature_c=drawn.randint(58, 66), margin_c=20.0, power_w=drawn.uniform(300.0, 345.0),
        power_limit_w=350.0, sm_clock_mhz=drawn.randrange(1695, 1740, 15), sm_clock_max_mhz=2100,
        memory_clock_mhz=9501, utilisation_pct=97.0, throttle_bits=4, throttle_pct=0.0,
        fan_pct=61.0,
    )  # fmt: skip
    key = LimitKey(
        card=card, total_bytes=_CARD_BYTES, driver=device.driver, torch=device.torch_version,
        dtype="fp16", workload="matmul@1.0 batch=128 size=8192", cap_bytes=cap_bytes,
    )  # fmt: skip
    footprint = {"fixed_bytes": 1.0e6 + settled, "unit_bytes": 1.0}
    return Report(
        slot=spec.slot, incarnation=directive.incarnation, sequence=directive.sequence,
        verdict=messages.Verdict.OK, state=messages.WorkerState.RUNNING, reason="",
        device=device, memory=memory, size=spec.workload.size, batch=spec.workload.batch,
        claim_bytes=held_bytes, counts=counts, wall_s=wall_s, sensors=sensors,
        rss_bytes=900 * MIB + drawn.randrange(8) * MIB,
        resume={"policy": "adaptive", "units": held_bytes, **footprint},
        learned=StoredLimit(
            key=key, learned=Learned(size=held_bytes, **footprint), peak_bytes=held_bytes,
            learned_at_unix_s=worker.learned_at_unix_s + worker.reports,
        ),
    )  # fmt: skip


def _stored_bytes(path: Path) -> int:
    """Return what a store takes on disk, with the pages that are only in the log.

    The log is reused once it has reached its size: up to there it counts as if it had reached it.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as reader:
        (pages,), (page_bytes,) = (
            reader.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
        )
    log = path.with_name(f"{path.name}-wal")
    return int(pages * page_bytes) + max(_LOG_BYTES, log.stat().st_size if log.exists() else 0)


def _bare_core_pct(
    folder: Path, last: dict[str, Report], clock: Clock, took_s: float, reports: int, turns: int
) -> float:
    """Return what a loop costs that only decodes reports and stores rows, as often as the head."""
    encoded = [pickle.dumps(report) for report in last.values()]
    with closing(sqlite3.connect(folder / tables.STORE_NAME)) as reader:
        reader.row_factory = sqlite3.Row
        progress = {line["slot"]: tuple(line) for line in reader.execute("SELECT * FROM progress")}
        slots = {line["slot"]: dict(line) for line in reader.execute("SELECT * FROM slots")}
        sampled = "SELECT samples.*, row FROM samples JOIN slots USING (slot)"
        samples = [dict(line) for line in reader.execute(sampled)]
        (per_s,) = reader.execute(
            "SELECT count(*) / (max(at_unix_s) - min(at_unix_s)) FROM samples "
            "WHERE at_unix_s < (SELECT max(at_unix_s) FROM samples)"
        ).fetchone()
    with closing(sqlite3.connect(folder / "bare.sqlite", isolation_level=None)) as store:
        settings = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL")
        for statement in (*settings, *tables.CREATE):
            store.execute(statement)
        store.executemany(tables.PUT_SLOT, slots.values())
        cpu_s, done, rows = 0.0, 0, 0
        for turn in range(1, turns + 1):
            clock.sleep(took_s / turns)
            began_s = time.process_time()
            due = range(done, reports * turn // turns)
            rows_due = int((per_s or 0.0) * took_s * turn / turns)
            decoded = [pickle.loads(encoded[number % len(encoded)]) for number in due]  # noqa: S301 - our own
            new_rows = [
                {**samples[number % len(samples)], "at_unix_s": float(number // len(slots))}
                for number in range(rows, rows_due)
            ]
            # A record of a slot is written when what its policy has learned changes.
            learned = [slots[report.slot] for report in decoded[::_REPORTS_TO_LEARN]]
            store.execute("BEGIN IMMEDIATE")
            store.executemany(tables.PUT_PROGRESS, [progress[report.slot] for report in decoded])
            store.executemany(tables.PUT_SLOT, learned)
            store.executemany(tables.PUT_ROW, new_rows)
            store.executemany(tables.PUT_SAMPLE, new_rows)
            store.execute("COMMIT")
            done, rows = due.stop, rows_due
            cpu_s += time.process_time() - began_s
    return 100.0 * cpu_s / took_s


def run(workers: list[int], warm_up_s: float, window_s: float, *, jump: bool) -> Result:
    rows: list[dict[str, Any]] = []
    for count in workers:
        without, with_table = (
            told_by("the head", measure, count, warm_up_s, window_s, table, jump, within_s=86_400.0)
            for table in (False, True)
        )
        first = {
            "workers": count, "core_pct": without.pop("core_pct"),
            "core_pct_with_table": with_table["core_pct"],
        }  # fmt: skip
        rows.append({**first, **without})
        progress(
            "{workers} workers: {core_pct:.2f} %, {times_bare:.1f} times a bare loop, with the "
            "table {core_pct_with_table:.2f} %".format(**rows[-1])
        )
    figures = {
        "rows": rows, "warm_up_s": warm_up_s, "window_s": window_s, "jump": jump,
        "load": os.getloadavg()[0], "target_pct": _TARGETS["core_pct"],
        "target_with_table_pct": _TARGETS["core_pct_with_table"],
        "target_store_bytes_per_s": _TARGETS["store_bytes_per_s"],
        "target_met": all(row[key] <= most for row in rows for key, most in _TARGETS.items()),
    }  # fmt: skip
    return Result(bench="head", figures=figures)


def scripted_nodes(workers: int) -> tuple[Config, tuple[SlotPlan, ...]]:
    """Return a run of so many workers on full nodes, the last one apart."""
    node = {
        "gpu": "rtx-3090", "gpu_share": 0.60, "vram_per_worker_gib": 2.2, "memory_fraction": 0.99,
        "size": 8192,
    }  # fmt: skip
    nodes = {
        f"pc{number}": {**node, "workers": min(_WORKERS_PER_NODE, workers - first)}
        for number, first in enumerate(range(0, workers, _WORKERS_PER_NODE), start=1)
    }
    settings = {"nodes": nodes, "run": {"duration": "1h", "stop_grace_s": 0}}
    config = config_from_data(settings, "bench")
    return config, plan_slots(config, Target())


def measure(
    answer: Connection, workers: int, warm_up_s: float, window_s: float, table: bool, jump: bool
) -> None:
    from rich.console import Console

    from benches.heads import supervise
    from orchestrator.view.live import LiveTable

    config, plans = scripted_nodes(workers)
    clock = JumpingClock() if jump else Clock()
    fleet: Any = ScriptedFleet(plans, clock)  # lacks what is only asked when something fails
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Path(os.devnull).open("w", encoding="utf-8") as screen,
    ):
        console = Console(file=screen, force_terminal=True, width=200, height=60)
        looks: list[tuple[float, ...]] = []
        begins_s = clock.monotonic_s() + warm_up_s

        def is_over() -> bool:
            """Look when the head is warm, and again at the end of the window."""
            now_s = clock.monotonic_s()
            if len(looks) < 2 and now_s >= (looks[0][0] + window_s if looks else begins_s):
                cpu_s = time.process_time() - fleet.script_s  # without what the script takes
                stored_bytes = _stored_bytes(Path(folder) / tables.STORE_NAME)
                looks.append((now_s, cpu_s, stored_bytes, fleet.reports, fleet.turns))
            return len(looks) == 2

        supervise(
            config, plans, fleet, Path(folder), config.run.duration_s, interrupted=is_over,
            clock=clock, watchers=[LiveTable(console, clock.monotonic_s)] if table else [],
        )  # fmt: skip
        took_s, cpu_s, grown_bytes, reports, turns = (
            now - then for then, now in zip(*looks, strict=True)
        )
        told = {"core_pct": 100.0 * cpu_s / took_s}
        if not table:
            bare_pct = _bare_core_pct(
                Path(folder), fleet.last, clock, took_s, int(reports), int(turns)
            )
            told |= {"bare_core_pct": bare_pct, "times_bare": told["core_pct"] / bare_pct}
    stored = {"store_bytes_per_s": grown_bytes / took_s, "reports_per_s": reports / took_s}
    answer.send({**told, **stored})
