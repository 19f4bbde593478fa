"""Half an hour under random chaos, checked from outside all along: the counts, the head's own use,
and what is left.

A rehearsal of the reference pair with eight kinds of faults: workers that are killed, crash, leave,
hang or lose their device, steps that fail or run out of memory, and a node that goes and comes
back; in 30 minutes about 260 strikes and nodes. Every few seconds it reads the store, the witness
of each slot and /proc. A slot must end RUNNING, or BACKOFF where its very last slice met a failed
step, or QUARANTINED with a reason. The product injects nothing in the last minute; in a very short
run that is a few seconds, and what is still away at its end is allowed.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benches.common import Result, percentile, progress
from benches.outside import WITNESS, sample_times, settings, sums, watched
from orchestrator.record.archive import StoredRun
from workers.units import MIB

#: Seconds between two faults of a kind at the usual pace; the last of each comes well before the
#: end.
_EVERY_S = {"kill": 20.0, "segv": 35.0, "exit": 40.0, "poison": 40.0, "hang": 60.0, "node": 120.0}
#: Share of a period that is left when the last fault of a kind has struck: the slow ones first.
_REST = {"kill": 0.4, "segv": 0.5, "exit": 0.6, "poison": 0.7, "hang": 0.8, "node": 0.9}
#: Of steps. About four steps a second in all on two cores.
_OOM_RATE = 0.004
_RAISE_RATE = 0.002
_LOOK_EVERY_S = 2.0
_TELL_EVERY_S = 60.0
#: A fault that is older than this when the run ends is not late, its slot or node is lost. Seen: at
#: most 24 s.
_BACK_WITHIN_S = 90.0
#: From this length on the calm at the end is a whole minute: nothing is excused by it.
_CALM_ENOUGH_S = 300.0
#: From here on the quarters of a run are long enough to be compared; before, they are figures.
_JUDGED_FROM_S = 100.0
#: What the head may grow by from the second quarter to the last: 5 %, or this.
_GROWTH = 1.05
_GROWTH_MOST = {"rss_bytes": 10 * MIB, "fds": 8, "threads": 4, "zombies": 8}
#: Reaper, GCS and its reaper; raylet, its two agents and a reaper on each node; of one slot, a
#: process that ends while the next one starts.
_PROCESSES, _PROCESSES_A_NODE, _PROCESSES_A_SLOT = 3, 4, 2


def run(minutes: float, seed: int, pace: float) -> Result:
    """Run for so long; a short run needs a higher pace of faults to see any."""
    duration_s = 60.0 * minutes
    looks: list[dict[str, float]] = []
    told_s = time.monotonic()

    def look(head: psutil.Process, stored: StoredRun | None, alive: int) -> None:
        nonlocal told_s
        descendants = len(head.children(recursive=True))
        looks.append(
            {
                "elapsed_s": 0.0 if stored is None else stored.elapsed_s,
                "rss_bytes": head.memory_info().rss,
                "fds": head.num_fds(),
                "threads": head.num_threads(),
                "processes": alive - 1,  # less the head itself
                "zombies": max(0, descendants - (alive - 1)),
            }
        )
        if time.monotonic() - told_s > _TELL_EVERY_S:
            told_s = time.monotonic()
            progress(", ".join(f"{name} {value:,.0f}" for name, value in looks[-1].items()))

    def judge(
        folder: Path, stored: StoredRun, rows: list[dict[str, Any]], broken: list[str]
    ) -> dict[str, Any]:
        path = folder / "summary.json"
        summary = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.exists()
            else {"workers": [], "faults": []}
        )
        broken += [
            *_slots_broken(summary, duration_s),
            *_counts_broken(rows, summary),
            *(_head_broken(looks) if duration_s >= _JUDGED_FROM_S else ()),
            *_processes_broken(looks, stored),
        ]
        figures = _figures(summary, rows, looks, sample_times(folder))
        return {"minutes": minutes, "seed": seed, "chaos": _chaos(duration_s, pace), **figures}

    # In a very short run a hanging worker must be found sooner, or it would not be back before the
    # end.
    hang_timeout_s = min(10.0, duration_s / 6)
    arguments = [
        "--rehearse", "--duration", f"{duration_s:.3f}s", "--workload", WITNESS,
        "--chaos", _chaos(duration_s, pace), "--chaos-seed", str(seed),
        *settings(
            f"run.hang_timeout_s={hang_timeout_s:.3f}",
            f"run.stale_after_s={0.4 * hang_timeout_s:.3f}",
            f"run.slice_s={min(1.0, 0.4 * hang_timeout_s):.3f}",
            "run.min_success_rate=0",
            # The plan alone brings each slot a death in 70 s: breakers for more than four times
            # that, and no pause that outlasts the next fault.
            "run.max_deaths=8",
            "run.death_window_s=120",
            "run.restart_backoff_max_s=4",
            "workload.size=2048",
        ),
    ]  # fmt: skip
    every_s = _LOOK_EVERY_S if duration_s >= _JUDGED_FROM_S else _LOOK_EVERY_S / 4
    return watched("soak", arguments, duration_s, judge, look=look, every_s=every_s)


def _chaos(duration_s: float, pace: float) -> str:
    """Return the plan: as many of each kind as the time has room for, the last one in time to
    recover from it.
    """
    pieces = [f"oom:rate={_OOM_RATE:g}", f"raise:rate={_RAISE_RATE:g}"]
    for kind, usual_s in _EVERY_S.items():
        count = max(1, round(duration_s * pace / usual_s - _REST[kind]))
        every_s = max(1.0, duration_s / (count + _REST[kind]))
        pause = f",for={min(12.0, duration_s / 6):.2f}s" if kind == "node" else ""
        pieces.append(f"{kind}:every={every_s:.2f}s{pause}")
    return ";".join(pieces)


def _slots_broken(summary: Mapping[str, Any], duration_s: float) -> list[str]:
    if not summary["workers"]:
        return ["there is no summary"]
    late: set[str] = set()
    if duration_s < _CALM_ENOUGH_S:
        late = {fault["target"] for fault in summary["faults"] if fault["fate"] == "not_back"}
    found = []
    for row in summary["workers"]:
        state, reason = row["state"], row["reason"]
        if state in {"RUNNING", "BACKOFF"} or row["slot"] in late or row["node"] in late:
            continue
        if state != "QUARANTINED":
            found.append(
                f"{row['slot']} ended {state} ({reason}), and no fault under way explains it"
            )
        elif not reason.strip():
            found.append(f"{row['slot']} ended QUARANTINED without a reason")
    return found + [
        f"{fault['target']} never came back from the {fault['kind']} of second {fault['at_s']:.0f}"
        for fault in summary["faults"]
        if fault["fate"] == "not_back"
        and fault["at_s"] < duration_s - _BACK_WITHIN_S
        and "ended again" not in fault["became"]
    ]


def _counts_broken(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[str]:
    wrong = [
        f"{row['slot']}: {row['witnessed']} steps were done, {row['steps_ok']} counted and at most "
        f"{row['lost_at_most']} lost"
        for row in rows
        if not row["steps_ok"] <= row["witnessed"] <= row["steps_ok"] + row["lost_at_most"]
    ]
    return wrong + [
        f"fault {fault['number']} ({fault['kind']} at {fault['target']}) has no outcome: "
        f"{fault['became']}"
        for fault in summary["faults"]
        if fault["fate"] == "pending" or fault["became"] == "under way" or not fault["became"]
    ]


def _head_broken(looks: Sequence[Mapping[str, float]]) -> list[str]:
    quarters = {name: _quarters(looks, name) for name in _GROWTH_MOST}
    return [
        f"the head's {name} grew from {second:,.0f} in the second quarter to {last:,.0f} in the "
        "last"
        for name, (second, last) in quarters.items()
        if last > second + max(_GROWTH_MOST[name], (_GROWTH - 1.0) * second)
    ]


def _processes_broken(looks: Sequence[Mapping[str, float]], stored: StoredRun) -> list[str]:
    nodes, slots = len(stored.facts.nodes_planned), len(stored.slots)
    bound = _PROCESSES + _PROCESSES_A_NODE * nodes + _PROCESSES_A_SLOT * slots
    most = max((look["processes"] for look in looks), default=0)
    return (
        [f"{most} processes at once; {nodes} nodes and {slots} workers need {bound}"]
        if most > bound
        else []
    )


def _quarters(looks: Sequence[Mapping[str, float]], name: str) -> tuple[float, float]:
    """Return the medians over the second and the last quarter of the planned time."""
    end_s = max((look["elapsed_s"] for look in looks), default=0.0)
    second = [look[name] for look in looks if 0.25 * end_s <= look["elapsed_s"] < 0.5 * end_s]
    last = [look[name] for look in looks if 0.75 * end_s <= look["elapsed_s"] < end_s]
    return (statistics.median(second), statistics.median(last)) if second and last else (0.0, 0.0)


def _figures(
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    looks: Sequence[Mapping[str, float]],
    sampled_at_s: Sequence[float],
) -> dict[str, Any]:
    faults = summary["faults"]
    struck = [fault for fault in faults if fault["fate"] != "moot"]
    return {
        "outcome": summary.get("outcome"),
        "exit_code": summary.get("exit_code"),
        "strikes_and_nodes": sum(fault["kind"] not in {"oom", "raise"} for fault in struck),
        "failed_steps": sum(
            fault["count"] for fault in struck if fault["kind"] in {"oom", "raise"}
        ),
        "kinds": _kinds(faults),
        "slots": list(rows),
        **sums(rows),
        "restarts": summary.get("restart_count"),
        "quarantined": {
            row["slot"]: row["reason"] for row in rows if row["state"] == "QUARANTINED"
        },
        **{
            f"head_{name}_{when}": value
            for name in _GROWTH_MOST
            for when, value in zip(
                ("second_quarter", "last_quarter"), _quarters(looks, name), strict=True
            )
        },
        "processes_most": max((look["processes"] for look in looks), default=0),
        "samples": len(sampled_at_s) * len(rows),
        "samples_expected": len(rows) * (sampled_at_s[-1] - sampled_at_s[0]) if sampled_at_s else 0,
        "longest_gap_s": max(
            (after - before for before, after in itertools.pairwise(sampled_at_s)), default=0.0
        ),
    }


def _kinds(faults: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each kind: how many, what became of them, how long until the slot or node
    was back.
    """
    rows = []
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        mine = [fault for fault in faults if fault["kind"] == kind]
        took_s = [fault["recovered_s"] for fault in mine if fault["recovered_s"] is not None]
        row: dict[str, Any] = {"kind": kind}
        for fate in ("survived", "recovered", "given_up", "not_back", "moot"):
            row[fate] = sum(fault["count"] for fault in mine if fault["fate"] == fate)
        for name, share in (("recovered_p50_s", 0.5), ("recovered_p99_s", 0.99)):
            row[name] = percentile(took_s, share) if took_s else None
        rows.append(row)
    return rows
