"""What each phase changes in a configuration, and which number types a card is asked for."""

from __future__ import annotations

import pytest

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.lab.burn.phases import HEAT_S, number_types, planned_runs
from orchestrator.lab.burn.verdict import BurnPhase

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
