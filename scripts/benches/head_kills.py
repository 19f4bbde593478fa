"""The head killed at random moments, also while Ray starts: what is left of it, what its store
knows, how it goes on.

Each round starts the real command with three workers in two raylets and kills its head at a moment
drawn between the start of the process and shortly before the planned end. Then: nothing of it lives
10 s later, the store can be read and lacks at most the last second, and `run --resume` goes on with
it to the planned end, with the sizes learned before. If it was killed before it stored anything,
resuming is refused in a sentence. The size is too large for every cap at first, so that there is
something to learn.
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

from benches.common import Result, amiss, progress
from benches.outside import WITNESS, Ledger, Scene, sample_times, settings
from orchestrator.record.archive import StoredEvent, StoredRun, read_events
from orchestrator.record.folders import UNREADABLE, list_runs

_DURATION_S = 12.0
_ARGUMENTS = (
    "--rehearse", "--duration", f"{_DURATION_S:g}s", "--workload", WITNESS,
    *settings(
        "nodes.pc1.workers=2",
        "nodes.pc2.workers=1",
        # 32 MiB each after scaling: three matrices of edge 2048 do not fit into that, of 1408 they
        # do.
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
#: The last moment for a kill: what remains must be worth a cluster to `run --resume`, which wants
#: one slice.
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
#: How late a sample may be when nothing is wrong: the head looks whether one is due four times a
#: second, after waiting at most 0.1 s for a report. What this process itself was kept from running
#: is added: the same holds for the head.
_SLACK_S = 0.35


def run(rounds: int, seed: int) -> Result:
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    kept: list[str] = []
    startup_s = _STARTUP_S
    for number in range(1, rounds + 1):
        one = _Round(number)
        try:
            startup_s = one.play(chance.random(), startup_s)
        finally:
            kept += filter(None, [one.scene.close(keep=bool(one.broken))])
        row = one.row
        rows.append(row)
        broken += [f"round {number}: {sentence}" for sentence in one.broken]
        told = (
            f"killed after {row['killed_after_s']:.2f} s: {row['stage']}; {len(one.broken)} broken"
        )
        progress(f"{number}/{rounds}  {told}")
    stored = [row for row in rows if row["stage"] not in {"before its folder", "before its store"}]
    figures = {
        "rounds": rows,
        "killed": dict(Counter(row["stage"] for row in rows)),
        "readable": f"{sum(row['stage'] != 'unreadable' for row in stored)}/{len(stored)}",
        "resumed": f"{sum(bool(row['resumed']) for row in stored)}/{len(stored)}",
        "worst_missing_s": max(
            (row["missing_s"] for row in rows if row["missing_s"] is not None), default=None
        ),
        "left": sum(row["left"] for row in rows),
        "kept": kept or None,
    }
    return Result(bench="head-kills", figures=figures, broken=broken)


class _Round:
    def __init__(self, number: int) -> None:
        self.scene = Scene()
        self.broken: list[str] = []
        self.row: dict[str, Any] = {**dict.fromkeys(_COLUMNS), "round": number}
        self._late_s = 0.0  # the longest that this process was kept from running while it waited

    def play(self, drawn: float, startup_s: float) -> float:
        """Kill the head and go on with its run.

        Return how long it took until the planned time began, if it had.
        """
        head = self.scene.run(*_ARGUMENTS)
        known_s, killed_at_unix_s = self._kill(
            head, drawn * (startup_s + _DURATION_S - _BEFORE_END_S)
        )
        left = self.scene.leftovers(_GRACE_S)
        self.row["left"] = len(left)
        self.broken += left
        folder = self.scene.newest_run()
        if folder is None:
            self.row["stage"] = "before its folder"
        else:
            self._judge(folder, killed_at_unix_s)
        return startup_s if known_s is None else known_s

    def _kill(self, head: subprocess.Popen[bytes], moment_s: float) -> tuple[float | None, float]:
        """Kill the head at its moment, or shortly before its planned end if that comes first.

        Return the seconds from its folder until its planned time began (`None`: it had not), and
        when it was killed.
        """
        while self.scene.newest_run() is None and head.poll() is None:
            time.sleep(_POLL_S)  # before that there is no run that could be shown
        began_s = last_s = looked_s = time.monotonic()
        counting_s: float | None = None
        while True:
            now_s = time.monotonic()
            self._late_s, last_s = max(self._late_s, now_s - last_s - _POLL_S), now_s
            over = counting_s is not None and now_s - counting_s >= _DURATION_S - _BEFORE_END_S
            if over or now_s - began_s >= moment_s or head.poll() is not None:
                break
            if now_s - looked_s > _LOOK_EVERY_S:
                looked_s = now_s
                self.scene.look()
                folder = self.scene.newest_run()
                if counting_s is None and folder is not None and _counts(folder):
                    counting_s = now_s
                last_s = time.monotonic()  # looking is this process's own doing
            time.sleep(_POLL_S)
        at_unix_s = time.time()
        head.kill()
        self.row["killed_after_s"] = time.monotonic() - began_s
        head.wait()
        return None if counting_s is None else counting_s - began_s, at_unix_s

    def _judge(self, folder: Path, killed_at_unix_s: float) -> None:
        (listed,) = list_runs(self.scene.runs)
        if listed.outcome == UNREADABLE:
            self.row["stage"] = "unreadable"
            self.broken.append(f"the store cannot be read: {listed.error}")
            return
        if listed.run is None:
            self.row["stage"] = "before its store"
            if (listed.outcome, listed.error) != ("interrupted", None):
                self.broken.append(
                    f"`runs` takes it for {listed.outcome} ({listed.error}), and it was interrupted"
                )
            code, said = self.scene.ended(self.scene.run("--resume", folder.name), _PATIENCE_S)
            self.row["resumed"] = code == 0
            if code != 2 or '"error":' not in said:
                self.broken.append(
                    f"resuming a run without a store gave exit code {code}: {said[:300]!r}"
                )
            return
        ledger = Ledger(self.scene.steps)
        before = ledger.look(folder)
        if before is None or not before.was_killed:
            self.broken += [f"its run is {listed.outcome}, not killed", *ledger.broken]
            return
        self.row["stage"] = "at work" if before.elapsed_s > 0 else "before its planned time"
        self.row["elapsed_s"] = before.elapsed_s
        self._judge_samples(folder, killed_at_unix_s)
        self._resume(ledger, before)

    def _judge_samples(self, folder: Path, killed_at_unix_s: float) -> None:
        """Demand that the last sample is no older than a second and what was already late."""
        sampled_at_s = sample_times(folder)
        if not sampled_at_s:
            return
        missing_s = killed_at_unix_s - sampled_at_s[-1]
        # A machine on which samples came late all along is not what is judged.
        usual_s = max(
            (after - before for before, after in itertools.pairwise(sampled_at_s)), default=0.0
        )
        allowed_s = max(_MISSING_S + _SLACK_S + max(0.0, self._late_s), usual_s + _SLACK_S)
        self.row["missing_s"], self.row["allowed_s"] = missing_s, allowed_s
        if missing_s > allowed_s:
            late = f"the last sample is {missing_s:.2f} s older than the kill"
            self.broken.append(f"{late}; allowed are {allowed_s:.2f} s")

    def _resume(self, ledger: Ledger, before: StoredRun) -> None:
        code, said = self.scene.ended(self.scene.run("--resume", before.facts.run_id), _PATIENCE_S)
        self.row["resumed"] = code == 0
        left = self.scene.leftovers(_GRACE_S)
        self.row["left"] += len(left)
        self.broken += [f"after going on: {sentence}" for sentence in left]
        after = ledger.look(before.folder)
        if code != 0 or after is None:
            self.broken += [f"going on gave exit code {code}: {said[-500:]}", *ledger.broken]
            return
        ledger.end(after)
        events = read_events(before.folder, ("run_started", "counting", "resumed"))
        starts = [index for index, event in enumerate(events) if event.event == "run_started"]
        of_second_head = (
            events[starts[-1] :] if starts else ()
        )  # the first may have been killed before it wrote one
        self.broken += ledger.broken
        self.broken += _run_broken(before, after, json.loads(said), of_second_head)
        self.broken += _slots_broken(before, after, of_second_head)
        self.row["learned"] = sum(
            bool(slot.resume and slot.resume["failures"]) for slot in before.slots
        )


def _counts(folder: Path) -> bool:
    path = folder / "events.jsonl"
    return path.exists() and '"event":"counting"' in path.read_text(encoding="utf-8")


def _run_broken(
    before: StoredRun, after: StoredRun, summary: Mapping[str, Any], events: Sequence[StoredEvent]
) -> list[str]:
    """Demand that the second head planned and worked what the first has left."""
    took_s, remained_s = summary["duration_s"], before.remaining_s
    planned_s = [event.details["duration_s"] for event in events if event.event == "counting"]
    return amiss(
        {
            f"{after.heads} heads worked {took_s:.2f} s in all, not {_DURATION_S:g}": (
                abs(took_s - _DURATION_S) <= 1e-6 and after.heads == before.heads + 1
            ),
            f"the second head planned {planned_s} s, and {remained_s} s remained": (
                len(planned_s) == 1 and abs(planned_s[0] - remained_s) <= 1e-6
            ),
        }
    )


def _slots_broken(before: StoredRun, after: StoredRun, events: Sequence[StoredEvent]) -> list[str]:
    """Demand that losses are counted, and that each slot's first process began from the stored
    state of the policy.
    """
    known = {slot.slot: slot for slot in after.slots}
    resumed = {event.slot: event.details for event in reversed(events) if event.event == "resumed"}
    found = []
    for slot in before.slots:
        now = known[slot.slot]
        lost = slot.counters["steps_lost_upper_bound"] + slot.steps_at_risk
        holds: dict[str, object] = {
            "what was at risk is not counted as lost": now.counters["steps_lost_upper_bound"]
            >= lost,
            f"incarnation {now.incarnation} after {slot.incarnation}": now.incarnation
            > slot.incarnation,
        }
        if slot.resume is not None:
            told = resumed.get(slot.slot)
            took = None if told is None else {key: told.get(key) for key in slot.resume}
            size, had = now.row.get("size"), slot.row.get("size")
            holds[f"went on from {took}, and {dict(slot.resume)} was stored"] = took == dict(
                slot.resume
            )
            holds[f"size {size} after it had learned {had}"] = (
                size is None or had is None or size <= had
            )
        found += amiss(holds, f"{slot.slot}: ")
    return found
