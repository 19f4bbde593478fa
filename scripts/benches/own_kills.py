"""A training of a folder under SIGKILL and injected out-of-memory: the same weights to the bit.

    python -m scripts.benches.own_kills [KILLS] [FAULTS] [FAMILY …]      # a line of JSON for each

Each process runs the engine with the workload `train` as a worker does. It is killed at a random
moment after its first step, and the next one goes on from the checkpoint. `train.exact` is set, and
`train.micro` a number.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.engine.scene import slice_of, with_ooms
from tests.scene import MIB, spec_of
from workers.engine.engine import Engine
from workers.messages import Verdict

from .own_parity import settings_of

STEPS = 60


def worker(settings: dict[str, Any], faults: int, incarnation: int) -> None:
    """Run slices until all is done; tell the step after each, and the hash at the end."""
    spec = spec_of(name="train", policy="adaptive", budget_bytes=240 * MIB)
    workload = replace(spec.workload, settings=settings)
    spec = replace(spec, run_id="r", workers_on_host=64, workload=workload)
    if faults:
        spec = with_ooms(spec, faults / (2 * STEPS))
    engine, sequence, ooms = Engine(spec), 0, 0
    while True:
        report = slice_of(engine, sequence, incarnation=incarnation)
        sequence += 1
        ooms += report.counts.steps_oom
        told = report.progress
        step = None if told is None else told.train_step
        sha = None if told is None else told.weights_sha256
        print(json.dumps({"step": step, "ooms": ooms, "sha256": sha}), flush=True)
        if report.verdict is not Verdict.OK:
            print(report.reason, file=sys.stderr)
            return


def course(settings: dict[str, Any], kills: int, faults: int, seed: int) -> dict[str, Any]:
    """Return how a training went with so many kills and faults."""
    draw, last = random.Random(seed), dict[str, Any]()  # noqa: S311 - no secret
    left, incarnation, ooms = kills, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while True:
            command = [
                sys.executable, "-m", "scripts.benches.own_kills", "worker",
                json.dumps(settings), str(faults), str(incarnation),
            ]  # fmt: skip
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL,
                env=os.environ | {"ORCHESTRATOR_STATE_DIR": folder},
            )  # fmt: skip
            assert process.stdout is not None  # noqa: S101 - a pipe
            to_kill = draw.randint(1, 2 + 2 * STEPS // max(1, kills)) if left else None
            last, lines = {}, 0
            for line in process.stdout:
                last, lines = json.loads(line), lines + 1
                if lines == to_kill:
                    time.sleep(draw.random() * 0.05)
                    process.send_signal(signal.SIGKILL)
                    break
            process.stdout.close()
            process.wait()
            ooms += last.get("ooms", 0)
            if process.returncode != -signal.SIGKILL:
                return {"kills": kills - left, "ooms": ooms, "sha256": last.get("sha256")}
            left, incarnation = left - 1, incarnation + 1
            print(f"killed in step {last.get('step')}, {left} left", file=sys.stderr)


def main() -> None:
    """Print a line for each preset."""
    if sys.argv[1:2] == ["worker"]:
        worker(json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    kills, faults = (int(number) for number in (*sys.argv[1:3], "20", "5")[:2])
    for family in sys.argv[3:] or ("gpt2", "bert"):
        with tempfile.TemporaryDirectory() as folder:
            keys: dict[str, Any] = settings_of(family, Path(folder), "none").model_dump()
            keys |= {"exact": True, "micro": 8, "steps": STEPS, "save_every_s": 0.001}
            alone, disturbed = course(keys, 0, 0, 1), course(keys, kills, faults, 1)
        same = alone["sha256"] is not None and alone["sha256"] == disturbed["sha256"]
        print(json.dumps({"preset": keys["preset"], "same": same, **disturbed}), flush=True)


if __name__ == "__main__":
    main()
