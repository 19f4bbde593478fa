"""Freivalds' test and the bitwise repeat: right products pass, wrong ones do not, and which of the two finds what."""

from __future__ import annotations

import math

import pytest
import torch

from tests.flips import bit_class, flip_bit
from workers.verification.check import Check
from workers.verification.products import freivalds, least_scratch, same_bits, tolerance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DRAWS = ["normal", "positive", "scaled", "zero rows", "zero", "whole numbers", "identity"]


class Product:
    """Operands of one type and kind, their product, a second place, and scratch."""

    def __init__(self, dtype: torch.dtype, n: int, how: str = "normal", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.left, self.right, self.result, self.again = torch.empty((4, n, n), dtype=dtype)
        for operand in (self.left, self.right):
            operand.normal_(generator=generator)
            if how == "positive":
                operand.abs_().add_(0.5)
            elif how == "scaled":
                operand.mul_(
                    torch.exp2(torch.randint(-5, 6, (n, 1), generator=generator)).to(dtype)
                )
            elif how == "zero rows":
                operand[::3] = 0.0
            elif how == "zero":
                operand.zero_()
            elif how == "whole numbers":
                operand.mul_(2).round_()
            elif how == "identity":
                operand.copy_(torch.eye(n))
        torch.mm(self.left, self.right, out=self.result)
        self.scratch = torch.full((least_scratch(n) + n * n,), math.nan, dtype=torch.float64)

    def freivalds(self, seed: int = 0) -> Check:
        return freivalds(self.left, self.right, self.result, self.scratch, seed)

    def repeat(self) -> Check:
        torch.mm(self.left, self.right, out=self.again)
        return same_bits(self.result, self.again, self.scratch)

    def tolerated(self) -> torch.Tensor:
        """Return the change of one element of each row that is at the edge of what is tolerated."""
        stored, summed, least = tolerance(self.result.dtype, len(self.result), "cpu")
        sizes = self.result.double().square().sum(dim=1)
        spreads = self.left.double().square() @ self.right.double().square().sum(dim=1)
        return (stored * sizes + summed * spreads.maximum(sizes) + least).sqrt()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [17, 96])
@pytest.mark.parametrize("how", DRAWS)
def test_a_right_product_passes_whatever_the_operands(dtype: torch.dtype, n: int, how: str) -> None:
    for seed in range(3):
        product = Product(dtype, n, how, seed)
        check = product.freivalds(seed)
        assert check.ok, check.detail
        assert check == Check(
            kind="freivalds", ok=True, worst=check.worst, detail=f"{n} x {n} {str(dtype)[6:]}"
        )
        again = product.repeat()
        assert (again.kind, again.ok, again.worst) == ("repeat", True, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tolerance_is_tight(dtype: torch.dtype) -> None:
    """The largest of 256 rows lies within a factor of 5 of it: 8 residuals each, whose mean square may be 11.5."""
    assert 0.2 < Product(dtype, 256 if dtype is not torch.float16 else 128).freivalds().worst < 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_flip_beyond_the_tolerance_is_found(dtype: torch.dtype, seed: int) -> None:
    """Rounding takes at most one tolerance away from a change, as the row passed before.

    So from two on it is sure.
    """
    n = 64
    product = Product(dtype, n, seed=seed)
    edges = product.tolerated().tolist()
    chances = torch.Generator().manual_seed(seed)
    large: set[str] = set()
    for bit in range(torch.finfo(dtype).bits):
        for index in torch.randint(n * n, (6,), generator=chances).tolist():
            before = product.result.view(-1)[index].item()
            flip_bit(product.result, index, bit)
            change = abs(product.result.view(-1)[index].item() - before) / edges[index // n]
            check = product.freivalds(bit)
            if not change < 2.0:  # or no number at all
                large.add(bit_class(dtype, bit))
                assert not check.ok, f"bit {bit} of {before}: {change} tolerances"
                assert f"row {index // n}:" in check.detail
                assert check.worst > 1.0
            elif change < 1e-3:
                assert check.ok
            flip_bit(product.result, index, bit)
    assert large >= {"sign", "exponent"}
    assert product.freivalds().ok, "every flip was taken back"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_repeat_finds_every_flip(dtype: torch.dtype) -> None:
    n = 64
    product = Product(dtype, n)
    product.result[5, 6] = 0.0  # whose sign changes nothing in value
    torch.mm(product.left, product.right, out=product.again)
    product.result[5, 6] = product.again[5, 6]
    for bit in range(torch.finfo(dtype).bits):
        for index in (0, 5 * n + 6, n * n - 1):
            flip_bit(product.result, index, bit)
            check = product.repeat()
            assert (check.ok, check.worst) == (False, math.inf)
            assert f"row {index // n}:" in check.detail
            flip_bit(product.result, index, bit)
    assert product.repeat().ok


def test_a_repeated_error_passes_the_repeat_and_not_freivalds() -> None:
    product = Product(torch.float32, 64)
    product.result[9] *= 1.001
    check = same_bits(product.result, product.result.clone(), product.scratch)
    assert check.ok
    assert not product.freivalds().ok


@pytest.mark.parametrize("threads", [1, 4])
def test_products_summed_in_different_orders_are_not_compared(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What MKL does with the rows of a thread that gets no memory for its buffers."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    product = Product(torch.float32, 128)
    other, rows = product.result.clone(), slice(128 // threads)
    other[rows] = (
        product.left[rows, :64] @ product.right[:64] + product.left[rows, 64:] @ product.right[64:]
    )
    assert not torch.equal(other, product.result)
    assert same_bits(product.result, other, product.scratch) is None
    assert product.freivalds().ok
