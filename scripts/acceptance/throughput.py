"""Measures the throughput of workers: against a bare torch loop, together on one card, and with
limited shares of time or of the card.

Speed: the engine is driven turn by turn, as its program does, and its work is timed from outside;
the bare loop always has a batch queued. Totals: the guides claim 180 % for two workers and 250 %
for three. The true value depends on the part of the card that one worker leaves idle, so one size
that fills the card and one that does not are measured. MPS: needs its control daemon; measured in
plain fp32, where the power limit does not set the speed.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benches import common
from benches.common import ChildDiedError, in_turn, progress

from acceptance import bodies
from acceptance.crew import Child, crew_of, gather, summed_up
from acceptance.machine import Check, Machine, NotHereError
from acceptance.outcome import Outcome, Row
from workers.host import mps
from workers.messages import Verdict

_LEAST = 0.97
#: Warm-up before the measured turns: it loads kernels, finds the lengths of steps, and on a CPU
#: touches each page once.
_WARM_UP_S = 1.0


def measure_speed(machine: Machine) -> Sequence[Row]:
    # Two budgets: the bare loop holds as much as the worker.
    budget_bytes, _ = machine.fitting(2, machine.scale.large_budget_bytes)
    with contextlib.closing(Child("bare loop", bodies.serve_bare_loop, machine.device)) as bare:
        return [_race(machine, bare, dtype, budget_bytes) for dtype in machine.scale.dtypes]


def _race(machine: Machine, bare: common.Child, dtype: str, budget_bytes: int) -> Row:
    scale, watch = machine.scale, machine.watch
    with crew_of(
        machine.specs(1, budget_bytes, dtype=dtype, label=f"speed-{dtype}"), watch
    ) as crew:
        first = crew.turn(_WARM_UP_S)[0].last  # after all stages of the allocation
        if first.size is None or not first.claim_bytes:
            raise RuntimeError(f"the worker did not come up: {first.state} {first.reason}")
        size = first.size - first.size % 64  # matmul rounds sizes down to a multiple of 64
        kind = (dtype, size, first.claim_bytes)

        def bare_flop_per_s(seconds: float) -> float:
            bare.send((kind, seconds))
            return float(gather([bare], watch, seconds=seconds)[0])

        def ours(seconds: float) -> tuple[float, int]:
            (turn,) = crew.turn(seconds)
            return turn.flop_per_s, turn.failures

        bare_flop_per_s(_WARM_UP_S)
        watch.clear()
        sides: Mapping[str, Any] = {
            "bare": lambda: bare_flop_per_s(scale.turn_s), "ours": lambda: ours(scale.turn_s)
        }  # fmt: skip
        rounds = [in_turn(number, sides) for number in range(scale.rounds)]
    sensed = summed_up(watch)
    profile, clock_mhz = machine.profile, sensed["sm_clock_mhz"]
    tflops = statistics.median(found["ours"][0] for found in rounds) / 1e12
    rated = None if profile is None else profile.peak_tflops(dtype)
    # The peak of the card at the sampled clock.
    peak = None if profile is None or clock_mhz is None else profile.peak_tflops(dtype, clock_mhz)
    ratio = statistics.median(found["ours"][0] / found["bare"] for found in rounds)
    progress(f"speed {dtype}: {ratio:.4f} of a bare loop")
    return {
        "dtype": dtype, "size": size, "product_tflops": tflops,
        "bare_tflops": statistics.median(found["bare"] for found in rounds) / 1e12,
        "ratio_median": ratio, "failures": sum(found["ours"][1] for found in rounds),
        "rated_tflops": rated, "rated_pct": 100.0 * tflops / rated if rated else None,
        "peak_pct": 100.0 * tflops / peak if peak else None, **sensed,
    }  # fmt: skip


def judge_speed(rows: Sequence[Row]) -> Outcome:
    slow = [row for row in rows if not row["ratio_median"] >= _LEAST]
    broken = [f"{row['dtype']}: {row['ratio_median']:.4f} of a bare loop" for row in slow]
    broken += [f"{row['dtype']}: {row['failures']} steps failed" for row in rows if row["failures"]]
    least = min(row["ratio_median"] for row in rows)
    return Outcome(figures={"ratio_least": least}, rows=rows, broken=broken)


_CLAIMED_PCT: Mapping[int, float] = {2: 180.0, 3: 250.0}


def measure_totals(machine: Machine) -> Sequence[Row]:
    """Measure rising numbers of workers on one card, and in every other pass falling numbers."""
    scale = machine.scale
    most = max(scale.counts)
    budget_bytes, _ = machine.fitting(most, scale.large_budget_bytes)
    found = []
    for size in (scale.size, scale.small_size):
        with crew_of(machine.specs(most, budget_bytes, size=size), machine.watch) as crew:
            crew.turn(scale.turn_s / 2)  # finds the number of products in a step; not counted
            for number in range(scale.passes):
                for workers in scale.counts if number % 2 == 0 else reversed(scale.counts):
                    turns = crew.turn(2 * scale.turn_s, who=range(workers))
                    tflops = sum(turn.flop_per_s for turn in turns) / 1e12
                    failures = sum(turn.failures for turn in turns)
                    row = {"size": size, "workers": workers, "tflops": tflops}
                    found.append({**row, "failures": failures})
        progress(f"totals: size {size} done")
    return found


def judge_totals(found: Sequence[Row]) -> Outcome:
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    notes: list[str] = []
    for size in dict.fromkeys(row["size"] for row in found):
        mine = [row for row in found if row["size"] == size]
        by_count = {
            workers: statistics.median(row["tflops"] for row in mine if row["workers"] == workers)
            for workers in dict.fromkeys(row["workers"] for row in mine)
        }
        one = by_count.get(1)
        for workers, tflops in by_count.items():
            done_pct, claimed_pct = 100.0 * tflops / one if one else None, _CLAIMED_PCT.get(workers)
            row = {"size": size, "workers": workers, "total_tflops": tflops}
            rows.append({**row, "of_one_pct": done_pct, "guides_claim_pct": claimed_pct})
            if claimed_pct and done_pct is not None and done_pct < claimed_pct:
                notes.append(
                    f"{workers} workers of size {size} do {done_pct:.0f} % of one's work, not the "
                    f"guides' {claimed_pct:.0f} %"
                )
        failures = sum(row["failures"] for row in mine)
        broken += [f"size {size}: {failures} steps failed"] * bool(failures)
        broken += [f"size {size}: no work was done"] * (not one or not all(by_count.values()))
    figures = {"workers_most": max((row["workers"] for row in found), default=None)}
    return Outcome(figures=figures, rows=rows, broken=broken, notes=notes)


_MOST_OFF = 0.05
_TOGETHER, _TOGETHER_DUTY = 7, 0.6
#: Turns in one measurement of a duty. It is long because the next turn compensates for an error.
_TURNS = 4


def measure_duty(machine: Machine) -> Sequence[Row]:
    """Measure single workers one after the other, the first without a duty, then seven at once."""
    scale = machine.scale
    seconds = _TURNS * scale.turn_s
    budget_bytes, _ = machine.fitting(_TOGETHER + len(scale.duties) + 1, scale.small_budget_bytes)
    alone = [
        spec
        for number, duty in enumerate((None, *scale.duties))
        for spec in machine.specs(1, budget_bytes, duty=duty, label=f"duty-{number}")
    ]
    together = machine.specs(_TOGETHER, budget_bytes, duty=_TOGETHER_DUTY, label="duty-together")
    found = []
    for specs, groups in ((alone, [[place] for place in range(len(alone))]), (together, [None])):
        with crew_of(specs, machine.watch) as crew:
            crew.turn(scale.turn_s)  # the length of a step follows from the steps before it
            for who in groups:
                turns = crew.turn(seconds, who=who)
                duties = [turn.duty for turn in turns]
                found.append(
                    {
                        "workers": len(turns), "duty_asked": specs[who[0] if who else 0].duty,
                        "duty_measured_median": statistics.median(duties),
                        "duty_measured_least": min(duties), "duty_measured_most": max(duties),
                        "tflops": sum(turn.flop_per_s for turn in turns) / 1e12,
                    }
                )  # fmt: skip
    return found


def judge_duty(found: Sequence[Row]) -> Outcome:
    unlimited = next((row["tflops"] for row in found if row["duty_asked"] is None), None)
    rows = [
        {**row, "of_unlimited_pct": 100.0 * row["tflops"] / unlimited if unlimited else None}
        for row in found
    ]
    off = {
        f"{row['workers']} at a duty of {asked:.2f}": max(
            abs(row[key] - asked) for key in ("duty_measured_least", "duty_measured_most")
        )
        for row in found
        if (asked := row["duty_asked"]) is not None
    }
    broken = [
        f"{who}: up to {value:.3f} off" for who, value in off.items() if not value <= _MOST_OFF
    ]
    return Outcome(figures={"off_most": max(off.values(), default=None)}, rows=rows, broken=broken)


_MOST_OVER = 0.10
_SHARES = (1.0, 0.5, 0.25)


def measure_mps(machine: Machine) -> list[tuple[float, float]]:
    """Measure single workers under MPS; return the requested share and the FLOP/s of each."""
    if machine.device != "cuda":
        raise NotHereError("no MPS here: the device is a CPU")
    problem = mps.missing_daemon()
    if problem is not None:
        raise NotHereError(f"no MPS here: {problem}")
    budget_bytes, _ = machine.fitting(1, machine.scale.large_budget_bytes)
    found = []
    for share in _SHARES:
        specs = machine.specs(1, budget_bytes, dtype="fp32", label="mps")
        try:
            with crew_of(specs, machine.watch, mps.client_variables(share, None)) as crew:
                first = crew.first[0].last
                if first.verdict is not Verdict.OK:
                    raise NotHereError(
                        f"MPS cannot be used here: a worker under it ended: {first.reason}"
                    )
                crew.turn(machine.scale.turn_s)
                (turn,) = crew.turn(3 * machine.scale.turn_s)
                found.append((share, turn.flop_per_s))
        except ChildDiedError as error:
            raise NotHereError(f"MPS cannot be used here: {error}") from None
    return found


def judge_mps(found: Sequence[tuple[float, float]]) -> Outcome:
    whole = dict(found).get(1.0)
    rows: list[Row] = []
    broken: list[str] = []
    for share, flop_per_s in found:
        measured = flop_per_s / whole if whole else None
        rows.append({"share_asked": share, "share_measured": measured, "tflops": flop_per_s / 1e12})
        if measured is None or not 0.0 < measured <= share + _MOST_OVER:
            broken.append(
                f"asked for {share:.2f} of the multiprocessors, did {measured} of the work"
            )
    return Outcome(figures={"workers_measured": len(found)}, rows=rows, broken=broken)


CHECKS = {
    "totals": Check(
        "every number of workers works without a failure; the totals are told as they are",
        measure_totals, judge_totals,
    ),
    "speed": Check(
        f"the product reaches {_LEAST:.0%} of a bare torch loop for each type, median of the "
        "rounds' ratios", measure_speed, judge_speed,
    ),
    "duty": Check(
        f"the measured duty is within {_MOST_OFF:.2f} of the one asked, alone and beside six "
        "others", measure_duty, judge_duty,
    ),
    "mps": Check(
        f"a worker does no more than its share of a whole worker's work, and {_MOST_OVER:.2f}",
        measure_mps, judge_mps,
    ),
}  # fmt: skip
