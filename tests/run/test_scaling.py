"""Scaling for a rehearsal: the values that shrink, the values that stay, and the messages."""

from pathlib import Path
from typing import Any

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
    """Return the sum of the budgets of all workers of all nodes."""
    return sum(
        node.workers * node_budget(name, node, config).budget_bytes
        for name, node in config.nodes.items()
    )


def test_the_reference_pair_at_the_rehearsal_scale() -> None:
    before = load_config(SHIPPED)
    scaled, scale = scale_config(before, REHEARSAL_SCALE, None)
    pc1, pc2 = scaled.nodes["pc1"], scaled.nodes["pc2"]
    assert scale == 1 / 16
    assert (pc1.vram_per_worker_gib, pc2.vram_per_worker_gib) == (3.3 / 16, 1.5 / 16)
    assert (pc1.vram_gib, pc2.vram_gib) == (23.56 / 16, 7.67 / 16)
    assert (pc1.size, pc2.size) == (2048, 1024)
    memory = scaled.memory
    assert (memory.leave_free_mib, memory.floor_mib, memory.size_floor) == (8, 6.25, 128)


def test_short_memory_lowers_the_scale() -> None:
    scaled, scale = scale_config(load_config(SHIPPED), REHEARSAL_SCALE, GIB)
    assert scale == pytest.approx(1 / (7 * 3.3 + 3 * 1.5))
    assert GIB - 100 < budgets_bytes(scaled) <= GIB
    _, enough = scale_config(load_config(SHIPPED), REHEARSAL_SCALE, 2 * GIB)
    assert enough == REHEARSAL_SCALE


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
    scaled, used = scale_config(before, scale, limit_bytes)
    assert 0 < used <= scale
    assert limit_bytes is None or budgets_bytes(scaled) <= limit_bytes
    for name, node in scaled.nodes.items():
        assert node.overbooked is None
        small, large = (
            node_budget(name, node, scaled),
            node_budget(name, before.nodes[name], before),
        )
        assert small.size <= large.size
        assert small.gpu_fraction == large.gpu_fraction
        assert small.batch == large.batch
        assert small.duty == large.duty
    assert config_from_data(scaled.model_dump()) == scaled


def test_products_are_rehearsed_in_fp32_and_trainings_in_their_own_types() -> None:
    rehearsed = in_rehearsal(_SHIPPED)
    assert rehearsed.config.workload.dtype == "fp32"
    assert rehearsed.config.nodes["pc1"].size == 1472  # 2048 / 1.41, a multiple of 64
    training = config_from_data({**_SHIPPED.model_dump(), "workload": {"name": "train"}})
    assert in_rehearsal(training).config.workload.dtype == training.workload.dtype


TWO_CARDS = """
from orchestrator.config.load import config_from_text, dump_config, load_config
from orchestrator.run.environment import in_rehearsal
two = ("nodes.pc1.gpus=2", "nodes.pc1.workers=14")
made = in_rehearsal(load_config("cluster.yaml", two))
assert config_from_text(dump_config(made.config), "stored") == made.config
print(made.target.device, made.config.nodes["pc1"].gpus, made.config.nodes["pc1"].workers)
"""


@pytest.mark.parametrize(
    ("card", "told"),
    [
        (scripted_card(total_bytes=80 * GIB, used_bytes=0), "None 1 14"),
        (scripted_card(), "cpu 2 14"),  # without room
    ],
)
def test_two_cards_are_rehearsed_on_one_with_room_or_on_the_cpu(
    tmp_path: Path, card: dict[str, Any], told: str
) -> None:
    done = python("-c", TWO_CARDS, cwd=ROOT, **script_cards(tmp_path / "cards.json", card))
    assert (done.stdout, done.stderr) == (f"{told}\n", "")
