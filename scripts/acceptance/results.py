"""Results: the check of products cries no wolf, finds flipped bits, and costs no more time than it is given."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from benches.common import progress
from benches.verify import Bench, row_tolerances

from acceptance.crew import in_child
from acceptance.ground import Ground
from acceptance.outcome import Outcome
from workers.devices.opening import open_device
from workers.settings import WorkerSpec
from workers.verification.schedule import CheckSchedule
from workers.verification.tamper import flip_bit
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

_SHARE = 0.01
MUST_HOLD = (
    f"no right product is refused, every flip of more than 2 tolerances is found, repeats find all, and checks take "
    f"{_SHARE:.0%} of the time beside the first two and the last"
)

#: Which sizes products have, the first ones more often.
_SIZES = {"cuda": (64, 256, 256, 1024, 1024, 4096), "cpu": (64, 64, 64, 128, 128, 256)}
_DRAWS = ("normal", "positive", "scaled")
_REPEAT_EVERY = 8

#: A change of so many tolerances must be found whatever rounding does: rounding takes one away at the most.
_SURELY = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One type."""

    dtype: str
    products: int
    false_alarms: int
    largest_ratio: float
    """Of an error to what is tolerated, over all right products."""
    flips: int
    flips_large: int
    """Those that no rounding could hide."""
    found_large: int
    found_by_freivalds: int
    found_by_repeat: int
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The workload's own check, in the time it is given."""

    size: int
    worked_s: float
    checked_s: float
    checks: int
    longest_s: float
    product_s: float
    """Of one product, the middle of the last steps."""
    refused: int


def verify(device_name: str, name: str, products: int, flips: int) -> tuple[int, float, dict[str, int]]:
    """Check right and wrong products of one type; return false alarms, largest ratio and counts. For a child."""
    device = torch.device(device_name)
    chance = random.Random(f"acceptance {name}")  # noqa: S311 - repeatable is what is wanted
    generator = torch.Generator(device=device).manual_seed(7)
    sizes = _SIZES[device.type]
    benches = {n: Bench(name=name, n=n, device=device, generator=generator) for n in dict.fromkeys(sizes)}
    alarms, largest = 0, 0.0
    for number in range(products):
        bench = benches[sizes[number % len(sizes)]]
        bench.draw(_DRAWS[number % len(_DRAWS)])
        check = bench.repeat() if number % _REPEAT_EVERY == 0 else bench.freivalds(chance.getrandbits(40))
        alarms += not check.ok
        largest = max(largest, check.worst)
    bench = benches[256]
    bench.draw("normal")
    left, right, result, _ = bench.matrices
    edges = row_tolerances(left, right, result).tolist()
    counts = {"large": 0, "found_large": 0, "freivalds": 0, "repeat": 0}
    for number in range(flips):
        index, bit = chance.randrange(result.numel()), number % (8 * result.element_size())
        before = result.view(-1)[index].item()
        flip_bit(result, index, bit)
        change = abs(result.view(-1)[index].item() - before) / edges[index // bench.n]
        by_freivalds = not bench.freivalds(chance.getrandbits(40)).ok
        by_repeat = not bench.repeat().ok
        flip_bit(result, index, bit)
        # What is no number any more has changed without measure.
        large = not math.isfinite(change) or change >= _SURELY
        counts["large"] += large
        counts["found_large"] += large and by_freivalds
        counts["freivalds"] += by_freivalds
        counts["repeat"] += by_repeat
    return alarms, largest, counts


def work_and_check(spec: WorkerSpec, seconds: float) -> Cost:
    """Run steps, and the workload's own checks as they fall due. The body of a child."""
    device = open_device(spec)
    workload = Matmul(WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=0))
    workload.resize(device.free_bytes() // 2)
    size, batch = spec.workload.size, spec.workload.batch
    n = size - size % 64
    for _ in range(4):
        device.timed(lambda: workload.step(size, batch))  # finds out how many products make a step
    schedule = CheckSchedule(_SHARE)
    worked_s = checked_s = longest_s = 0.0
    checks = refused = 0
    products_s: list[float] = []
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds or not checks:
        result, took_s = device.timed(lambda: workload.step(size, batch))
        worked_s += took_s
        products_s.append(took_s * 2.0 * n**3 / result.flop)
        due = schedule.after_step(size, batch, took_s)
        if due is None:
            continue
        number = due
        found, took_s = device.timed(lambda: workload.check(number))  # noqa: B023 - called at once
        schedule.after_check(took_s)
        checked_s += took_s
        longest_s = max(longest_s, took_s)
        checks += 1
        refused += found is not None and not found.ok
    return Cost(
        size=size,
        worked_s=worked_s,
        checked_s=checked_s,
        checks=checks,
        longest_s=longest_s,
        product_s=sorted(products_s)[len(products_s) // 2],
        refused=refused,
    )


def measure(ground: Ground) -> list[Verified]:
    """Verify each type."""
    scale = ground.scale
    budget_bytes, _ = ground.fitting(1, scale.large_budget_bytes)
    found = []
    for name in scale.dtypes:
        alarms, largest, counts = in_child(ground.watch, verify, ground.device, name, scale.products, scale.flips)
        (spec,) = ground.specs(1, budget_bytes, dtype=name, label="verify")
        cost = in_child(ground.watch, work_and_check, spec, 4 * scale.turn_s)
        found.append(
            Verified(
                dtype=name,
                products=scale.products,
                false_alarms=alarms,
                largest_ratio=largest,
                flips=scale.flips,
                flips_large=counts["large"],
                found_large=counts["found_large"],
                found_by_freivalds=counts["freivalds"],
                found_by_repeat=counts["repeat"],
                cost=cost,
            )
        )
        progress(f"results {name}: {alarms} false alarms")
    return found


def judge(found: Sequence[Verified]) -> Outcome:
    """Say whether the checks can be trusted, and paid for."""
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for each in found:
        cost = each.cost
        all_s = cost.worked_s + cost.checked_s
        rows.append(
            {
                "dtype": each.dtype,
                "products": each.products,
                "false_alarms": each.false_alarms,
                "largest_ratio": each.largest_ratio,
                "flips": each.flips,
                "found_by_freivalds": each.found_by_freivalds,
                "large_flips": each.flips_large,
                "found_large": each.found_large,
                "found_by_repeat": each.found_by_repeat,
                "size": cost.size,
                "checks": cost.checks,
                "check_in_products": cost.checked_s / cost.checks / cost.product_s if cost.checks else None,
                "cost_pct": 100.0 * cost.checked_s / all_s,
            }
        )
        if each.false_alarms or cost.refused:
            broken.append(f"{each.dtype}: {each.false_alarms + cost.refused} right products were refused")
        if each.found_large < each.flips_large:
            broken.append(f"{each.dtype}: {each.flips_large - each.found_large} large flips were missed")
        if each.found_by_repeat < each.flips:
            broken.append(f"{each.dtype}: the repeat missed {each.flips - each.found_by_repeat} flips")
        # The first two checks of a size are in advance of what it earns, and the last one may be a little.
        if cost.checked_s > _SHARE * all_s + 3.0 * cost.longest_s:
            broken.append(f"{each.dtype}: checks took {cost.checked_s / all_s:.2%} of the time")
    return Outcome(
        check="results",
        must_hold=MUST_HOLD,
        figures={
            "products": sum(each.products for each in found),
            "false_alarms": sum(each.false_alarms for each in found),
            "flips": sum(each.flips for each in found),
        },
        rows=rows,
        broken=broken,
    )


def check(ground: Ground) -> Outcome:
    """Measure and judge."""
    return judge(measure(ground))
