"""The check of results: how often it refuses a right product, and which flipped bits it finds.

Products and checks are the product's own, with fresh operands at every check. Most checks are of
small matrices; each size and type is counted by itself, and nothing is concluded for those that
were not tried. What checks cost a worker is told by `watching`, and judged by the acceptance
checks.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from benches.common import Result, progress
from tests.flips import bit_class, flip_bit
from workers.verification import freivalds, repeat
from workers.verification.check import Check
from workers.verification.freivalds import tolerance

_DTYPES: Final = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
#: Of 1000 checks, how many are of this size. A product in fp16 of more than 64 takes a CPU ten
#: times the others' time.
_MIX: Final = {64: 800, 128: 170, 256: 26, 512: 3, 1024: 1}
_MIX_FP16: Final = {64: 990, 128: 9, 256: 1}
_MIX_CUDA: Final = {64: 500, 256: 250, 1024: 200, 4096: 48, 8192: 2}
#: The workload's own operands, operands whose products never cancel, and rows and columns of very
#: different size.
_DRAWS: Final = ("normal", "normal", "positive", "scaled")
#: Each this many checks the product is repeated instead.
_REPEAT_EVERY: Final = 10
#: A flip that changes a result by so many tolerances must be found whatever rounding does: the row
#: passed before, so rounding takes at most one of them away.
_SURELY: Final = 2.0
#: Of the flips of one type: all, found by each kind of check, surely too large, and those of them it found.
COUNTS: Final = ("flips", "freivalds", "repeat", "large", "large_found")


@dataclass(slots=True)
class Bench:
    """Matrices of one type and size: operands, two places for results, scratch."""

    name: str
    n: int
    device: torch.device
    generator: torch.Generator
    matrices: torch.Tensor = field(init=False)
    scratch: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Take the memory, and have fp32 computed as the name says from now on."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")
        shape = (4, self.n, self.n)
        self.matrices = torch.empty(shape, dtype=_DTYPES[self.name], device=self.device)
        roomy = freivalds.least_scratch(self.n) + self.n * self.n
        self.scratch = torch.empty(roomy, dtype=torch.float64, device=self.device)

    def draw(self, how: str) -> None:
        left, right, result, _ = self.matrices
        if how == "positive":
            self.matrices[:2].uniform_(0.5, 1.5, generator=self.generator)
        else:
            self.matrices[:2].normal_(generator=self.generator)
        if how == "scaled":
            shape = (2, self.n, 1)
            scales = torch.randint(-4, 5, shape, generator=self.generator, device=self.device)
            self.matrices[:2].mul_(torch.exp2(scales.to(self.matrices.dtype)))
        torch.mm(left, right, out=result)

    def freivalds(self, seed: int) -> Check:
        left, right, result, _ = self.matrices
        return freivalds.freivalds(left, right, result, self.scratch, seed)

    def repeat(self) -> Check:
        left, right, result, again = self.matrices
        torch.mm(left, right, out=again)
        check = repeat.same_bits(result, again, self.scratch)
        if check is None:
            raise RuntimeError("torch summed one product in different orders, with memory to spare")
        return check


def row_tolerances(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the change of one element of each row that is at the edge of what is tolerated."""
    allowed = tolerance(result.dtype, len(result), result.device.type)
    sizes = result.double().square().sum(dim=1)
    spreads = left.double().square() @ right.double().square().sum(dim=1)
    return (allowed.stored * sizes + allowed.summed * spreads.maximum(sizes) + allowed.least).sqrt()


