"""All checks in their order, and one run of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benches.common import progress

from acceptance import caps, mps_shares, recovery, results, sampling, shares, side_by_side, speed, totals
from acceptance.ground import Ground
from acceptance.outcome import Outcome, show, unmeasured

#: By the name that `--only` takes. `totals` follows `side_by_side`, whose last crew it can go on with.
CHECKS: Mapping[str, tuple[Callable[[Ground], Outcome], str]] = {
    "cap": (caps.check, caps.MUST_HOLD),
    "recovery": (recovery.check, recovery.MUST_HOLD),
    "side_by_side": (side_by_side.check, side_by_side.MUST_HOLD),
    "totals": (totals.check, totals.MUST_HOLD),
    "speed": (speed.check, speed.MUST_HOLD),
    "duty": (shares.check, shares.MUST_HOLD),
    "mps": (mps_shares.check, mps_shares.MUST_HOLD),
    "sampler": (sampling.check, sampling.MUST_HOLD),
    "results": (results.check, results.MUST_HOLD),
}
_KEEPS_CREW = "totals"


def run(ground: Ground, names: Sequence[str]) -> list[tuple[Outcome, float]]:
    """Make the named checks in their order; return each outcome with the seconds it took.

    A check that breaks off is a broken check and never ends the others.
    """
    found: list[tuple[Outcome, float]] = []
    try:
        for name, (check, must_hold) in CHECKS.items():
            if name not in names:
                continue
            if name != _KEEPS_CREW:
                ground.crews.close()
            progress(f"\n{name} …")
            began_s = time.monotonic()
            try:
                outcome = check(ground)
            except Exception as error:  # noqa: BLE001 - told as what it is, and the other checks go on
                outcome = unmeasured(name, must_hold, f"broke off: {type(error).__name__}: {error}")
            found.append((outcome, time.monotonic() - began_s))
            show(outcome)
    finally:
        ground.crews.close()
    return found


def as_json(ground: Ground, host: Mapping[str, Any], found: Sequence[tuple[Outcome, float]]) -> dict[str, Any]:
    """Return what goes to standard output."""
    return {
        "schema": 1,
        "acceptance": ground.device,
        "ok": all(outcome.ok is not False for outcome, _ in found),
        "quick": ground.quick,
        "took_s": sum(took_s for _, took_s in found),
        **host,
        "checks": [{**outcome.as_json(), "took_s": took_s} for outcome, took_s in found],
    }
