"""Trainings whose workers, head and node are killed at random moments: the same weights, and how
much was done again.

Three runs of the real command with three small trainings in two raylets. The first is left alone.
In the second, workers meet SIGKILL one after the other, and the head a few times, each time
followed by `run --resume`. In the third, a node is ended as by a power cut and comes back. All
three must end with the same SHA-256 of all weights, slot by slot, and leave no process and no
temporary file. Memory moves nothing here (`train.exact`).

Work that a kill costs is told in seconds: from the newest checkpoint to the kill, or from the moment
when the process was ready for its first step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil

from benches.common import Result, amiss, progress
from benches.outside import Scene
from orchestrator.record.archive import read_events

_STATE = "ORCHESTRATOR_STATE_DIR"
_PATIENCE_S = 900.0
_GRACE_S = 10.0
_BATCH, _MICRO = 16, 8


def run(
    steps: int, kills: int, head_kills: int, node_losses: int, save_every_s: float, seed: int
) -> Result:
    course = _Course(steps, save_every_s)
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    broken: list[str] = []
    scenes = {name: Scene() for name in ("alone", "killed", "lost")}
    figures: dict[str, Any] = {}
    try:
        expected = _weights(course.end(scenes["alone"], course.start(scenes["alone"]), broken))
        killed = _Killing(scenes["killed"], course, chance)
        found = {"killed": killed.play(kills, head_kills, broken)}
        if node_losses:
            moments = [f"node:pc2@{15 + 25 * number}s+5s" for number in range(node_losses)]
            scene = scenes["lost"]
            found["lost"] = course.end(
                scene, course.start(scene, "--chaos", ";".join(moments)), broken
            )
            folder = scene.newest_run()
            lost = 0 if folder is None else len(list(read_events(folder, ("chaos_node_ended",))))
            figures["nodes_lost"] = lost
            sentence = f"{lost} node losses happened before all was done, {node_losses} were wanted"
            broken += [sentence] * (lost != node_losses)
        is_equal = {name: _weights(rows) == expected for name, rows in found.items()}
        broken += amiss(is_equal, "other weights than those of the run that was left alone: ")
        for name, scene in scenes.items():
            left = (scene.folder / "state").rglob("*.pt.*")
            broken += [f"{name}: {path} was left" for path in left]
        redone = {
            name: sum(row["redone_steps"] or 0 for row in rows) for name, rows in found.items()
        }
        figures |= {
            "steps": steps, "slots": len(expected), "weights_equal": is_equal,
            **killed.figures(save_every_s),
            "restarts": sum(row["restarts"] for row in found["killed"]),
            "redone_steps": redone, "rounds": killed.rows,
        }  # fmt: skip
    finally:
        kept = [scene.close(keep=bool(broken)) for scene in scenes.values()]
        figures["kept"] = [folder for folder in kept if folder] or None
    return Result(bench="train-kills", figures=figures, broken=broken)


def _weights(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {row["slot"]: row["weights_sha256"] for row in rows}


class _Course:
    def __init__(self, steps: int, save_every_s: float) -> None:
        keys = {
            "nodes.pc1.workers": 2, "nodes.pc2.workers": 1, "train.exact": "true",
            "train.micro": _MICRO, "train.batch": _BATCH, "train.seq": 32, "train.dropout": 0.1,
            "train.ema_decay": 0.99, "train.steps": steps, "train.save_every_s": save_every_s,
            "compute_share_mode": "none", "run.death_window_s": 1, "run.min_success_rate": 0,
        }  # fmt: skip
        self._arguments = (
            *("--rehearse", "--duration", "3h", "--workload", "train"),
            *(word for key, value in keys.items() for word in ("--set", f"{key}={value}")),
        )

    def start(self, scene: Scene, *more: str) -> Any:  # noqa: ANN401 - a process
        os.environ[_STATE] = str(scene.folder / "state")
        return scene.run(*self._arguments, *more)

    def resume(self, scene: Scene, run_id: str) -> Any:  # noqa: ANN401 - a process
        os.environ[_STATE] = str(scene.folder / "state")
        return scene.run("--resume", run_id)

    def end(self, scene: Scene, head: Any, broken: list[str]) -> list[dict[str, Any]]:  # noqa: ANN401 - a process
        """Wait for the end of a run, demand that it is clean, and return the rows of its summary."""
        code, said = scene.ended(head, _PATIENCE_S)
        if code not in {0, 1}:
            broken.append(f"exit code {code}: {said[-500:]}")
        broken += scene.leftovers(_GRACE_S)
        rows: list[dict[str, Any]] = json.loads(said)["workers"] if code in {0, 1} else []
        broken += [
            f"{row['slot']} ended {row['state']}: {row['reason']}"
            for row in rows
            if row["state"] != "DONE"
        ]
        return rows


class _Killing:
    """The run whose workers and head are killed."""

    def __init__(self, scene: Scene, course: _Course, chance: random.Random) -> None:
        self._scene, self._course, self._chance = scene, course, chance
        self.rows: list[dict[str, Any]] = []

    def play(self, kills: int, head_kills: int, broken: list[str]) -> list[dict[str, Any]]:
        heads_at = {round((number + 1) * kills / (head_kills + 1)) for number in range(head_kills)}
        head = self._course.start(self._scene)
        for number in range(1, kills + 1):
            if not self._kill_a_worker(number, head):
                broken.append(
                    f"all was done after {number - 1} of {kills} kills; let it train for more steps"
                )
                break
            if number in heads_at:
                time.sleep(self._chance.uniform(0.0, 4.0))
                head = self._kill_the_head(head, broken)
        return self._course.end(self._scene, head, broken)

    def _kill_a_worker(self, number: int, head: Any) -> bool:  # noqa: ANN401 - a process
        """Kill a worker at a random moment after it has told of itself.

        Say whether there was one.
        """
        killed = {row["pid"] for row in self.rows}
        deadline_s = time.monotonic() + _PATIENCE_S
        while head.poll() is None and time.monotonic() < deadline_s:
            self._scene.look()
            opened = self._opened().items()
            alive = [
                (slot, *told)
                for slot, told in opened
                if told[0] not in killed and psutil.pid_exists(told[0])
            ]
            if alive:
                time.sleep(self._chance.uniform(0.0, 3.0))
                slot, pid, ready_at_unix_s = self._chance.choice(alive)
                unsaved_s = self._unsaved_s(slot, ready_at_unix_s)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.rows.append({"kill": number, "slot": slot, "pid": pid, "unsaved_s": unsaved_s})
                progress(f"{number}  {slot}, {unsaved_s:.2f} s unsaved")
                return True
            time.sleep(0.2)
        return False

    def _kill_the_head(self, head: Any, broken: list[str]) -> Any:  # noqa: ANN401 - processes
        head.kill()
        head.wait()
        left = self._scene.leftovers(_GRACE_S)
        broken += [f"after the head's kill: {sentence}" for sentence in left]
        folder = self._scene.newest_run()
        if folder is None:
            raise RuntimeError("the killed head has left no run")
        self.rows.append({"kill": None, "slot": "head", "pid": head.pid, "unsaved_s": None})
        progress("the head")
        return self._course.resume(self._scene, folder.name)

    def _opened(self) -> dict[str, tuple[int, float]]:
        """Slot -> its newest process, and when it was ready for its first step (Unix seconds)."""
        folder = self._scene.newest_run()
        if folder is None or not (folder / "events.jsonl").exists():
            return {}
        opened = [(e.slot, e.details) for e in read_events(folder, ("device_opened",))]
        return {str(s): (int(d["pid"]), float(d["worker_at_unix_s"])) for s, d in opened}

    def _unsaved_s(self, slot: str, ready_at_unix_s: float) -> float:
        """Return the time since the newest checkpoint, or since the process was ready if later."""
        files = (self._scene.folder / "state").rglob(f"{slot}/generation-?.pt")
        return time.time() - max([ready_at_unix_s, *(path.stat().st_mtime for path in files)])

    def figures(self, save_every_s: float) -> dict[str, Any]:
        unsaved = [row["unsaved_s"] for row in self.rows if row["unsaved_s"] is not None]
        if not unsaved:
            return {}
        heads = sum(row["slot"] == "head" for row in self.rows)
        return {
            "kills": len(self.rows) - heads, "head_kills": heads, "save_every_s": save_every_s,
            "unsaved_median_s": statistics.median(unsaved), "unsaved_most_s": max(unsaved),
            "target": save_every_s, "target_met": max(unsaved) <= save_every_s,
        }  # fmt: skip
