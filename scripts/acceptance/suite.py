"""All checks in their order, and one run of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benches.common import progress

from acceptance import claims, memory, throughput, watching
from acceptance.machine import Machine, NotHereError
from acceptance.outcome import Outcome, show


class Check(NamedTuple):
    """What must hold, how it is measured on a machine, and how that is judged."""

    must_hold: str
    measure: Callable[[Machine], Any]
    judge: Callable[[Any], Outcome]


#: By the name that `--only` takes.
CHECKS: Mapping[str, Check] = {
    "cap": Check(memory.CAP_MUST_HOLD, memory.measure_cap, memory.judge_cap),
    "recovery": Check(memory.RECOVERY_MUST_HOLD, memory.measure_recovery, memory.judge_recovery),
    "side_by_side": Check(
        memory.SIDE_BY_SIDE_MUST_HOLD, memory.measure_side_by_side, memory.judge_side_by_side
    ),
    "totals": Check(
        throughput.TOTALS_MUST_HOLD, throughput.measure_totals, throughput.judge_totals
    ),
    "speed": Check(throughput.SPEED_MUST_HOLD, throughput.measure_speed, throughput.judge_speed),
    "duty": Check(throughput.DUTY_MUST_HOLD, throughput.measure_duty, throughput.judge_duty),
    "mps": Check(throughput.MPS_MUST_HOLD, throughput.measure_mps, throughput.judge_mps),
    "sampler": Check(watching.SAMPLER_MUST_HOLD, watching.measure_sampler, watching.judge_sampler),
    "results": Check(watching.RESULTS_MUST_HOLD, watching.measure_results, watching.judge_results),
    **{
        name: Check(must_hold, measure, claims.judge)
        for name, (must_hold, measure) in claims.MEASURED.items()
    },
}


def run(machine: Machine, names: Sequence[str]) -> list[tuple[Outcome, float]]:
    """Make the named checks in their order; return each outcome with the seconds it took.

    A check that breaks off is a broken check and never ends the others.
    """
    found: list[tuple[Outcome, float]] = []
    for name, check in CHECKS.items():
        if name not in names:
            continue
        progress(f"\n{name} …")
        began_s = time.monotonic()
        try:
            outcome = check.judge(check.measure(machine))
        except NotHereError as error:
            outcome = Outcome(skipped=str(error))
        except Exception as error:  # noqa: BLE001 - told as what it is, and the other checks go on
            outcome = Outcome(broken=[f"broke off: {type(error).__name__}: {error}"])
        outcome = dataclasses.replace(outcome, check=name, must_hold=check.must_hold)
        found.append((outcome, time.monotonic() - began_s))
        show(outcome)
    return found


def as_json(machine: Machine, found: Sequence[tuple[Outcome, float]]) -> dict[str, Any]:
    return {
        "schema": 1,
        "acceptance": machine.device,
        "ok": all(outcome.ok is not False for outcome, _ in found),
        "quick": machine.quick,
        "took_s": sum(took_s for _, took_s in found),
        **machine.host,
        "checks": [{**outcome.as_json(), "took_s": took_s} for outcome, took_s in found],
    }
