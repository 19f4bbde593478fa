"""What each phase changes in a configuration, and which number types a card is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.core.slot import HeadState
from orchestrator.lab.burn.phases import (
    HEAT_S,
    SnapshotSampler,
    number_types,
    planned_runs,
    warnings_of,
)
from orchestrator.lab.burn.verdict import BurnPhase
from orchestrator.record.model import Snapshot
from orchestrator.record.store import STORE_NAME, RunStore
from tests.burn.scene import ROW
from tests.factories import FACTS, with_changes
from workers.messages import WorkerState

ALL = ("fp32", "tf32", "fp16", "bf16")


def config(**changes: object) -> Config:
    nodes = {
        "pc1": {
            "gpu": "rtx-3090",
            "workers": 7,
            "vram_per_worker_gib": 3.0,
            "gpu_share": 0.6,
            "dtype": "bf16",
        },
        "pc2": {"gpu": "rtx-3070", "workers": 3, "vram_per_worker_gib": 1.5},
    }
    return config_from_data({"nodes": nodes, "cluster": {"head": "pc2"}, **changes})


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("cuda", (8, 6), ALL),
        ("cuda", (9, 0), ALL),
        ("cuda", (7, 5), ("fp32", "fp16")),
        ("cuda", (7, 0), ("fp32", "fp16")),
        ("cuda", None, ALL),
        ("cuda", (99, 0), ALL),
        ("cpu", None, ("fp32", "fp16")),
        ("cpu", (8, 6), ("fp32", "fp16")),
    ],
)
def test_a_card_is_asked_for_the_types_it_has_units_for(
    device: str, capability: tuple[int, int] | None, expected: tuple[str, ...]
) -> None:
    assert number_types(device, capability) == expected


@pytest.mark.parametrize(
    ("heat_s", "lengths_s"), [(HEAT_S, [30.0, 30.0, 30.0, 30.0, 3600.0, 300.0]), (12.5, [12.5] * 6)]
)
def test_three_phases_in_order_and_none_longer_than_heat(
    heat_s: float, lengths_s: list[float]
) -> None:
    planned = planned_runs(config(), {"pc1": ALL, "pc2": ALL}, heat_s, set(BurnPhase))
    assert [(take.phase, take.dtype) for take in planned] == [
        *((BurnPhase.CAPS, dtype) for dtype in ALL),
        (BurnPhase.HEAT, None),
        (BurnPhase.FULL_LOAD, None),
    ]
    assert [take.config.run.duration_s for take in planned] == lengths_s


def test_a_type_is_tried_on_the_nodes_that_have_it() -> None:
    planned = planned_runs(
        config(), {"pc1": ALL, "pc2": ("fp32", "fp16")}, HEAT_S, {BurnPhase.CAPS}
    )
    by_type = {take.dtype: take.config for take in planned}
    assert {dtype: list(one.nodes) for dtype, one in by_type.items()} == {
        "fp32": ["pc1", "pc2"],
        "tf32": ["pc1"],
        "fp16": ["pc1", "pc2"],
        "bf16": ["pc1"],
    }
    for dtype, one in by_type.items():
        assert one.workload.dtype == dtype
        assert all(node.dtype is None for node in one.nodes.values()), "a node's own type would win"
        assert one.verify.share == 0.25
        assert one.head_node in one.nodes
    assert by_type["fp32"].head_node == "pc2"


def test_checks_that_are_denser_already_stay() -> None:
    (take, *_) = planned_runs(config(verify={"share": 0.4}), {"pc1": ALL}, HEAT_S, {BurnPhase.CAPS})
    assert take.config.verify.share == 0.4


def test_this_machine_alone_has_a_node_of_its_own() -> None:
    planned = planned_runs(config(), {"local": ("fp32", "fp16")}, HEAT_S, {BurnPhase.CAPS})
    assert [take.dtype for take in planned] == ["fp32", "fp16"]
    assert all(list(take.config.nodes) == ["pc1", "pc2"] for take in planned)


def test_heat_is_full_duty_with_matmul_and_nothing_else() -> None:
    loaded = config(workload={"name": "mine:Step"}, thermal={"hot_c": 76.0})
    (heat,) = planned_runs(loaded, {"pc1": ALL, "pc2": ALL}, 600.0, {BurnPhase.HEAT})
    assert heat.config.compute_share_mode == "none"
    assert heat.config.workload.name == "matmul"
    assert heat.config.thermal == loaded.thermal, (
        "the governor keeps watch: a burn-in must not cook a card"
    )
    sizes = {node.size for node in heat.config.nodes.values()} | {heat.config.workload.size}
    assert sizes == {8192, None}, "those of another workload are no edges of matrices"
    assert heat.config.workload.batch == 128
    assert heat.config.run.duration_s == 600.0


@pytest.mark.parametrize("phase", [BurnPhase.CAPS, BurnPhase.HEAT])
def test_matmul_keeps_the_sizes_that_are_meant_for_it(phase: BurnPhase) -> None:
    loaded = config(workload={"name": "matmul", "size": 4096, "batch": 64})
    for take in planned_runs(loaded, {"pc1": ALL, "pc2": ALL}, 600.0, {phase}):
        assert (take.config.workload.size, take.config.workload.batch) == (4096, 64)
        assert {name: node.size for name, node in take.config.nodes.items()} == {
            name: node.size for name, node in loaded.nodes.items()
        }


def test_full_load_is_the_configuration_as_it_is() -> None:
    loaded = config(workload={"name": "mine:Step"}, run={"duration": "2m"})
    (full,) = planned_runs(loaded, {"pc1": ALL, "pc2": ALL}, HEAT_S, {BurnPhase.FULL_LOAD})
    changed = full.config.model_dump()
    changed["run"]["duration"] = loaded.run.duration
    assert changed == loaded.model_dump()
    assert full.config.run.duration_s == 120.0


def snapshot(elapsed_s: float, duration_s: float, **changes: object) -> Snapshot:
    other = replace(ROW, slot="pc2/0", node="pc2", temperature_c=elapsed_s, temperature_of="card")
    return Snapshot(
        run_id="20260101-000000-abcd",
        started_at=0.0,
        now_unix_s=1e9,  # may be set at any time: only the run's own clock counts
        elapsed_s=elapsed_s,
        duration_s=duration_s,
        nodes_planned=("pc1", "pc2"),
        nodes_seen=("pc1", "pc2"),
        rows=(with_changes(ROW, **changes), other),
    )


@pytest.mark.parametrize(("length_s", "most"), [(10.0, 10), (3600.0, 600), (86_400.0, 600)])
def test_a_sample_a_second_and_never_more_than_fit(length_s: float, most: int) -> None:
    sampler = SnapshotSampler(length_s)
    elapsed_s = 0.0
    while elapsed_s < length_s:
        sampler.update(snapshot(elapsed_s, length_s))
        elapsed_s += 0.25 if length_s < 100 else length_s / 5000
    for measured in sampler.measured({}, {}):
        assert most * 0.9 <= len(measured.looks) <= most
        times_s = [at_s for at_s, _ in measured.looks]
        assert times_s == sorted(times_s)
        assert times_s[-1] > 0.9 * length_s


def test_only_the_planned_time_is_sampled() -> None:
    sampler = SnapshotSampler(10.0)
    sampler.update(snapshot(0.0, 10.0, state=HeadState.STARTING))
    sampler.update(snapshot(5.0, 10.0))
    sampler.update(snapshot(10.0, 10.0, state=WorkerState.STOPPED))  # draining
    (first, _) = sampler.measured({}, {})
    assert [at_s for at_s, _ in first.looks] == [5.0]


def test_what_the_store_tells_of_alarms_and_of_checks_that_ended(tmp_path: Path) -> None:
    store = RunStore(tmp_path / STORE_NAME)
    store.begin(FACTS)
    at = "2026-01-01T00:00:00.000Z"
    for name, slot, details in (
        ("alarm_raised", "pc1/0", {"alarm": "power brake"}),
        ("checks_ended", "pc1/0", {"text": "no memory\nfor it"}),
        ("check_failed", "pc1/1", {"text": "once"}),
    ):
        store.event({"at": at, "event": name, "slot": slot, **details})
    store.commit()
    assert warnings_of(tmp_path) == ({"pc1/0": ["power brake"]}, {"pc1/0": r"no memory\nfor it"})
    assert warnings_of(None) == warnings_of(tmp_path / "nowhere") == ({}, {})


def test_a_worker_has_its_own_samples_last_row_and_alarms() -> None:
    sampler = SnapshotSampler(10.0)
    assert (sampler.last, sampler.measured({"pc1/0": ["card lost"]}, {})) == (None, ())
    sampler.update(snapshot(1.0, 10.0))
    sampler.update(snapshot(3.0, 10.0))
    sampler.close(snapshot(10.0, 10.0, steps_ok=777))
    first, second = sampler.measured(
        {"pc2/0": ["power brake", "card lost", "power brake"]}, {"pc1/0": "no memory for it"}
    )
    assert (first.row.slot, first.row.counts.steps_ok, first.alarms) == ("pc1/0", 777, ())
    assert second.alarms == ("power brake", "card lost")
    assert (first.unchecked, second.unchecked) == ("no memory for it", None)
    assert [row.temperature_c for _, row in second.looks] == [1.0, 3.0]
