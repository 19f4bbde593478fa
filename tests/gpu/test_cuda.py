"""The engine on a real card: caps, real out-of-memory, a poisoned context. Needs torch, psutil, NVML and pytest alone.

    python -m pytest tests/gpu          # where the project is installed; from a bare checkout:
    python -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode=importlib
    tests/gpu

Every scenario runs in a process of its own: a cap stays with its process, and a poisoned context
too. The process of the tests itself never makes a context, so that it holds nothing of the card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import pytest
import torch

from tests.engine.scene import begun, own, turn, turns
from tests.gpu.scene import ON_A_CARD, spec_of
from tests.scene import MIB
from workers.devices import open_device
from workers.messages import Cause, Status, Verdict, WorkerState
from workers.settings import WorkerSpec
from workers.workloads.base import StepResult, Workload

pytestmark = ON_A_CARD

Found: TypeAlias = dict[str, Any]

# --- a broken context


class Asserting(Workload):
    """Reads past the end of a tensor on the card, from the second step on."""

    steps: ClassVar[int] = 0

    def step(self, size: int, batch: int) -> StepResult:
        Asserting.steps += 1
        table = torch.zeros(4, device=self.context.device)
        index = torch.tensor([0 if Asserting.steps == 1 else 1_000_000], device=self.context.device)
        table[index].sum()
        return StepResult()

    def release(self) -> None:
        """Nothing is kept."""


def asserting(spec: WorkerSpec) -> Found:
    return {"statuses": turns(spec, [{}] * 4), "steps": Asserting.steps}


def test_a_device_assert_poisons_the_process_for_good(in_child: Callable[..., Any]) -> None:
    found = in_child(asserting, spec_of(name=own(Asserting)))
    good, *bad = found["statuses"]
    assert good.verdict is Verdict.OK
    for status in bad:
        assert status.verdict is Verdict.CONTEXT_CORRUPTED
        assert status.verdict_cause is Cause.EXCEPTION, "the card is well"
        assert status.state is WorkerState.STOPPED
        assert "device-side assert" in status.reason
        assert status.resume == good.resume
    assert found["steps"] == 2, "nothing touched the broken context again"


# --- element types


def error_of_a_product(spec: WorkerSpec) -> tuple[float, int]:
    """Return the largest error of a product, relative to its largest element, and the generation of
    the card.
    """
    device = open_device(spec)
    factor = torch.randn(1024, 1024, device=device.torch_device, dtype=device.torch_dtype)
    product, true = (factor @ factor).double(), factor.double() @ factor.double()
    error = float((product - true).abs().max() / true.abs().max())
    return error, torch.cuda.get_device_capability()[0]


def test_tf32_is_really_used_where_there_is_one(in_child: Callable[..., Any]) -> None:
    """That products are right is for the checks of `test_card.py`."""
    error, generation = in_child(error_of_a_product, spec_of(dtype="fp32"))
    assert error < 1e-5
    if generation < 8:
        pytest.skip("tf32 begins with Ampere")
    in_tf32, _ = in_child(error_of_a_product, spec_of(dtype="tf32"))
    assert 10 * error < in_tf32 <= 2e-3, "as precise as fp32: it was not switched on"


# --- what cannot work


def first_turn(spec: WorkerSpec) -> Status:
    return turn(begun(spec))


def test_a_budget_that_the_context_eats_names_the_key(in_child: Callable[..., Any]) -> None:
    status = in_child(first_turn, spec_of(budget_bytes=120 * MIB))
    assert (status.verdict, status.verdict_cause) == (Verdict.INCOMPATIBLE, Cause.OUT_OF_MEMORY)
    assert "nodes.pc1.vram_per_worker_gib" in status.reason


def test_budgets_beyond_the_real_card_are_refused_with_the_sum(
    in_child: Callable[..., Any],
) -> None:
    status = in_child(first_turn, spec_of(budget_bytes=2**40))
    assert status.verdict is Verdict.INCOMPATIBLE
    assert "1024.00 GiB in sum" in status.reason
