"""Builders of test data: configurations, rows, snapshots, records, statuses, machines and cards.

Each builder returns a healthy value; arguments name the differences. `scene.py` builds the spec of
a worker, because tests on a bare GPU host must not load the head.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator.config.load import dump_config, load_config
from orchestrator.config.schema import Config, RunConfig
from orchestrator.core.fleet import NodeFact
from orchestrator.core.slot import NOTHING_ASKED, Slot, UserOrders, slot_state
from orchestrator.jobs.model import Job, JobState, Standing
from orchestrator.record.events import EVENTS_NAME
from orchestrator.record.jobs import queue_of
from orchestrator.record.model import Row, Snapshot
from orchestrator.record.store import STORE_NAME, RunFacts, RunStore, SlotRecord
from tests.scene import MIB, ROOT
from workers.host.facts import CardFacts, MachineFacts, TorchFacts
from workers.messages import NO_COUNTS, DeviceInfo, MemoryInfo, Status, StepCounts, WorkerState
from workers.readings import SensorReading
from workers.settings import Learned, PolicyState
from workers.units import GIB

# --- configurations and the facts of a run


#: The shipped configuration.
REFERENCE = load_config(str(ROOT / "cluster.yaml"))


def config_of(nodes: Mapping[str, Mapping[str, object]], **sections: object) -> Config:
    """Return a configuration with these nodes. A node has an unknown card of any size, unless its
    keys name another.
    """
    usual: dict[str, object] = {"gpu": "card", "workers": 1, "vram_per_worker_gib": 1.0}
    many = {name: {**usual, **node} for name, node in nodes.items()}
    return Config.model_validate({"nodes": many, **sections})


RULES = RunConfig(
    hang_timeout_s=60.0,
    stale_after_s=10.0,
    start_timeout_s=120.0,
    restart_backoff_s=1.0,
    restart_backoff_max_s=5.0,
    max_deaths=6,
    death_window_s=300.0,
    max_workload_errors=3,
    leak_flag_mib=None,
    leak_limit_mib=None,
)


def node_fact(name: str | None = "pc1", node_id: str = "a", **changes: Any) -> NodeFact:
    """Return a live node with room for the workers of any PC."""
    usual: dict[str, Any] = {"address": f"10.0.0.{node_id}", "cpus": 64.0, "gpus": 1.0}
    return NodeFact(name=name, node_id=node_id, **{**usual, **changes})


# --- statuses of workers


CPU = DeviceInfo(
    kind="cpu",
    name="a processor",
    uuid=None,
    total_bytes=None,
    context_bytes=0,
    context_source="none",
    peak_source="none",
    cap_bytes=200 * MIB,
    dtype="fp32",
    threads=1,
    pid=4711,
    torch_version="2.9",
)


MEMORY = MemoryInfo(
    device_total_bytes=None,
    device_used_bytes=None,
    allocated_bytes=80 * MIB,
    reserved_bytes=80 * MIB,
    peak_bytes=80 * MIB,
    alloc_retries=0,
)


def with_counts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, with all counters moved into `counts`."""
    counters = {name: value for name, value in values.items() if name in StepCounts.__slots__}
    others = {name: value for name, value in values.items() if name not in counters}
    return {**others, "counts": StepCounts(**counters)} if counters else others


def status_of(slot: str, incarnation: int | None = 0, **changes: object) -> Status:
    """Return the status of a steady worker, with some fields changed."""
    usual: dict[str, Any] = {
        "slot": slot,
        "incarnation": incarnation,
        "actor": "pc1:1",
        "state": WorkerState.RUNNING,
        "reason": "steady",
        "is_up": True,
        "size": 8192,
        "batch": 128,
        "claim_bytes": 1,
    }
    return Status(**with_counts({**usual, **changes}))


def counters(**known: float) -> dict[str, float]:
    """Return all counters of a slot; those that are not given are 0."""
    return {**asdict(NO_COUNTS), "restarts": 0, **known}


def counters_of(slot: Slot) -> dict[str, float]:
    """Return every counter of a slot."""
    return {**asdict(slot.counts), "restarts": slot.restarts}


