"""All checks in their order, and one run of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from benches.common import progress

from acceptance import caps, mps_shares, recovery, results, sampling, shares, side_by_side, speed, totals
from acceptance.ground import Ground, NotHereError
from acceptance.outcome import Outcome, show

#: By the name that `--only` takes. Each has `MUST_HOLD`, and `judge` for what its `measure` returns.
CHECKS: Mapping[str, ModuleType] = {
    "cap": caps,
    "recovery": recovery,
    "side_by_side": side_by_side,
    "totals": totals,  # follows `side_by_side`, whose last crew it can go on with
    "speed": speed,
    "duty": shares,
    "mps": mps_shares,
    "sampler": sampling,
    "results": results,
}
_KEEPS_CREW = "totals"


def run(ground: Ground, names: Sequence[str]) -> list[tuple[Outcome, float]]:
    """Make the named checks in their order; return each outcome with the seconds it took.

    A check that breaks off is a broken check and never ends the others.
    """
    found: list[tuple[Outcome, float]] = []
    try:
        for name, check in CHECKS.items():
            if name not in names:
                continue
            if name != _KEEPS_CREW:
                ground.crews.close()
            progress(f"\n{name} …")
            began_s = time.monotonic()
            try:
                outcome = check.judge(check.measure(ground))
            except NotHereError as error:
                outcome = Outcome(skipped=str(error))
            except Exception as error:  # noqa: BLE001 - told as what it is, and the other checks go on
                outcome = Outcome(broken=[f"broke off: {type(error).__name__}: {error}"])
            outcome = dataclasses.replace(outcome, check=name, must_hold=check.MUST_HOLD)
            found.append((outcome, time.monotonic() - began_s))
            show(outcome)
    finally:
        ground.crews.close()
    return found


def as_json(ground: Ground, found: Sequence[tuple[Outcome, float]]) -> dict[str, Any]:
    """Return what goes to standard output."""
    return {
        "schema": 1,
        "acceptance": ground.device,
        "ok": all(outcome.ok is not False for outcome, _ in found),
        "quick": ground.quick,
        "took_s": sum(took_s for _, took_s in found),
        **ground.host,
        "checks": [{**outcome.as_json(), "took_s": took_s} for outcome, took_s in found],
    }
