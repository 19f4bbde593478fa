"""Compares training a model folder with the preset `hf-causal` in the real engine and with
transformers' Trainer.

Memory is plentiful, so both sides run whole batches. They take short turns in processes that stay
alive, so that the load of other programs slows both sides alike.

CPU only, one thread, fp32, models made from a config. Does not compare the learned weights, and
sets no cap (`pressure.py`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benches.common import (
    PATIENCE_S,
    ROOT,
    Child,
    Result,
    in_turn,
    lone_worker,
    progress,
    run_turn,
    told_by,
)
from workers.units import MIB

BATCH, SEQ = 16, 64
#: Samples a second, as a share of the Trainer's.
_TARGET = 0.97
#: Configurations of GPT-2 models with 0.1 and 25.4 million parameters.
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "25m": {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 128},
}
_SPARE_BYTES = 6 * 1024 * MIB
_TURN_S = 0.5


def run(rounds: int, seconds: float, models: Sequence[str]) -> Result:
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # so that freed memory returns to the system
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            told_by("maker", _make, Path(folder, name), SIZES[name], within_s=PATIENCE_S)
        spare = [_spared(str(Path(folder, name)), rounds, seconds) for name in models]
    figures = {
        "load": os.getloadavg()[0], "spare": spare, "target": _TARGET,
        "target_met": all(row["ratio"] >= _TARGET for row in spare),
    }  # fmt: skip
    return Result(bench="own", figures=figures)


def _make(connection: Connection, path: Path, sizes: Mapping[str, Any]) -> None:
    from tests.hf.folders import make_folder

    make_folder(path, "gpt2", **sizes)
    connection.send("made")


def _keys(folder: str) -> dict[str, Any]:
    return {
        "preset": "hf-causal", "model": folder, "data": str(ROOT / "docs" / "training.md"),
        "batch": BATCH, "seq": SEQ, "precision": "fp32", "steps": 1_000_000,
    }  # fmt: skip


def _spared(folder: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Return samples a second of each side, and their ratios by wall and by processor time."""
    sides = {
        "ours": partial(Child, "ours", _ours_in_turns, folder),
        "theirs": partial(Child, "theirs", _theirs_in_turns, folder),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with contextlib.ExitStack() as stack:
        children = {}
        for name, start in sides.items():
            children[name] = stack.enter_context(contextlib.closing(start()))
        for child in children.values():
            child.receive(PATIENCE_S)

        def turn(name: str) -> tuple[float, float]:
            children[name].send(seconds)
            samples, wall_s, cpu_s = children[name].receive(PATIENCE_S)
            return samples / wall_s, samples / cpu_s

        turns = {name: partial(turn, name) for name in sides}
        for number in range(rounds):
            for name, speeds in in_turn(number, turns).items():
                found[name].append(speeds)
            speeds_text = ", ".join(f"{name} {found[name][-1][0]:.1f}/s" for name in sides)
            progress(f"{Path(folder).name} {number + 1}/{rounds}: {speeds_text}")
    row: dict[str, Any] = {"model": Path(folder).name, "rounds": rounds}
    row |= {f"{name}_per_s": statistics.median(each[0] for each in found[name]) for name in sides}
    for place, key in enumerate(("ratio", "ratio_cpu")):
        pairs = zip(found["ours"], found["theirs"], strict=True)
        ratios = [ours[place] / theirs[place] for ours, theirs in pairs]
        row |= {key: statistics.median(ratios), f"{key}_least": min(ratios)}
        row[f"{key}_most"] = max(ratios)
    return row


class _Ours:
    """A training in the real engine."""

    def __init__(self, folder: str) -> None:
        from workers.engine.engine import Engine
        from workers.messages import Begin
        from workers.workloads.train import Train

        Train.prepare(_keys(folder))
        _warmed_up(folder)
        usual = lone_worker(budget_bytes=_SPARE_BYTES, name="train", size=1024, floor_bytes=MIB)
        workload = replace(usual.workload, settings=_keys(folder))
        here: dict[str, Any] = {"workload": workload, "workers_on_host": os.cpu_count() or 1}
        self._engine = Engine(replace(usual, policy="adaptive", **here), Begin(fresh=True))
        self.batch: int | None = None
        self.step = 0

    def turn(self, seconds: float) -> None:
        from workers.messages import Verdict

        status = run_turn(self._engine, seconds)
        if status.verdict is not Verdict.OK and status.error:
            raise RuntimeError(status.error)
        self.batch = status.batch
        self.step = status.progress.train_step or 0 if status.progress else self.step


def _warmed_up(folder: str) -> None:
    """Run a few steps, so that libraries allocate their lasting buffers before the measurement."""
    import torch

    from workers.training.settings import TrainSettings
    from workers.training.tasks import find_task
    from workers.training.trainer import Trainer

    torch.set_num_threads(1)
    settings = TrainSettings(**_keys(folder))
    own = Trainer(find_task(settings, 0), settings, torch.device("cpu"), 0)
    for limit in (BATCH, 5, 1):
        while not own.micro_batch(limit).updated:
            pass
    own.close()
    del own
    gc.collect()


def _ours_in_turns(connection: Connection, folder: str) -> None:
    ours = _Ours(folder)
    while ours.batch != BATCH or ours.step < 5:
        ours.turn(_TURN_S)
    connection.send("ready")
    while True:
        seconds = connection.recv()
        began_s, cpu_s, step = time.monotonic(), time.process_time(), ours.step
        ours.turn(seconds)
        spent_s, cpu_spent_s = time.monotonic() - began_s, time.process_time() - cpu_s
        connection.send(((ours.step - step) * BATCH, spent_s, cpu_spent_s))


def _trainer(folder: str, callback: Any) -> Any:  # noqa: ANN401 - imported late
    """Make a Trainer as its documentation does, on the same samples in the Trainer's order."""
    import torch

    from workers.hf.folder import transformers
    from workers.training.settings import TrainSettings
    from workers.training.tasks import find_task

    library = transformers()
    torch.set_num_threads(1)
    task = find_task(TrainSettings(**_keys(folder)), 0)
    windows = [task.dataset[index][0] for index in range(len(task.dataset) - 1)]  # last is short
    known = [windows[index % len(windows)] for index in range(512)]

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens = torch.stack(samples)
        return {"input_ids": tokens, "labels": tokens}

    usual: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": BATCH, "use_cpu": True,
        "logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "weight_decay": 0.1, "dataloader_pin_memory": False, "remove_unused_columns": False,
        "max_steps": 1_000_000,
    }  # fmt: skip
    return library.Trainer(
        model=task.model(), args=library.TrainingArguments(**usual),
        train_dataset=known, data_collator=collate, callbacks=[callback],
    )  # fmt: skip


def _theirs_in_turns(connection: Connection, folder: str) -> None:
    from workers.hf.folder import transformers

    class Turns(transformers().TrainerCallback):  # type: ignore[misc]  # imported late
        steps, until_s, began = -5, 0.0, (0.0, 0.0)  # five warm-up steps

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:  # noqa: ANN401
            self.steps += 1
            if self.steps < 0 or (self.steps and time.monotonic() < self.until_s):
                return
            try:
                now = time.monotonic() - self.began[0], time.process_time() - self.began[1]
                connection.send((self.steps * BATCH, *now) if self.steps else "ready")
                seconds = connection.recv()
            except (EOFError, OSError):
                control.should_training_stop = True
                return
            self.steps, self.began = 0, (time.monotonic(), time.process_time())
            self.until_s = self.began[0] + seconds

    _trainer(folder, Turns()).train()