# --- rows, snapshots, and the content of a run's store


STARTED_UNIX_S = 1_700_000_000.0

_HEALTHY: dict[str, Any] = {
    "slot": "pc1/0",
    "node": "pc1",
    "gpu_name": "NVIDIA GeForce RTX 3090",
    "gpu_uuid": "GPU-0",
    "device": "cuda",
    "state": WorkerState.RUNNING,
    "reason": "steady",
    "policy": "adaptive",
    "size": 8192,
    "batch": 128,
    "dtype": "fp16",
    "tflops": 9.61,
    "baseline_pct": 97.2,
    "allocated_bytes": int(1.9 * GIB),
    "reserved_bytes": int(2.4 * GIB),
    "claim_bytes": int(2.5 * GIB),
    "cap_bytes": int(2.63 * GIB),
    "budget_bytes": int(3.3 * GIB),
    "device_used_bytes": 21 * GIB,
    "device_total_bytes": 24 * GIB,
    "steps_ok": 400,
    "duty_requested": 0.6,
    "duty_measured": 0.587,
    "peak_pct": 62.4,
    "temperature_c": 71.0,
    "temperature_of": "card",
    "margin_c": 24.0,
    "power_w": 281.4,
    "power_limit_w": 350.0,
    "throttle_pct": 3.0,
    "verify_checks": 412,
    "heartbeat_age_s": 0.8,
}


def make_row(**changed: object) -> Row:
    """Return a healthy row with some fields changed."""
    values = with_counts({**_HEALTHY, **changed})
    sensors, memory = (
        {name: values.pop(name) for name in kind.__slots__ if name in values}
        for kind in (SensorReading, MemoryInfo)
    )
    return Row(**values, sensors=SensorReading(**sensors), memory=replace(MEMORY, **memory))


_LEARNED = PolicyState(learned=(Learned(size=8192), None))

FACTS = RunFacts(
    run_id="20261120-051500-0b76",
    started_at_unix_s=STARTED_UNIX_S,
    duration_s=30.0,
    mode="rehearse",
    device=None,
    one_machine=True,
    config_yaml="run: {duration: 30s}\n# \U0001f600\n",
    chaos=None,
    nodes_planned=("pc1", "pc2"),
    head_pid=os.getpid(),
    head_started=None,
    host="pc1",
)


def make_job(name: str = "lr-0", **changed: Any) -> Job:
    """Return a training in a queue."""
    known: dict[str, Any] = {"id": name, "steps": 100}
    return Job(name=name, **(known | changed))


def make_standing(name: str = "lr-0", state: str = "QUEUED", **changed: Any) -> Standing:
    """Return the standing of a job in its queue."""
    known: dict[str, Any] = {"job": make_job(name), "reason": "in line", "since_s": STARTED_UNIX_S}
    return Standing(state=JobState(state), **(known | changed))