def run(checks: int, flips: int, seed: int, device: str, dtypes: list[str]) -> Result:
    """Check so many right products, and for each bit of each type `flips` wrong ones."""
    where = torch.device(device)
    if where.type == "cpu":
        torch.set_num_threads(1)
    broken: list[str] = []
    alarms = _false_alarms(checks, seed, where, dtypes, broken)
    counts = [row for dtype in dtypes for row in _flips(flips, seed, where, dtype, broken)]
    shares = [
        {
            **{key: row[key] for key in ("dtype", "bits", "flips")},
            "by_freivalds": row["freivalds"] / row["flips"],
            "by_repeat": row["repeat"] / row["flips"], "large": row["large"] / row["flips"],
            "large_by_freivalds": row["large_found"] / max(1, row["large"]),
        }
        for row in counts
    ]  # fmt: skip
    figures = {
        "device": torch.cuda.get_device_name() if where.type == "cuda" else "cpu",
        "torch": str(torch.__version__), "checks": sum(row["checks"] for row in alarms),
        "false_alarms": sum(row["false_alarms"] for row in alarms),
        "largest_ratio": max(row["largest_ratio"] for row in alarms),
        "rounds": alarms, "counts": counts, "flips": shares,
    }  # fmt: skip
    return Result(bench="verify", figures=figures, broken=broken)


def _false_alarms(
    checks: int, seed: int, device: torch.device, dtypes: list[str], broken: list[str]
) -> list[dict[str, Any]]:
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    generator = torch.Generator(device=device).manual_seed(seed)
    rows: list[dict[str, Any]] = []
    for name in dtypes:
        mix = _MIX_CUDA if device.type == "cuda" else _MIX_FP16 if name == "fp16" else _MIX
        for n, of_1000 in mix.items():
            bench = Bench(name=name, n=n, device=device, generator=generator)
            count = max(len(_DRAWS), round(checks / len(dtypes) * of_1000 / 1000))
            made: list[Check] = []
            began_s = time.perf_counter()
            for number in range(count):
                how = _DRAWS[number % len(_DRAWS)]
                bench.draw(how)
                is_repeat = number % _REPEAT_EVERY == 0
                check = bench.repeat() if is_repeat else bench.freivalds(chance.getrandbits(40))
                made.append(check)
                if not check.ok:
                    told = f"{check.kind}: {check.detail}"
                    broken.append(f"a right product was refused: {name}, {how}: {told}")
            kinds = Counter(check.kind for check in made)
            rows.append(
                {
                    "dtype": name, "size": n, "checks": count, "freivalds": kinds["freivalds"],
                    "repeat": kinds["repeat"], "false_alarms": sum(not each.ok for each in made),
                    "largest_ratio": max(check.worst for check in made),
                    "took_s": time.perf_counter() - began_s,
                }
            )  # fmt: skip
            done = sum(row["checks"] for row in rows)
            progress(f"{done} checks, {name} {n}: largest ratio {rows[-1]['largest_ratio']:.3f}")
    return rows


def _flips(
    flips: int, seed: int, device: torch.device, name: str, broken: list[str]
) -> list[dict[str, Any]]:
    """Flip each bit of a type `flips` times, in products of the smallest and of a middling size."""
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = _DTYPES[name]
    counts: Counter[tuple[str, str]] = Counter()
    for n in (64, 256):
        bench = Bench(name=name, n=n, device=device, generator=generator)
        bench.draw("normal")
        left, right, result, _ = bench.matrices
        edges = row_tolerances(left, right, result).tolist()
        for bit in range(8 * dtype.itemsize):
            kind = bit_class(dtype, bit)
            for _ in range(flips):
                index = chance.randrange(n * n)
                before = result.view(-1)[index].item()
                flip_bit(result, index, bit)
                change = abs(result.view(-1)[index].item() - before) / edges[index // n]
                by_freivalds = not bench.freivalds(chance.getrandbits(40)).ok
                by_repeat = not bench.repeat().ok
                flip_bit(result, index, bit)
                # What is no number any more has changed without measure.
                sure = not math.isfinite(change) or change >= _SURELY
                outcomes = (True, by_freivalds, by_repeat, sure, sure and by_freivalds)
                happened = zip(COUNTS, outcomes, strict=True)
                counts.update((kind, what) for what, is_so in happened if is_so)
                if sure and not by_freivalds:
                    broken.append(
                        f"{name}: Freivalds missed bit {bit}, a change of {change:.1f} "
                        f"tolerances, n {n}"
                    )
                if not by_repeat:
                    broken.append(f"{name}: the repeat missed bit {bit}, n {n}")
    return [
        {"dtype": name, "bits": kind, **{what: counts[kind, what] for what in COUNTS}}
        for kind in ("sign", "exponent", "fraction")
    ]
