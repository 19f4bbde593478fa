"""Why the cards of a run were not busy, and which keys to change: a section of `report`.

States and counters of the workers divide the time in which they reported into causes; the rest is
work. Pure: takes data that was read from a run folder. Does not estimate the gain of a change
(`tune` measures it), and does not cover time without a worker, which another section reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final, TypeAlias

from orchestrator.record.model import Row, rows_by_card
from workers.messages import STARVED, WorkerState
from workers.units import MIB

#: Cause of lost time -> what was observed, and what to do. Braces stand for the node's name.
#: `gaps` are pauses between kernels; with `head`, a worker waits for the processor.
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

#: Sampled values from which the causes are computed.
SAMPLED: Final = ("duty_measured", "baseline_pct", "utilisation_pct", "device_used_bytes")

#: Smaller shares of the time are within the error of the counters. NVML shows only long gaps.
_LEAST_SHARE: Final = 0.05
_LEAST_GAPS: Final = 0.10

#: With less reported time there is no advice.
_LEAST_REPORTED_S: Final = 10.0

#: More memory of a card than a desktop in use takes.
_FOREIGN_LEAST_BYTES: Final = 768 * MIB

#: In these states a worker has not begun its work, or has none left.
_IDLE_STATES: Final = frozenset({WorkerState.WARMING, WorkerState.DONE, WorkerState.STOPPED})

Means: TypeAlias = Mapping[str, float | None]
"""Sampled value -> its mean in one slot; `None` is unknown."""


def advice_lines(
    rows: Sequence[Row],
    means: Mapping[str, Means],
    states_s: Mapping[str, Mapping[str, float]],
) -> Iterator[str]:
    """Yield a line for each card that worked for 10 s or more and was less busy than possible, and
    then a line for each cause, the largest share of the card's time first.

    By slot, `means` has the means of `SAMPLED`, and `states_s` the seconds in each state.
    """
    for (node, _), of_card in rows_by_card(rows).items():
        found = (
            _slot_shares(row, means.get(row.slot, {}), states_s.get(row.slot, {}))
            for row in of_card
        )
        slots = [slot for slot in found if slot is not None]
        if not slots:
            continue
        busy, shares = _divide_time(slots, of_card, means.get(of_card[0].slot, {}))
        causes = [cause for cause in shares if shares[cause] >= _LEAST_SHARE]
        if causes:
            yield f"{node}, {of_card[0].gpu_name or 'CPU'}: busy {busy:.0%} of the time"
        for cause in sorted(causes, key=lambda cause: -shares[cause]):
            yield f"{shares[cause]:.0%} {cause}: {_REMEDIES[cause].format(node)}"


def _slot_shares(row: Row, mean: Means, states_s: Mapping[str, float]) -> dict[str, float] | None:
    """Return named shares of the time in which a slot's worker reported.

    `None` if that time is too short.
    """
    in_state_s = {state: states_s.get(state, 0.0) for state in set(WorkerState) - _IDLE_STATES}
    reported_s = sum(in_state_s.values())
    if reported_s < _LEAST_REPORTED_S:
        return None
    starved = sum(in_state_s[state] for state in STARVED) / reported_s
    paused = in_state_s[WorkerState.PAUSED] / reported_s
    held, of_best_pct = mean.get("duty_measured"), mean.get("baseline_pct")
    return {
        "starved": starved,
        "paused": paused,
        "throttled": in_state_s[WorkerState.THROTTLED] / reported_s,
        # The worker held the device; this includes waits for data.
        "held": min(1.0, max(0.0, 1.0 - paused - starved if held is None else held)),
        "duty": 1.0 if row.duty_requested is None else row.duty_requested,
        "data": (row.progress.data_wait_pct or 0.0) / 100,
        "copies": (row.progress.copies_pct or 0.0) / 100,
        "of_best": 1.0 if of_best_pct is None else min(1.0, of_best_pct / 100),
    }


def _divide_time(
    slots: Sequence[Mapping[str, float]], rows: Sequence[Row], sampled: Means
) -> tuple[float, dict[str, float]]:
    """Return the share of the time in which a card was busy, and the shares of the causes."""
    mean = {name: fmean(slot[name] for slot in slots) for name in slots[0]}
    held, data, starved, paused = (mean[name] for name in ("held", "data", "starved", "paused"))
    able = max(0.0, 1.0 - paused - starved)
    idle = max(0.0, able - held)
    by_duty = min(idle, able * (1 - mean["duty"]))
    by_heat = min(idle - by_duty, mean["throttled"])
    work = max(0.0, held - data)
    # Each slot on a processor has its own cores.
    busy = work if rows[0].device == "cpu" else min(1.0, work * len(slots))
    # While one slot is idle, another may use the card: time is lost only if all slots are idle.
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
        slower = held * (1 - mean["of_best"]) - by_heat - data
        shares["neighbour"] = shares.pop("memory") + max(0.0, slower)
    used_pct = sampled.get("utilisation_pct")
    if used_pct is not None and busy - used_pct / 100 >= _LEAST_GAPS:
        shares["gaps"] = busy - used_pct / 100
        busy = used_pct / 100
    return busy, {cause: min(1.0, share) for cause, share in shares.items()}
