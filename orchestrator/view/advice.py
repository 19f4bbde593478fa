"""Why the cards of a run were not busy, and which keys to change: a section of `report`.

The time in which workers reported is divided by their states and counters; the rest of it is work.
Pure: gets what was read of a run. Does not know what a change would bring, which `tune` measures,
nor tells of time without a worker, which the report does elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final, TypeAlias

from orchestrator.record.model import Row, rows_by_card
from workers.messages import STARVED, WorkerState
from workers.units import MIB

#: What keeps a card from its work: what is seen of it, and what to do. Braces stand for the node.
#: `gaps` are between kernels; at `head` a worker waits for the processor.
_REMEDIES: Final[Mapping[str, str]] = {
    "data": "it waited for data; prepare them in processes of their own (train.loader_workers), "
    "or make samples cheaper: smaller, or decoded once",
    "copies": "batches were copied to it; copy while it computes (train.pin), or send "
    "small number types and larger parts of a batch",
    "gaps": "it had work and waited for the host; compile blocks into fewer and larger kernels "
    "(train.compile), or give it more at once, by a larger size or batch",
    "duty": "its workers rested, as their share of the card says; raise nodes.{}.gpu_share, or "
    "plan one worker more",
    "heat": "its workers paused or did less, because it was hot; check dust, airflow and fans, "
    "then lower nodes.{}.power_limit_w",
    "neighbour": "another program used it; end that (nvidia-smi names it, or top on a processor), "
    "or plan with less of it",
    "memory": "not even the smallest step of a worker fitted; raise "
    "nodes.{}.vram_per_worker_gib, or start fewer workers",
    "head": "workers waited for the processor; plan no more workers than cores",
}

#: Sampled values that the causes are told by.
SAMPLED: Final = ("duty_measured", "baseline_pct", "utilisation_pct", "device_used_bytes")

#: Less of the time is within what counters and sensors tell; NVML tells of long gaps only.
_LEAST_SHARE: Final = 0.05
_LEAST_GAPS: Final = 0.10

#: Less observed time is no ground for advice.
_LEAST_SEEN_S: Final = 10.0

#: More than a desktop takes while its user looks on.
_FOREIGN_LEAST_BYTES: Final = 768 * MIB

#: In these a worker has not begun, or has nothing to do.
_IDLE_STATES: Final = frozenset({WorkerState.WARMING, WorkerState.DONE, WorkerState.STOPPED})

Means: TypeAlias = Mapping[str, float | None]
"""Of one slot, the mean of each sampled value; `None` is unknown."""


def advice_lines(
    rows: Sequence[Row],
    means: Mapping[str, Means],
    states_s: Mapping[str, Mapping[str, float]],
) -> Iterator[str]:
    """Yield each card that was seen at work for 10 s and was less busy than it could be, and then a
    line for each cause, the largest share of its time first.

    Of each slot, `means` are those of `SAMPLED`, and `states_s` says how long it was in each state.
    """
    for (node, _), of_card in rows_by_card(rows).items():
        found = (_seen(row, means.get(row.slot, {}), states_s.get(row.slot, {})) for row in of_card)
        seen = [slot for slot in found if slot is not None]
        if not seen:
            continue
        busy, shares = _divided(seen, of_card, means.get(of_card[0].slot, {}))
        causes = [cause for cause in shares if shares[cause] >= _LEAST_SHARE]
        if causes:
            yield f"{node}, {of_card[0].gpu_name or 'CPU'}: busy {busy:.0%} of the time"
        for cause in sorted(causes, key=lambda cause: -shares[cause]):
            yield f"{shares[cause]:.0%} {cause}: {_REMEDIES[cause].format(node)}"


def _seen(row: Row, mean: Means, states_s: Mapping[str, float]) -> dict[str, float] | None:
    """Return shares of the time in which a slot's worker reported, by what they are shares of;
    `None` where it was seen for too short a time.
    """
    in_state_s = {state: states_s.get(state, 0.0) for state in set(WorkerState) - _IDLE_STATES}
    seen_s = sum(in_state_s.values())
    if seen_s < _LEAST_SEEN_S:
        return None
    starved = sum(in_state_s[state] for state in STARVED) / seen_s
    paused = in_state_s[WorkerState.PAUSED] / seen_s
    kept, of_best_pct = mean.get("duty_measured"), mean.get("baseline_pct")
    return {
        "starved": starved,
        "paused": paused,
        "throttled": in_state_s[WorkerState.THROTTLED] / seen_s,
        # Its process kept the device, waits for data included.
        "kept": min(1.0, max(0.0, 1.0 - paused - starved if kept is None else kept)),
        "duty": 1.0 if row.duty_requested is None else row.duty_requested,
        "data": (row.progress.data_wait_pct or 0.0) / 100,
        "copies": (row.progress.copies_pct or 0.0) / 100,
        "of_best": 1.0 if of_best_pct is None else min(1.0, of_best_pct / 100),
    }


def _divided(
    seen: Sequence[Mapping[str, float]], rows: Sequence[Row], sampled: Means
) -> tuple[float, dict[str, float]]:
    """Return the share of the time in which a card was busy, and the shares of the causes."""
    mean = {name: fmean(slot[name] for slot in seen) for name in seen[0]}
    kept, data, starved, paused = (mean[name] for name in ("kept", "data", "starved", "paused"))
    could = max(0.0, 1.0 - paused - starved)
    idle = max(0.0, could - kept)
    by_duty = min(idle, could * (1 - mean["duty"]))
    by_heat = min(idle - by_duty, mean["throttled"])
    work = max(0.0, kept - data)
    # The slots of a processor have cores of their own.
    busy = work if rows[0].device == "cpu" else min(1.0, work * len(seen))
    # While one slot is idle another may use the card; only what all of them leave idle is lost.
    lost = (1 - busy) / (1 - work) if work < 1 else 0.0
    shares = {
        "data": data * lost,
        "copies": mean["copies"],
        "duty": by_duty * lost,
        "heat": paused + by_heat,
        "memory": starved * lost,
        "head": (idle - by_duty - by_heat) * lost,
    }
    own_bytes = sum(row.budget_bytes or 0 for row in rows)
    if (sampled.get("device_used_bytes") or 0.0) - own_bytes > _FOREIGN_LEAST_BYTES:
        slower = kept * (1 - mean["of_best"]) - by_heat - data
        shares["neighbour"] = shares.pop("memory") + max(0.0, slower)
    used_pct = sampled.get("utilisation_pct")
    if used_pct is not None and busy - used_pct / 100 >= _LEAST_GAPS:
        shares["gaps"] = busy - used_pct / 100
        busy = used_pct / 100
    return busy, {cause: min(1.0, share) for cause, share in shares.items()}
