"""Rehearsal scaling: what shrinks, what stays, what is said about it."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.load import config_from_data, load_config
from orchestrator.config.schema import Config
from orchestrator.core.placement import node_budget
from orchestrator.errors import UsageError
from orchestrator.run.environment import in_rehearsal
from orchestrator.run.scaling import REHEARSAL_SCALE, scale_config
from tests.cards import script_cards, scripted_card
from tests.scene import ROOT, python
from workers.units import GIB, MIB

_SHIPPED = load_config(str(ROOT / "cluster.yaml"))

SHIPPED = str(ROOT / "cluster.yaml")


def budgets_bytes(config: Config) -> int:
    """Return what all workers of all nodes may hold together."""
    return sum(
        node.workers * node_budget(name, node, config).budget_bytes
        for name, node in config.nodes.items()
    )


def test_the_reference_pair_at_the_rehearsal_scale() -> None:
    before = load_config(SHIPPED)
    scaled = scale_config(before, REHEARSAL_SCALE, None)
    pc1, pc2 = scaled.config.nodes["pc1"], scaled.config.nodes["pc2"]
    assert scaled.scale == 1 / 16
    assert (pc1.vram_per_worker_gib, pc2.vram_per_worker_gib) == (3.3 / 16, 1.5 / 16)
    assert (pc1.vram_gib, pc2.vram_gib) == (23.56 / 16, 7.67 / 16)
    assert (pc1.size, pc2.size) == (2048, 1024)
    assert (scaled.config.memory.floor_mib, scaled.config.memory.size_floor) == (6.25, 128)
    assert scaled.lines == (
        "nodes.pc1.vram_per_worker_gib: 3.30 GiB -> 211 MiB",
        "nodes.pc1.size: 8192 -> 2048",
        "nodes.pc1.vram_gib: 23.56 GiB -> 1.47 GiB",
        "nodes.pc2.vram_per_worker_gib: 1.50 GiB -> 96 MiB",
        "nodes.pc2.size: 4096 -> 1024",
        "nodes.pc2.vram_gib: 7.67 GiB -> 491 MiB",
        "memory.leave_free_mib: 128 MiB -> 8 MiB",
        "memory.floor_mib: 100 MiB -> 6.25 MiB",
        "memory.size_floor: 256 -> 128",
    )


def test_short_memory_lowers_the_scale_and_says_so() -> None:
    scaled = scale_config(load_config(SHIPPED), REHEARSAL_SCALE, GIB)
    assert scaled.scale == pytest.approx(1 / (7 * 3.3 + 3 * 1.5))
    assert GIB - 100 < budgets_bytes(scaled.config) <= GIB
    assert scaled.lines[0] == "scale: 0.0625 -> 0.03623, so that all workers fit into 1.00 GiB"
    enough = scale_config(load_config(SHIPPED), REHEARSAL_SCALE, 2 * GIB)
    assert enough.scale == REHEARSAL_SCALE
    assert not enough.lines[0].startswith("scale")


@pytest.mark.parametrize("limit_bytes", [0, MIB])
def test_memory_that_leaves_workers_nothing_is_refused(limit_bytes: int) -> None:
    with pytest.raises(UsageError, match="less than 1 MiB"):
        scale_config(load_config(SHIPPED), 1.0, limit_bytes)


@settings(max_examples=100, deadline=None)
@given(
    scale=st.floats(1e-3, 1),
    limit_bytes=st.none() | st.integers(64 * MIB, 64 * GIB),
    size=st.none() | st.integers(1, 2**20),
    workers=st.integers(1, 7),
)
def test_the_rehearsal_fits_where_the_real_thing_does(
    scale: float, limit_bytes: int | None, size: int | None, workers: int
) -> None:
    overrides = [
        f"workload.size={'null' if size is None else size}",
        f"nodes.pc1.workers={workers}",
    ]
    before = load_config(SHIPPED, overrides)
    scaled = scale_config(before, scale, limit_bytes)
    assert 0 < scaled.scale <= scale
    assert limit_bytes is None or budgets_bytes(scaled.config) <= limit_bytes
    for name, node in scaled.config.nodes.items():
        assert node.overbooked is None
        small, large = (
            node_budget(name, node, scaled.config),
            node_budget(name, before.nodes[name], before),
        )
        assert small.size <= large.size
        assert small.gpu_fraction == large.gpu_fraction
        assert small.batch == large.batch
        assert small.duty == large.duty
    assert config_from_data(scaled.config.model_dump()) == scaled.config


def test_products_are_rehearsed_in_fp32_and_trainings_in_their_own_types() -> None:
    rehearsed = in_rehearsal(_SHIPPED)
    assert rehearsed.config.workload.dtype == "fp32"
    assert rehearsed.config.nodes["pc1"].size == 1472  # 2048 / 1.41, a multiple of 64
    assert "  products in fp32: sizes x 0.71, the same bytes" in rehearsed.lines
    training = config_from_data({**_SHIPPED.model_dump(), "workload": {"name": "train"}})
    assert in_rehearsal(training).config.workload.dtype == training.workload.dtype


DEVICE = """
from orchestrator.config.load import load_config
from orchestrator.run.environment import in_rehearsal
print(in_rehearsal(load_config("cluster.yaml", [])).target.device)
"""


def test_a_rehearsal_leaves_a_card_without_room_alone(tmp_path: Path) -> None:
    full = script_cards(tmp_path / "cards.json", scripted_card())
    done = python("-c", DEVICE, cwd=ROOT, **full)
    assert (done.stdout, done.stderr) == ("cpu\n", "")


TWO_CARDS = """
from orchestrator.config.load import config_from_text, dump_config, load_config
from orchestrator.run.environment import in_rehearsal
two = ("nodes.pc1.gpus=2", "nodes.pc1.workers=14")
config = in_rehearsal(load_config("cluster.yaml", two)).config
assert config_from_text(dump_config(config), "stored") == config
print(config.nodes["pc1"].gpus, config.nodes["pc1"].workers)
"""


def test_two_cards_rehearsed_on_one_are_stored_as_what_can_be_resumed(tmp_path: Path) -> None:
    empty = script_cards(tmp_path / "cards.json", scripted_card(total_bytes=80 * GIB, used_bytes=0))
    done = python("-c", TWO_CARDS, cwd=ROOT, **empty)
    assert (done.stdout, done.stderr) == ("1 14\n", "")
