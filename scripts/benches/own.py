"""The model of a folder: the preset `hf-causal` in the real engine, beside transformers' Trainer.

With memory to spare all have one whole batch at once, and take short turns in processes that stay,
so that other programs on the machine meet all of them. `mapped` is the Trainer with the malloc that the
CPU device has near a cap: each block is mapped anew, so that the cap can count it.

Under a cap each has a process of its own, and the kernel refuses what goes past so much more than
the process held after a warm-up. There the Trainer's only way is `auto_find_batch_size`, which
gives up the batch: its samples count all the same. Caps lie evenly between what the Trainer needs
for a whole batch and for one sample, the ends left out. Starts, imports and the plan of memory are
not timed; tries that fail are.

CPU only, one thread, fp32, models made from a config. Does not compare what was learned.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
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
    judged,
    progress,
    run_turn,
    status_bytes,
    told_by,
    trainer_spec,
)
from benches.pressure_caps import least_that_fits, limited
from workers.units import MIB

BATCH, SEQ = 16, 64
#: Of a GPT-2: 0.1, 25.4 and 0.5 million parameters.
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "25m": {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 128},
    "capped": {"n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 128},
}
_SPARE_BYTES = 6 * 1024 * MIB
_RESOLUTION_BYTES = MIB // 4
_MOST_BYTES = 512 * MIB
#: A training under a cap that takes longer has not finished.
_LONGEST_S = 240.0
_TURN_S = 0.5


def run(rounds: int, seconds: float, models: Sequence[str], caps: int, steps: int) -> Result:
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # what is freed is really given back
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in SIZES.items():
            told_by("maker", _make, Path(folder, name), sizes, within_s=PATIENCE_S)
        spare = [_spared(str(Path(folder, name)), rounds, seconds) for name in models]
        capped = _capped(str(Path(folder, "capped")), caps, steps)
    ratios = [row["ratio"] for row in capped if row["ratio"]]
    mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None
    targets = [
        judged(f"samples/s to the Trainer's, {row['model']}", row["ratio"], at_least=0.97)
        for row in spare
    ]
    finished = sum(row["ours_per_s"] > 0 for row in capped)
    targets += [
        judged("useful samples/s where both finish, geometric mean", mean, at_least=1.2),
        judged("trainings that finish", finished, at_least=caps),
    ]
    figures = {"load": os.getloadavg()[0], "spare": spare, "capped": capped, "targets": targets}
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
    """Return samples a second of each side, and ratios by the clock and by processor time."""
    sides = {
        "ours": partial(Child, "ours", _ours_in_turns, folder),
        "theirs": partial(Child, "theirs", _theirs_in_turns, folder),
        "mapped": partial(Child, "mapped", _theirs_in_turns, folder, True),
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
            told = ", ".join(f"{name} {found[name][-1][0]:.1f}/s" for name in sides)
            progress(f"{Path(folder).name} {number + 1}/{rounds}: {told}")
    row: dict[str, Any] = {"model": Path(folder).name, "rounds": rounds}
    row |= {f"{name}_per_s": statistics.median(each[0] for each in found[name]) for name in sides}
    for name, other in (("ratio", "theirs"), ("to_mapped", "mapped")):
        for place, key in enumerate((name, f"{name}_cpu")):
            pairs = zip(found["ours"], found[other], strict=True)
            ratios = [ours[place] / theirs[place] for ours, theirs in pairs]
            row |= {key: statistics.median(ratios), f"{key}_least": min(ratios)}
            row[f"{key}_most"] = max(ratios)
    return row


def count_every_tensor() -> None:
    """Give each tensor a mapping of its own, so that the cap counts it as a card's does.

    The CPU device leaves room on the heap for what other threads need (`workers/devices/cpu.py`),
    and a small part of this job would fit into it as a whole.
    """
    from workers.devices import cpu

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(cpu._M_MMAP_THRESHOLD, mmap.PAGESIZE)
    for _ in range(cpu._STOCK_CHUNKS):
        libc.malloc(cpu._STOCK_CHUNK_BYTES)


class _Ours:
    """A training in the real engine, under a cap."""

    def __init__(self, folder: str, cap_bytes: int) -> None:
        from typing import cast

        from workers.devices import cpu
        from workers.engine import engine, session
        from workers.messages import Begin
        from workers.workloads.train import Train

        class Capped(cpu.CpuDevice):
            """The cap does not hold what the device itself took."""

            def __init__(self, spec: Any) -> None:  # noqa: ANN401 - a WorkerSpec
                super().__init__(spec)
                if cap_bytes < _SPARE_BYTES:
                    count_every_tensor()  # it takes time, so with memory to spare neither does
                self.most_bytes -= self._cap_bytes - cap_bytes
                self._cap_bytes = cap_bytes
                self.info = replace(self.info, cap_bytes=cap_bytes)

        cast("Any", session).open_device = Capped
        Train.prepare(_keys(folder))
        _warmed_up(folder)
        self._engine = engine.Engine(
            trainer_spec(cap_bytes + 64 * MIB, _keys(folder), floor_bytes=MIB), Begin(fresh=True)
        )
        self.batch: int | None = None
        self.step = 0

    def turn(self, seconds: float) -> None:
        from workers.messages import Verdict

        told = run_turn(self._engine, seconds)
        if told.verdict is not Verdict.OK and told.error:
            raise RuntimeError(told.error)
        self.batch = told.batch
        self.step = told.progress.train_step or 0 if told.progress else self.step


def _warmed_up(folder: str) -> None:
    """Let libraries take what they keep, before anything is counted."""
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
    ours = _Ours(folder, _SPARE_BYTES)
    while ours.batch != BATCH or ours.step < 5:
        ours.turn(_TURN_S)
    connection.send("ready")
    while True:
        seconds = connection.recv()
        began_s, cpu_s, step = time.monotonic(), time.process_time(), ours.step
        ours.turn(seconds)
        spent_s, cpu_spent_s = time.monotonic() - began_s, time.process_time() - cpu_s
        connection.send(((ours.step - step) * BATCH, spent_s, cpu_spent_s))


def _trainer(folder: str, items: int | None, callbacks: Sequence[Any], **arguments: Any) -> Any:  # noqa: ANN401 - transformers is imported late
    """Make a Trainer as its documentation does, on the same samples in its own order."""
    import torch

    from workers.hf.folder import transformers
    from workers.training.settings import TrainSettings
    from workers.training.tasks import find_task

    library = transformers()
    torch.set_num_threads(1)
    task = find_task(TrainSettings(**_keys(folder)), 0)
    windows = [task.dataset[index][0] for index in range(len(task.dataset) - 1)]  # but a short one
    known = [windows[index % len(windows)] for index in range(items or 512)]

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens = torch.stack(samples)
        return {"input_ids": tokens, "labels": tokens}

    usual: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": BATCH, "use_cpu": True,
        "logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "weight_decay": 0.1, "dataloader_pin_memory": False, "remove_unused_columns": False,
    }  # fmt: skip
    return library.Trainer(
        model=task.model(), args=library.TrainingArguments(**(usual | arguments)),
        train_dataset=known, data_collator=collate, callbacks=list(callbacks),
    )  # fmt: skip


def _theirs_in_turns(connection: Connection, folder: str, mapped: bool = False) -> None:
    from workers.devices import cpu
    from workers.hf.folder import transformers

    if mapped:
        cpu._use_mappings_for_blocks()

    class Turns(transformers().TrainerCallback):  # type: ignore[misc]  # imported late
        steps, until_s, began = -5, 0.0, (0.0, 0.0)  # five to warm up

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

    _trainer(folder, None, [Turns()], max_steps=1_000_000).train()


def _capped(folder: str, caps: int, steps: int) -> list[dict[str, Any]]:
    """Train under each cap, a side after the other; return a row for each cap."""
    whole_bytes, one_bytes = told_by("peaks", _peaks, folder, within_s=4 * PATIENCE_S)
    progress(f"the Trainer needs {whole_bytes / MIB:.1f} MiB, for one {one_bytes / MIB:.1f}")
    rows = []
    for number in range(caps):
        cap_bytes = int(one_bytes + (number + 0.5) / caps * (whole_bytes - one_bytes))
        bodies = {"ours": _ours_capped, "theirs": _theirs_capped}
        sides = {
            name: partial(_turn, name, body, folder, cap_bytes, steps)
            for name, body in bodies.items()
        }
        told = in_turn(number, sides)
        (ours, ours_batch, ended), (theirs, theirs_batch, gave_up) = told["ours"], told["theirs"]
        rows.append(
            {
                "cap_mib": cap_bytes / MIB, "ours_per_s": ours, "theirs_per_s": theirs,
                "ratio": ours / theirs if ours and theirs else None,
                "ours_part": ours_batch, "theirs_batch": theirs_batch, "ended": ended or gave_up,
            }
        )  # fmt: skip
        progress(str(rows[-1]))
    return rows


def _turn(name: str, body: Any, *arguments: object) -> tuple[float, int | None, str]:  # noqa: ANN401 - a function
    """Return useful samples a second, the samples at once, and why it did not finish."""
    try:
        told: tuple[float, int | None, str] = told_by(
            name, body, *arguments, within_s=_LONGEST_S + PATIENCE_S
        )
    except Exception as error:  # noqa: BLE001 - one that ends is a finding
        return 0.0, None, f"{name}: {error}"
    return told


def _ours_capped(connection: Connection, folder: str, cap_bytes: int, steps: int) -> None:
    ours = _Ours(folder, cap_bytes)
    ours.turn(0.0)  # plans
    began_s, first, spent_s = time.monotonic(), ours.step, 0.0
    while ours.step - first < steps and spent_s < _LONGEST_S:
        ours.turn(_TURN_S)
        spent_s = time.monotonic() - began_s
    done = ours.step - first
    speed = done * BATCH / spent_s if done >= steps else 0.0
    connection.send((speed, ours.batch, "" if speed else f"ours did {done} of {steps} steps"))


def _theirs_capped(connection: Connection, folder: str, cap_bytes: int, steps: int) -> None:
    base_bytes = _ready(folder)
    ended, batch, items = "", None, steps * BATCH
    trainer = _trainer(folder, items, [], num_train_epochs=1, auto_find_batch_size=True)
    began_s = time.monotonic()
    try:
        with limited(base_bytes + cap_bytes):
            trainer.train()
        batch = trainer._train_batch_size
    except Exception as error:  # noqa: BLE001 - one that gives up is a finding
        ended = f"theirs: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    spent_s = time.monotonic() - began_s
    connection.send((0.0 if ended else items / spent_s, batch, ended))


def _ready(folder: str) -> int:
    """Warm a process up; return the bytes that it holds then."""
    count_every_tensor()
    for rows in (BATCH, 5, 1):
        _trainer(folder, BATCH, [], max_steps=2, per_device_train_batch_size=rows).train()
    gc.collect()
    gc.freeze()
    return status_bytes("VmData")


def _peaks(connection: Connection, folder: str) -> None:
    """Tell the least caps that two steps of the Trainer fit into, of a batch and of one sample."""
    base_bytes = _ready(folder)

    def least(rows: int) -> int:
        fits = partial(_fits, folder, rows, base_bytes)
        return least_that_fits(fits, _MOST_BYTES, _RESOLUTION_BYTES)

    connection.send([least(rows) for rows in (BATCH, 1)])


def _fits(folder: str, rows: int, base_bytes: int, more_bytes: int) -> bool:
    trainer = _trainer(folder, BATCH, [], max_steps=2, per_device_train_batch_size=rows)
    failure: Exception | None = None
    if status_bytes("VmData") > base_bytes + more_bytes:
        return False
    with limited(base_bytes + more_bytes):
        try:
            trainer.train()
        except Exception as error:  # noqa: BLE001 - looked at where there is memory again
            failure = error
    if failure is not None:
        from workers import oom
        from workers.settings import FailureKind

        if oom.classify(failure).kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
            raise failure
    fits = failure is None
    del trainer, failure
    gc.collect()
    return fits
