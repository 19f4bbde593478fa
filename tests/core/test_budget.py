"""The sums: every worker fits on its card, in Ray's steps and in bytes."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.schema import MAX_WORKERS_PER_CARD, NodeConfig
from orchestrator.core.placement import gpu_fraction, node_budget
from tests.factories import config_of


def node(**changes: object) -> NodeConfig:
    """Return the reference node pc1 with `changes`, checked by its model but by no sum."""
    pc1 = {
        "gpu": "rtx-3090",
        "workers": 7,
        "cpus_per_worker": 8,
        "gpu_share": 0.6,
        "vram_per_worker_gib": 3.3,
        "memory_fraction": 0.99,
        "size": 8192,
    }
    return NodeConfig.model_validate({**pc1, **changes})


@given(gpus=st.integers(1, 10), data=st.data())
def test_every_worker_gets_onto_a_card_within_the_plan(gpus: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(gpus, gpus * MAX_WORKERS_PER_CARD))
    one = node(workers=workers, gpus=gpus)
    # Ray's own arithmetic: whole steps of 1/10000, the rest cut off.
    steps = int(Fraction(repr(gpu_fraction(one))) * 10_000)
    shared_by = one.workers_per_card
    assert shared_by * steps <= 10_000
    assert 10_000 // steps == shared_by
    free = [10_000] * gpus
    for _ in range(workers):
        card = next(n for n in range(gpus) if free[n] >= steps)
        free[card] -= steps


@pytest.mark.parametrize(
    ("changes", "sections", "expected"),
    [
        ({}, {"compute_share_mode": "duty"}, {"duty": 0.6}),
        ({}, {"workers": {"mps": True}}, {"duty": None}),
        ({}, {"compute_share_mode": "none"}, {"duty": None}),
        ({"size": 8192}, {}, {"size": 8192}),
        ({"size": None}, {}, {"size": 4096}),
        ({"size": 8192}, {"workload": {"size": 512}}, {"size": 512}),
        ({"size": None}, {"workload": {"size": 512}}, {"size": 512}),
        ({"dtype": "bf16"}, {}, {"dtype": "bf16"}),
        (
            {"vram_gib": 2.0, "memory_fraction": 0.5},
            {},
            {"card_total_bytes": 2 << 30, "card_allowed_bytes": 1 << 30},
        ),
    ],
)
def test_what_a_worker_gets_follows_from_node_and_workload(
    changes: dict[str, object], sections: dict[str, object], expected: dict[str, object]
) -> None:
    one = node(**changes)
    budget = node_budget("pc1", one, config_of({"pc1": one.model_dump()}, **sections))
    assert {name: getattr(budget, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "text", "valid"),
    [
        (
            {"workers": 15, "gpus": 2},
            (
                "8 workers on the fullest of 2 cards x 3.3 GiB = 26.4 GiB, "
                "but 0.99 of the 23.56 GiB of a rtx-3090 is 23.3244 GiB"
            ),
            "at most 14 workers, or vram_per_worker_gib <= 2.91",
        ),
        ({"workers": 1, "vram_per_worker_gib": 24},
         "1 worker x 24 GiB = 24 GiB, but 0.99 of the 23.56 GiB of a rtx-3090 is 23.3244 GiB",
         "vram_per_worker_gib <= 23.32"),
        ({"gpu": "mine", "vram_gib": 8, "memory_fraction": 0.5, "workers": 2},
         "2 workers x 3.3 GiB = 6.6 GiB, but 0.5 of the 8 GiB of a mine is 4 GiB",
         "at most 1 worker, or vram_per_worker_gib <= 2"),
        # What the workers of a node without cards share.
        ({"gpu": "cpu", "gpus": 0, "vram_gib": 16},
         "7 workers x 3.3 GiB = 23.1 GiB, but 0.99 of the 16 GiB of its memory is 15.84 GiB",
         "at most 4 workers, or vram_per_worker_gib <= 2.26"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_sum_and_ways_out(
    changes: dict[str, object], text: str, valid: str
) -> None:
    assert node(**changes).overbooked == (text, valid)


@settings(max_examples=200, deadline=None)
@given(
    workers=st.integers(1, 100),
    gpus=st.integers(0, 8),
    each_gib=st.floats(0.001, 200),
    total_gib=st.floats(0.01, 200),
    fraction=st.floats(0.01, 1),
)
def test_following_either_advice_makes_it_fit(
    workers: int, gpus: int, each_gib: float, total_gib: float, fraction: float
) -> None:
    one = node(
        workers=workers,
        gpus=gpus,
        vram_per_worker_gib=each_gib,
        vram_gib=total_gib,
        memory_fraction=fraction,
    )
    excess = one.overbooked
    if excess is None:
        found = node_budget("pc1", one, config_of({"pc1": one.model_dump()}))
        assert found.card_allowed_bytes is not None
        assert found.card_budget_bytes <= found.card_allowed_bytes
        return
    fewer, _, smaller = excess[1].rpartition("vram_per_worker_gib <= ")
    assert one.model_copy(update={"vram_per_worker_gib": float(smaller)}).overbooked is None
    if fewer:
        assert one.model_copy(update={"workers": int(fewer.split()[2])}).overbooked is None
