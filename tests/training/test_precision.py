"""The switches of torch that a precision sets; every function that reads them still works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from workers.training.precision import set_up
from workers.training.settings import Precision

pytestmark = pytest.mark.torch

READERS: dict[str, Callable[[], object]] = {
    "matmul precision": torch.get_float32_matmul_precision,
    "matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: (
        torch.backends.cudnn.allow_tf32
    ),  # inductor's template of convolutions
    "cudnn.flags": lambda: torch.backends.cudnn.flags(enabled=True).__enter__(),  # users' code
    "matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "conv.fp32_precision": lambda: torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
}


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_reader_answers_after_any_setting(precision: Precision) -> None:
    for one in ("tf32", "fp32", precision):  # a process may have had another precision before
        set_up(one, deterministic=False)
    answers = {name: read() for name, read in READERS.items()}
    is_tf32 = precision == "tf32"
    assert answers["matmul.allow_tf32"] == answers["cudnn.allow_tf32"] == is_tf32
    assert answers["matmul precision"] == ("high" if is_tf32 else "highest")
    assert answers["matmul.fp32_precision"] == ("tf32" if is_tf32 else "ieee")