def store_queue(folder: Path, *standings: Standing) -> None:
    """Store standings of jobs in the queue of a folder, as its head does."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    queue, store = queue_of(folder.parent), RunStore(folder.parent / STORE_NAME)
    known = dict(queue.standings)
    for each in standings:
        there = known.get(each.job.name)
        number = len(known) if there is None else there.number
        known[each.job.name] = replace(each, number=number)
    store.queue(replace(queue, standings=known))
    assert store.commit(), store.problem
    store.close()


def make_snapshot(*rows: Row, **changed: object) -> Snapshot:
    """Return a snapshot of rows, 10 s after the start of a run of 30 s."""
    usual: dict[str, Any] = {
        "run_id": "run-1",
        "elapsed_s": 10.0,
        "duration_s": 30.0,
        "nodes_planned": ("pc1", "pc2"),
        "nodes_seen": ("pc1", "pc2"),
        "rows": rows,
    }
    given = {**usual, **changed}
    began_unix_s = given.pop("started_at", STARTED_UNIX_S)
    given.setdefault("now_unix_s", began_unix_s + given["elapsed_s"])
    return Snapshot(**given)


def begun_run(folder: Path, facts: RunFacts = FACTS) -> RunStore:
    """Make the folder of a run, and begin its store."""
    folder.mkdir(parents=True, exist_ok=True)
    store = RunStore(folder / STORE_NAME)
    store.begin(facts)
    return store


def facts_of(config: Config, **changes: object) -> RunFacts:
    """Return the facts that the store has of a run before its first step."""
    usual: dict[str, Any] = {
        "run_id": "20260101-000000-abcd",
        "started_at_unix_s": 1000.0,
        "duration_s": config.run.duration_s,
        "device": "cpu",
        "config_yaml": dump_config(config),
        "nodes_planned": tuple(config.nodes),
        "head_pid": 2**22 + 1,  # no process has such a number
    }
    return replace(FACTS, **{**usual, **changes})


def record(
    slot: str = "pc1/0",
    *,
    row: Row | None = None,
    incarnation: int = 2,
    resume: PolicyState | None = _LEARNED,
    orders: UserOrders = NOTHING_ASKED,
    **changed: object,
) -> SlotRecord:
    """Return the stored record of a slot, with this row, or with a healthy one with some fields
    changed.
    """
    own = {"slot": slot, "node": slot.partition("/")[0], **changed}
    own["state"] = slot_state(str(changed.get("state", WorkerState.RUNNING)))
    row = make_row(**own) if row is None else row
    return SlotRecord(row=row, incarnation=incarnation, resume=resume, orders=orders)


def add_event(store: RunStore, entry: Mapping[str, object]) -> None:
    """Append an event to the event log beside a store."""
    with (store._path.parent / EVENTS_NAME).open("a") as file:
        file.write(json.dumps(entry, separators=(",", ":")) + "\n")


def event(
    number: int | None = None, *, name: str = "numbered", **details: object
) -> dict[str, object]:
    """Return an event as in the event log."""
    return {
        "at": "2023-11-14T22:13:20.123Z",
        "event": name,
        "slot": None,
        "number": number,
        **details,
    }


# --- machines and cards


CUDA_TORCH = TorchFacts(
    version="2.13.0+cu128",
    cuda="12.8",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    available=True,
)


CPU_TORCH = TorchFacts(version="2.13.0+cpu")


def card_facts(**changes: Any) -> CardFacts:
    """Return the facts of an idle RTX 3090."""
    plain = CardFacts(
        index=0,
        name="NVIDIA GeForce RTX 3090",
        uuid="GPU-11111111-2222-3333-4444-555555555555",
        total_bytes=round(23.56 * GIB),
        used_bytes=round(0.3 * GIB),
        compute_capability=(8, 6),
        persistence=True,
        display=False,
    )
    return replace(plain, **changes)


def laptop(**changes: Any) -> MachineFacts:
    """Return the facts of a healthy PC without a card."""
    plain = MachineFacts(
        hostname="laptop",
        is_wsl=False,
        python="3.11.7",
        ray="2.60.0",
        project="0.1.0",
        cores_logical=16,
        cores_physical=8,
        ram_available_bytes=24 * GIB,
        nvml_error="NVML Shared Library Not Found",
        pci_cards=0,
        torch=CPU_TORCH,
        cpu_governors=("schedutil",),
        cpu_scaling_driver="acpi-cpufreq",
    )
    return replace(plain, **changes)


def workstation(**changes: Any) -> MachineFacts:
    """Return the facts of a healthy PC with an RTX 3090."""
    with_card = {
        "hostname": "workstation",
        "driver": "580.65.06",
        "driver_cuda": (13, 0),
        "nvml_error": None,
        "cards": (card_facts(),),
        "pci_cards": 1,
        "torch": CUDA_TORCH,
    }
    return laptop(**{**with_card, **changes})


def wsl(**changes: Any) -> MachineFacts:
    """Return the facts of the same PC as `workstation`, under WSL2."""
    own = {
        "is_wsl": True,
        "pci_cards": None,
        "cpu_governors": (),
    }
    return workstation(**{**own, **changes})
