"""The levers of matmul, as data: number type, size, workers at once, duty, MPS and watts. Pure.

The baseline is one worker with fp32 products of the node's size, without rest. Speeds are
operations per second, of all workers of an arm together. What `tune` does not set is a row that
says why, and what measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchestrator.lab.tune.levers import Candidate

WORKLOAD: Final = "matmul"

_TF32: Final = "tf32 is a mode of a card's matrix units"


def baseline_of(size: int) -> dict[str, Any]:
    """Return what the other arms differ from."""
    return {"dtype": "fp32", "size": size, "workers": 1, "duty": None, "compute_share_mode": "none"}


def candidates(baseline: Mapping[str, Any], duty: float | None) -> list[Candidate]:
    """Return all candidates; `duty` is that of the configuration."""
    size = int(baseline["size"])
    found = [
        Candidate(lever="dtype", setting="tf32", changes={"dtype": "tf32"}, needs_card=_TF32),
        *(
            Candidate(lever="dtype", setting=name, changes={"dtype": name})
            for name in ("fp16", "bf16")
        ),
        *(
            Candidate(lever="size", setting=str(other), changes={"size": other})
            for other in (size // 2, 2 * size)
        ),
        *(
            Candidate(lever="workers", setting=str(count), changes={"workers": count}, copies=count)
            for count in (2, 3, 7)
        ),
        *(
            Candidate(
                lever="compute_share_mode",
                setting=f"mps with workers {count}",
                changes={"compute_share_mode": "mps", "workers": count},
                copies=count,
                beside=f"workers={count}",
            )
            for count in (2, 3, 7)
        ),
        Candidate(lever="power_limit_w", setting="lower", changes={"power_limit_w": "lower"}),
    ]
    shares = [each for each in dict.fromkeys((duty, 0.6)) if each is not None and each < 1]
    found += [
        Candidate(lever="duty", setting=f"{each:g}", changes={"duty": each}) for each in shares
    ]
    return found


def impossible(
    several: Sequence[Candidate],
    *,
    on_card: bool,
    mps_obstacle: str | None,
    room_bytes: int,
    budget_bytes: int,
) -> dict[str, str]:
    """Return why some cannot be tried.

    Args:
        several: The candidates.
        on_card: Whether the device is a card.
        mps_obstacle: Why MPS is not on; `None`: it is.
        room_bytes: What all workers of an arm may hold together.
        budget_bytes: What each of them holds.
    """
    found = {
        each.name: each.needs_card
        for each in several
        if each.needs_card is not None and not on_card
    }
    for each in several:
        if each.lever == "compute_share_mode" and mps_obstacle is not None:
            found[each.name] = mps_obstacle
        elif each.lever == "power_limit_w":
            without = "there is no card whose power could be limited"
            found[each.name] = (
                "burn --sweep power=FROM..TO:STEP measures it, as root" if on_card else without
            )
        elif each.copies * budget_bytes > room_bytes:
            found[each.name] = (
                f"{each.copies} workers of {budget_bytes / 2**30:.2f} GiB do not fit "
                f"{room_bytes / 2**30:.2f} GiB"
            )
    return found
