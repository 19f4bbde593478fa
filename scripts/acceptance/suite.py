"""All checks in their order, and the function that runs them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benches.common import progress

from acceptance import memory, throughput
from acceptance.machine import Check, Machine, NotHereError
from acceptance.outcome import Outcome

#: Keyed by the name for `--only`.
CHECKS: Mapping[str, Check] = {**memory.CHECKS, **throughput.CHECKS}


def run(machine: Machine, names: Sequence[str]) -> list[tuple[Outcome, float]]:
    """Run the named checks in the order of `CHECKS`; return each outcome and its time in seconds.

    A check that raises an exception is broken, and the other checks continue.
    """
    found: list[tuple[Outcome, float]] = []
    for name in (name for name in CHECKS if name in names):
        check = CHECKS[name]
        progress(f"\n{name} …")
        began_s = time.monotonic()
        try:
            outcome = check.judge(check.measure(machine))
        except NotHereError as error:
            outcome = Outcome(skipped=str(error))
        except Exception as error:  # noqa: BLE001 - reported, and the other checks continue
            outcome = Outcome(broken=[f"broke off: {type(error).__name__}: {error}"])
        outcome = dataclasses.replace(outcome, check=name, must_hold=check.must_hold)
        found.append((outcome, time.monotonic() - began_s))
        outcome.show()
    return found


def as_json(machine: Machine, found: Sequence[tuple[Outcome, float]]) -> dict[str, Any]:
    checks = [{**outcome.as_json(), "took_s": took_s} for outcome, took_s in found]
    return {
        "schema": 1, "acceptance": machine.device, "quick": machine.quick,
        "ok": all(outcome.ok is not False for outcome, _ in found),
        "took_s": sum(took_s for _, took_s in found), **machine.host, "checks": checks,
    }  # fmt: skip
