"""A fleet whose workers do their slices on time and report what workers of a busy card do, for `bench.py head`."""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass, field
from typing import Final

from orchestrator.core.fleet import DeathCause, NodeFact, Reservation, SliceReported
from orchestrator.core.placement import SlotPlan
from orchestrator.run.clock import Clock
from workers.messages import DeviceInfo, Directive, MemoryInfo, Report, StepCounts, Verdict, WorkerState
from workers.readings import SensorReading
from workers.settings import Learned, LimitKey, StoredLimit, WorkerSpec
from workers.units import GIB, MIB

_CARD_BYTES: Final = 24 * GIB
_CONTEXT_BYTES: Final = 320 * MIB


class JumpingClock:
    """A clock that moves only in `sleep`. See `orchestrator.run.clock.Clock`."""

    def __init__(self) -> None:
        """Begin now."""
        self._slept_s = 0.0

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return 1000.0 + self._slept_s

    def unix_s(self) -> float:
        """See `Clock.unix_s`."""
        return 1.8e9 + self._slept_s

    def sleep(self, duration_s: float) -> None:
        """See `Clock.sleep`."""
        self._slept_s += duration_s


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    free_at_s: float
    """When the slices that it was sent are done."""
    learned_at_unix_s: float = field(default_factory=time.time)
    reports: int = 0


class ScriptedFleet:
    """A fleet whose workers do their slices on time. See `orchestrator.core.fleet.Fleet`."""

    def __init__(self, plans: tuple[SlotPlan, ...], clock: Clock) -> None:
        """Prepare; workers start when they are placed, one after the other."""
        self._clock = clock
        self._random = random.Random(1)  # noqa: S311 - repeatable is what is wanted
        self._workers: dict[str, _Worker] = {}
        self._due: list[tuple[float, int, _Worker, Directive]] = []
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

    def place(self, reservation: Reservation, spec: WorkerSpec) -> None:
        """See `Fleet.place`."""
        starts_s = self._clock.monotonic_s() + 0.5 + self._random.random()
        self._workers[reservation.slot] = _Worker(spec, starts_s)

    def submit(self, slot: str, directive: Directive) -> None:
        """See `Fleet.submit`."""
        worker = self._workers[slot]
        took_s = directive.duration_s * self._random.uniform(0.95, 1.05)
        worker.free_at_s = max(worker.free_at_s, self._clock.monotonic_s()) + took_s
        self._number += 1
        heapq.heappush(self._due, (worker.free_at_s, self._number, worker, directive))

    def wait(self, timeout_s: float) -> tuple[SliceReported, ...]:
        """See `Fleet.wait`."""
        began_s = time.thread_time()
        wait_s = min(timeout_s, self._due[0][0] - self._clock.monotonic_s() if self._due else 0.0)
        if wait_s > 0:
            self._clock.sleep(wait_s)
        now_s = self._clock.monotonic_s()
        done = []
        while self._due and self._due[0][0] <= now_s:
            _, _, worker, directive = heapq.heappop(self._due)
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
    spec = worker.spec
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
        counts=StepCounts(
            steps_ok=steps, work_flop=steps * 1.1e12, busy_s=0.6 * wall_s, verify_checks=drawn.randrange(2)
        ),
        wall_s=wall_s,
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
