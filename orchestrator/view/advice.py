"""Why the cards of a run were not busy, and which keys to change: a section of `report`.

The time in which workers reported is divided by their states and counters; the rest of it is work.
Pure: gets what was read of a run. Does not know what a change would bring, which `tune` measures,
nor tells of time without a worker, which the report does elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final, TypeAlias

from orchestrator.record.history import Buckets, Span
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
    "neighbour": "another program used it; end that (nvidia-smi names it), or plan with less of "
    "the card",
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

Course: TypeAlias = Mapping[str, Buckets]
"""The sampled values of one slot, by key."""


def advice_lines(
    rows: Sequence[Row],
    courses: Mapping[str, Course],
    spans: Mapping[str, Sequence[Span]],
    ends_unix_s: float,
) -> Iterator[str]:
    """Yield each card that was seen at work for 10 s and was less busy than it could be, and then a
    line for each cause, the largest share of its time first.

    Of each slot, `courses` are the values of `SAMPLED` and `spans` its states, as of `history`; the
    last states lasted until `ends_unix_s`.
    """
    for (node, _), of_card in rows_by_card(rows).items():
        found = (
            _seen(row, courses.get(row.slot, {}), spans.get(row.slot, ()), ends_unix_s)
            for row in of_card
        )
        seen = [slot for slot in found if slot is not None]
        if not seen:
            continue
        busy, shares = _divided(seen, of_card, courses.get(of_card[0].slot, {}))
        causes = [cause for cause in shares if shares[cause] >= _LEAST_SHARE]
        if causes:
            yield f"{node}, {of_card[0].gpu_name or 'CPU'}: busy {busy:.0%} of the time"
        for cause in sorted(causes, key=lambda cause: -shares[cause]):
            yield f"{shares[cause]:.0%} {cause}: {_REMEDIES[cause].format(node)}"


def _mean(course: Course, key: str) -> float | None:
    """Return the mean of a sampled value."""
    known = [value for value in course[key].mean if value is not None] if key in course else []
    return fmean(known) if known else None


def _seen(
    row: Row, course: Course, spans: Sequence[Span], ends_unix_s: float
) -> dict[str, float] | None:
    """Return shares of the time in which a slot's worker reported, by what they are shares of;
    `None` where it was seen for too short a time.
    """
    states_s = defaultdict[str, float](float)
    for span in spans:
        if span.state in set(WorkerState) - _IDLE_STATES:
            until_unix_s = ends_unix_s if span.to_unix_s is None else span.to_unix_s
            states_s[span.state] += max(0.0, until_unix_s - span.from_unix_s)
    seen_s = sum(states_s.values())
    if seen_s < _LEAST_SEEN_S:
        return None
    starved = sum(states_s[state] for state in STARVED) / seen_s
    paused = states_s[WorkerState.PAUSED] / seen_s
    kept, of_best_pct = _mean(course, "duty_measured"), _mean(course, "baseline_pct")
    return {
        "starved": starved,
        "paused": paused,
        "throttled": states_s[WorkerState.THROTTLED] / seen_s,
        # Its process kept the device, waits for data included.
        "kept": min(1.0, max(0.0, 1.0 - paused - starved if kept is None else kept)),
        "duty": 1.0 if row.duty_requested is None else row.duty_requested,
        "data": (row.progress.data_wait_pct or 0.0) / 100,
        "copies": (row.progress.copies_pct or 0.0) / 100,
        "of_best": 1.0 if of_best_pct is None else min(1.0, of_best_pct / 100),
    }


def _divided(
    seen: Sequence[Mapping[str, float]], rows: Sequence[Row], course: Course
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
    if (_mean(course, "device_used_bytes") or 0.0) - own_bytes > _FOREIGN_LEAST_BYTES:
        slower = kept * (1 - mean["of_best"]) - by_heat - data
        shares["neighbour"] = shares.pop("memory") + max(0.0, slower)
    used_pct = _mean(course, "utilisation_pct")
    if used_pct is not None and busy - used_pct / 100 >= _LEAST_GAPS:
        shares["gaps"] = busy - used_pct / 100
        busy = used_pct / 100
    return busy, {cause: min(1.0, share) for cause, share in shares.items()}
