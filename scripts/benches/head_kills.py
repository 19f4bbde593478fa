"""The head killed at random moments, also while Ray starts: what is left of it, what its store knows, how it goes on.

Each round starts the real command with three workers in two raylets and kills its head at a moment drawn between the
start of the process and shortly before the planned end. Then: nothing of it lives 10 s later, the store can be read
and lacks at most the last second, and `run --resume` goes on with it to the planned end, with the sizes learned before.
A head that was killed before it stored anything cannot be gone on with: that must be said in a sentence.

The size is too large for every cap at first, so that there is something to learn. Judges no speed.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.common import Result, progress
from benches.outside import WITNESS, Ledger, Scene, sample_times, settings
from orchestrator.watch.archive import StoredEvent, StoredRun, read_events
from orchestrator.watch.folders import UNREADABLE, list_runs

_DURATION_S = 12.0
_ARGUMENTS = (
    "--rehearse", "--duration", f"{_DURATION_S:g}s", "--workload", WITNESS,
    *settings(
        "nodes.pc1.workers=2",
        "nodes.pc2.workers=1",
        # 32 MiB each after scaling: three matrices of edge 2048 do not fit into that, of 1408 they do.
        "nodes.pc1.vram_per_worker_gib=0.5",
        "nodes.pc2.vram_per_worker_gib=0.5",
        "memory.policy=classic",  # its sizes never grow: what was learned can be told from what is new
        "workload.size=8192",
        "workload.dtype=fp32",
        "run.min_success_rate=0",
    ),
)  # fmt: skip

#: Until the planned time begins, before that was seen once.
_STARTUP_S = 10.0

#: The last moment for a kill: what remains must be worth a cluster to `run --resume`, which wants one slice.
_BEFORE_END_S = 2.0

_GRACE_S = 10.0
_PATIENCE_S = 120.0
_POLL_S = 0.02
_LOOK_EVERY_S = 0.5

#: Of the table; what was not reached stays unknown.
_COLUMNS = (
    "round", "killed_after_s", "stage", "left", "missing_s", "allowed_s", "elapsed_s", "resumed", "learned",
)  # fmt: skip

#: What a killed head may lack, by design.
_MISSING_S = 1.0

#: How late a sample may be when nothing is wrong: the head looks whether one is due four times a second, after waiting
#: at most 0.1 s for a report. What this process itself was kept from running is added: the same holds for the head.
_SLACK_S = 0.35


def run(rounds: int, seed: int) -> Result:
    """Kill so many heads, and go on with each run."""
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    kept: list[str] = []
    startup_s = _STARTUP_S
    for number in range(1, rounds + 1):
        scene = Scene()
        found: list[str] = []
        row: dict[str, Any] = dict.fromkeys(_COLUMNS)
        row["round"] = number
        try:
            known_s = _round(scene, chance.random(), startup_s, row, found)
        finally:
            folder = scene.close(keep=bool(found))
        startup_s = startup_s if known_s is None else known_s
        rows.append(row)
        broken += [f"round {number}: {sentence}" for sentence in found]
        kept += [folder] if folder is not None else []
        progress(f"{number}/{rounds}  killed after {row['killed_after_s']:.2f} s: {row['stage']}; {len(found)} broken")
    stored = [row for row in rows if row["stage"] not in {"before its folder", "before its store"}]
    figures = {
        "rounds": rows,
        "killed": dict(Counter(row["stage"] for row in rows)),
        "readable": f"{sum(row['stage'] != 'unreadable' for row in stored)}/{len(stored)}",
        "resumed": f"{sum(bool(row['resumed']) for row in stored)}/{len(stored)}",
        "worst_missing_s": max((row["missing_s"] for row in rows if row["missing_s"] is not None), default=None),
        "left": sum(row["left"] for row in rows),
        "kept": kept or None,
    }
    return Result(bench="head-kills", figures=figures, broken=broken)


def _round(scene: Scene, drawn: float, startup_s: float, row: dict[str, Any], broken: list[str]) -> float | None:
    """Kill one head and go on with its run; return how long it took until the planned time began, if it had."""
    head = scene.run(*_ARGUMENTS)
    known_s, killed_at_unix_s, late_s = _kill(head, scene, drawn * (startup_s + _DURATION_S - _BEFORE_END_S), row)
    left = scene.leftovers(_GRACE_S)
    row["left"] = len(left)
    broken += left
    folder = scene.folder_of_newest()
    if folder is None:
        row["stage"] = "before its folder"
        return known_s
    (listed,) = list_runs(scene.runs)
    if listed.outcome == UNREADABLE:
        row["stage"] = "unreadable"
        broken.append(f"the store cannot be read: {listed.error}")
        return known_s
    if listed.run is None:
        row["stage"] = "before its store"
        if (listed.outcome, listed.error) != ("interrupted", None):
            broken.append(f"`runs` takes it for {listed.outcome} ({listed.error}), and it was interrupted")
        code, said = scene.ended(scene.run("--resume", folder.name), _PATIENCE_S)
        row["resumed"] = code == 0
        if code != 2 or not _sentence(said):
            broken.append(f"resuming a run without a store gave exit code {code}: {said[:300]!r}")
        return known_s
    ledger = Ledger(scene.steps)
    before = ledger.look(folder)
    if before is None or not before.was_killed:
        broken += [f"its run is {listed.outcome}, not killed", *ledger.broken]
        return known_s
    row["stage"] = "at work" if before.elapsed_s > 0 else "before its planned time"
    row["elapsed_s"] = before.elapsed_s
    _judge_samples(folder, killed_at_unix_s, late_s, row, broken)
    _go_on(scene, ledger, before, row, broken)
    return known_s


def _kill(
    head: subprocess.Popen[bytes], scene: Scene, moment_s: float, row: dict[str, Any]
) -> tuple[float | None, float, float]:
    """Kill the head at its moment, or shortly before its planned end if that comes first.

    Returns:
        Seconds from its folder until its planned time began (`None`: it had not), when it was killed, and the longest
        that this process was kept from running.
    """
    while scene.folder_of_newest() is None and head.poll() is None:
        time.sleep(_POLL_S)  # before that there is no run that could be shown
    began_s = last_s = looked_s = time.monotonic()
    late_s = 0.0
    counting_s: float | None = None
    while True:
        now_s = time.monotonic()
        late_s, last_s = max(late_s, now_s - last_s - _POLL_S), now_s
        over = counting_s is not None and now_s - counting_s >= _DURATION_S - _BEFORE_END_S
        if over or now_s - began_s >= moment_s or head.poll() is not None:
            break
        if now_s - looked_s > _LOOK_EVERY_S:
            looked_s = now_s
            scene.look()
            folder = scene.folder_of_newest()
            if counting_s is None and folder is not None and _counts(folder):
                counting_s = now_s
            last_s = time.monotonic()  # looking is this process's own doing
        time.sleep(_POLL_S)
    at_unix_s = time.time()
    head.kill()
    row["killed_after_s"] = time.monotonic() - began_s
    head.wait()
    return None if counting_s is None else counting_s - began_s, at_unix_s, late_s


def _counts(folder: Path) -> bool:
    path = folder / "events.jsonl"
    return path.exists() and '"event":"counting"' in path.read_text(encoding="utf-8")


def _judge_samples(
    folder: Path, killed_at_unix_s: float, late_s: float, row: dict[str, Any], broken: list[str]
) -> None:
    """Demand that the last sample is no older than a second and what was already late."""
    sampled_at_s = sample_times(folder)
    if not sampled_at_s:
        return
    missing_s = killed_at_unix_s - sampled_at_s[-1]
    # A machine on which samples came late all along is not what is judged.
    usual_s = max((after - before for before, after in itertools.pairwise(sampled_at_s)), default=0.0)
    allowed_s = max(_MISSING_S + _SLACK_S + max(0.0, late_s), usual_s + _SLACK_S)
    row["missing_s"], row["allowed_s"] = missing_s, allowed_s
    if missing_s > allowed_s:
        broken.append(f"the last sample is {missing_s:.2f} s older than the kill; allowed are {allowed_s:.2f} s")


def _go_on(scene: Scene, ledger: Ledger, before: StoredRun, row: dict[str, Any], broken: list[str]) -> None:
    code, said = scene.ended(scene.run("--resume", before.facts.run_id), _PATIENCE_S)
    row["resumed"] = code == 0
    left = scene.leftovers(_GRACE_S)
    row["left"] += len(left)
    broken += [f"after going on: {sentence}" for sentence in left]
    after = ledger.look(before.folder)
    if code != 0 or after is None:
        broken += [f"going on gave exit code {code}: {said[-500:]}", *ledger.broken]
        return
    ledger.end(after)
    broken += ledger.broken
    broken += _sums_broken(before, after, json.loads(said))
    events = read_events(before.folder, ("run_started", "counting", "resumed"))
    broken += _time_broken(before, events)
    broken += _sizes_broken(before, after, events)
    row["learned"] = sum(bool(slot.resume and slot.resume["failures"]) for slot in before.slots)


def _sums_broken(before: StoredRun, after: StoredRun, summary: Mapping[str, Any]) -> list[str]:
    found = []
    if abs(summary["duration_s"] - _DURATION_S) > 1e-6 or after.heads != before.heads + 1:
        found.append(f"{after.heads} heads worked {summary['duration_s']:.2f} s in all, not {_DURATION_S:g}")
    known = {slot.slot: slot for slot in after.slots}
    for slot in before.slots:
        now = known[slot.slot]
        lost = slot.counters["steps_lost_upper_bound"] + slot.steps_at_risk
        if now.counters["steps_lost_upper_bound"] < lost:
            found.append(f"{slot.slot}: what was at risk is not counted as lost")
        if now.incarnation <= slot.incarnation:
            found.append(f"{slot.slot}: incarnation {now.incarnation} after {slot.incarnation}")
    return found


def _time_broken(before: StoredRun, events: Sequence[StoredEvent]) -> list[str]:
    """Demand that the second head planned what the first has left."""
    planned_s = [event.details["duration_s"] for event in _of_second_head(events) if event.event == "counting"]
    if len(planned_s) != 1 or abs(planned_s[0] - before.remaining_s) > 1e-6:
        return [f"the second head planned {planned_s} s, and {before.remaining_s} s remained"]
    return []


def _sizes_broken(before: StoredRun, after: StoredRun, events: Sequence[StoredEvent]) -> list[str]:
    """Demand that each slot's first process began from the policy state that was stored."""
    resumed = {event.slot: event for event in reversed(_of_second_head(events)) if event.event == "resumed"}
    sizes = {slot.slot: slot.row.get("size") for slot in after.slots}
    found = []
    for slot in before.slots:
        if slot.resume is None:
            continue
        event = resumed.get(slot.slot)
        took = None if event is None else {key: event.details.get(key) for key in slot.resume}
        if took != dict(slot.resume):
            found.append(f"{slot.slot}: went on from {took}, and {dict(slot.resume)} was stored")
        size, had = sizes[slot.slot], slot.row.get("size")
        if size is not None and had is not None and size > had:
            found.append(f"{slot.slot}: size {size} after it had learned {had}")
    return found


def _of_second_head(events: Sequence[StoredEvent]) -> Sequence[StoredEvent]:
    starts = [index for index, event in enumerate(events) if event.event == "run_started"]
    return events[starts[-1] :] if len(starts) > 1 else ()


def _sentence(said: str) -> str | None:
    """Return the sentence with which a command refused."""
    try:
        error = json.loads(said)["error"]
    except (ValueError, LookupError, TypeError):
        return None
    return error if isinstance(error, str) and " " in error else None
