"""Runs the same trainings with the queue of jobs and with a shell loop, through an out-of-memory
error, a SIGKILL and a reboot.

Small trainings use two rehearsed cards, of 1.44 GiB and 0.28 GiB. The first two trainings allocate
0.7 GiB more after some steps, so that one of them runs out of memory. After a quarter of all steps
the training with the most steps is killed. After 55 % all processes are killed at once, and the
same command is started again. The result is the number of finished trainings, and their samples
divided by the time from the first start to the last end; a repeated step counts once.

`ours` is the queue; `loop` is one shell loop for each card.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benches.common import ROOT, Result, progress
from workers.keeper.processes import end_all, marked

_TRAIN = Path(__file__).with_name("jobs_peers_train.py")
_MARK = "JOBS_PEERS_MARK"
#: Memory of a job on pc1 and on pc2 in a rehearsal of cluster.yaml.
_ROOM_GIB = (1550214757 / 2**30, 301989888 / 2**30)
_BATCH, _KILL_AT, _REBOOT_AT, _LIMIT_S = 32, 0.25, 0.55, 420.0

_ON_CARD = """\
#!/bin/sh
# Runs one training under the cap of the card that it was given.
case "$CUDA_VISIBLE_DEVICES" in 0) gib={0:.6f} ;; *) gib={1:.6f} ;; esac
exec {python} -m workers.capped --gib $gib {train} "$@"
"""

_LOOP = """\
#!/bin/sh
# One loop for each card takes the next line that no loop has taken, and tries it three times.
rm -rf {folder}/taken; mkdir -p {folder}/done {folder}/taken
for card in 0 1; do
  (
    export CUDA_VISIBLE_DEVICES=$card
    while read -r name command; do
      [ -e {folder}/done/$name ] && continue
      mkdir {folder}/taken/$name 2>/dev/null || continue
      for try in 1 2 3; do $command < /dev/null && touch {folder}/done/$name && break; done
    done < {folder}/list.txt
  ) &
done
wait
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Night:
    folder: Path
    mark: str
    jobs: dict[str, list[str]]
    """Arguments of each training's program, keyed by the name of the training."""
    steps: int

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def lines(self, name: str) -> list[list[str]]:
        path = self.logs / f"{name}.log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def once(self) -> int:
        """Return the number of different steps that were done."""
        return sum(len({line[1] for line in self.lines(name)} - {"done"}) for name in self.jobs)

    def furthest(self) -> int | None:
        """Return the process with the most steps among the narrow trainings that write now."""
        found = []
        for name in self.jobs:
            lines = self.lines(name)
            path = self.logs / f"{name}.log"
            if not lines or lines[-1][1] == "done" or "wide" in name:
                continue
            is_writing = time.time() - path.stat().st_mtime < 1.5
            if is_writing and int(lines[-1][1]) >= 20:
                found.append((int(lines[-1][1]), int(lines[-1][0])))
        return max(found)[1] if found else None


def _ours(night: _Night) -> list[str]:
    jobs = [
        {"name": name, "command": [sys.executable, str(_TRAIN), *words], "retries": 3}
        for name, words in night.jobs.items()
    ]
    (night.folder / "night.yaml").write_text(yaml.safe_dump({"jobs": jobs}))
    return [
        sys.executable, "-m", "orchestrator", "jobs", "run", "night.yaml", "--rehearse", "--plain",
        "--config", str(ROOT / "cluster.yaml"), "--run-dir", str(night.folder / "runs"),
    ]  # fmt: skip


def _loop(night: _Night) -> list[str]:
    program, script = night.folder / "on_card", night.folder / "loop.sh"
    program.write_text(_ON_CARD.format(*_ROOM_GIB, python=sys.executable, train=_TRAIN))
    program.chmod(0o700)
    script.write_text(_LOOP.format(folder=night.folder))
    lines = [f"{name} {shlex.join([str(program), *words])}\n" for name, words in night.jobs.items()]
    (night.folder / "list.txt").write_text("".join(lines))
    return ["sh", str(script)]


def _course(name: str, night: _Night, command: list[str]) -> dict[str, Any]:
    env = os.environ | {_MARK: night.mark, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(ROOT)

    def begin() -> subprocess.Popen[bytes]:
        with (night.folder / "said.txt").open("ab") as said:
            return subprocess.Popen(
                command, cwd=night.folder, env=env, stdin=subprocess.DEVNULL, stdout=said,
                stderr=said, start_new_session=True,
            )  # fmt: skip

    load_1min, whole = os.getloadavg()[0], len(night.jobs) * night.steps
    began_s = time.monotonic()
    process, was_killed, was_rebooted = begin(), False, False
    while time.monotonic() - began_s < _LIMIT_S:
        time.sleep(0.3)
        share, has_ended = night.once() / whole, process.poll() is not None
        if has_ended and was_rebooted:
            break
        if not was_killed and share >= _KILL_AT and (pid := night.furthest()) is not None:
            os.kill(pid, signal.SIGKILL)
            was_killed = True
        if not was_rebooted and (has_ended or (was_killed and share >= _REBOOT_AT)):
            end_all(lambda: marked(_MARK, night.mark), 0.0)
            process, was_rebooted = begin(), True
    took_s = time.monotonic() - began_s
    end_all(lambda: marked(_MARK, night.mark), 0.0)

    lines = {each: night.lines(each) for each in night.jobs}
    finished = [each for each, of in lines.items() if of and of[-1][1] == "done"]
    made = sum(line[1] != "done" for of in lines.values() for line in of)
    row = {
        "queue": name,
        "finished": len(finished),
        "of": len(night.jobs),
        "useful_samples_per_s": round(len(finished) * night.steps * _BATCH / took_s, 1),
        "took_s": round(took_s, 1),
        "steps_done_twice": made - night.once(),
        "was_killed": was_killed,
        "was_rebooted": was_rebooted,
        "in_time": took_s < _LIMIT_S,
        "load_before": round(load_1min, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "unfinished": " ".join(each for each in night.jobs if each not in finished) or "-",
    }
    progress(str(row))
    return row


def run(contestants: Sequence[str], jobs: int, steps: int, rounds: int) -> Result:
    """Run the trainings with each contestant, one contestant after the other."""
    sides: dict[str, Callable[[_Night], list[str]]] = {"ours": _ours, "loop": _loop}
    rows = []
    for number in range(rounds):
        for name in reversed(contestants) if number % 2 else contestants:
            with tempfile.TemporaryDirectory(prefix="jobs-peers-") as place:
                names = [f"wide-{n}" if n < 2 else f"narrow-{n}" for n in range(jobs)]
                (Path(place) / "logs").mkdir()
                words = {
                    each: ["--name", each, "--steps", str(steps), "--log", f"{place}/logs"]
                    + ["--wide"] * ("wide" in each)
                    for each in names
                }
                mark = secrets.token_hex(8)
                night = _Night(folder=Path(place), mark=mark, jobs=words, steps=steps)
                rows.append(_course(name, night, sides[name](night)))
                said = (night.folder / "said.txt").read_text(errors="replace").splitlines()
                progress("\n".join(f"    {line[:160]}" for line in said[-6:]))
    broken = [
        f"{row['queue']} has finished {row['finished']} of {row['of']}"
        for row in rows
        if row["queue"] == "ours" and row["finished"] != row["of"]
    ]
    return Result(bench="jobs", figures={"rows": rows}, broken=broken)
