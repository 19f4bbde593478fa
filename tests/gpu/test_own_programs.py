"""Users' programs on a card: a script under a cap, a command as a slot, a Hugging Face folder, and
a queue of jobs.

    python -m pytest tests/gpu/test_own_programs.py

The folders need transformers and tokenizers; the queue needs Ray. Tests without them are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.command.scenes import Slot, command_spec
from tests.gpu.scene import ON_A_CARD
from tests.scene import COMMAND, MIB, ROOT, python
from workers.messages import Cause, WorkerState
from workers.training.batches import part_of
from workers.training.memory_plan import MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
from workers.units import GIB

pytestmark = ON_A_CARD

Found = dict[str, Any]

#: Allocates blocks of 64 MiB until torch refuses one; prints their number and the card.
FILLS = """
import os
{own}
import torch
x = torch.ones(1, device="cuda")
held, refused = [], None
while refused is None:
    try:
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        refused = error
print(len(held), torch.cuda.current_device(), flush=True)
raise refused
"""

#: Holds 512 MiB of the card in a child process, and computes until it is ended.
COMPUTES = """
import os, torch
os.fork()
x = torch.ones((8192, 8192), device="cuda")
y = torch.empty_like(x)
print("computes", flush=True)
while True:
    torch.mm(x, x, out=y)
"""


# --- a script under a cap


@pytest.mark.parametrize(
    ("own", "environment"),
    [
        ("", {}),
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'max_split_size_mb:512'", {}),
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    ],
    ids=["as it is", "expandable segments", "sets the variable itself", "cudaMallocAsync"],
)
def test_a_script_fails_inside_itself_at_the_cap(own: str, environment: dict[str, str]) -> None:
    code = FILLS.format(own=own)
    done = python("-m", "workers.capped", "--gib", "1", "-c", code, cwd=ROOT, **environment)
    blocks, card = map(int, done.stdout.split())
    assert (done.returncode, card) == (1, 0)
    assert 13 <= blocks <= 16, "of 1 GiB, less what the first tensors took"
    assert "out of memory" in done.stderr.lower()
    assert "ran out of memory; its cap is 1 GiB of memory on each card" in done.stderr


# --- a command


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path / "state"))


def test_a_command_is_measured_and_ends_while_it_computes() -> None:
    slot = Slot(replace(command_spec("-c", COMPUTES), device="cuda"))
    until_s = time.monotonic() + 120.0
    while "computes" not in slot.printed and time.monotonic() < until_s:
        report = slot.poll()
    report = slot.poll(3.0)
    assert report.state is WorkerState.RUNNING
    assert report.device.name == torch.cuda.get_device_name(0)
    slot.rest()
    if not report.memory.peak_bytes:
        pytest.skip("this driver does not tell what a process holds (WSL2, containers)")
    assert 512 * MIB <= report.memory.peak_bytes <= 4 * GIB


def test_a_command_that_fills_its_cap_has_the_right_cause() -> None:
    spec = replace(command_spec("-c", FILLS.format(own=""), cap=True), device="cuda")
    slot = Slot(spec)
    report = slot.end()
    assert slot.details("program_started")["cap_bytes"] < 2 * GIB
    assert report.ended.cause is Cause.OUT_OF_MEMORY, slot.printed


# --- a folder of Hugging Face


def trained(folder: str, data: str, keys: Found) -> Found:
    """Train two steps in parts of two samples; return results and costs."""
    usual: Found = {"model": folder, "data": data, "batch": 4, "steps": 2, "seq": 512}
    settings = TrainSettings(**(usual | keys))
    task, device = find_task(settings, 0), torch.device("cuda")
    plan = MemoryPlanner(task, settings, on_card=True, with_data=True).plan(2, 0)
    run = Trainer(task, settings, device, 0)
    flop, ran = run.operations()
    counter = FlopCounterMode(display=False)
    # Plain products, which torch itself counts.
    with sdpa_kernel(SDPBackend.MATH), counter:
        one = run._current_batch()
        loss = one.value(part_of(one.batch, 0, 1), 0, 1)
        run.sums.backward(loss, 1.0, lambda *_: None)
    peaks = []
    while not run.finished:
        torch.cuda.reset_peak_memory_stats()
        run.micro_batch(2)
        peaks.append(torch.cuda.max_memory_allocated())
    left = {name for name, each in run.model.named_buffers() if each.device.type != "cuda"}
    return {
        "ran": ran,
        "flop": flop * (1.0 if task.shorten is None else run.items_per_sample),
        "plain_flop": counter.get_total_flops(),
        "losses": run.course.losses,
        "figures": run.evaluate(),
        "peak_bytes": max(peaks[2:]),
        "planned_bytes": plan.total_bytes,
        "left_on_host": left,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers", exc_type=ImportError)
    from tests.hf.folders import make_folder

    place = tmp_path_factory.mktemp("folders")
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    decoder = {**wide, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
    bert = {**wide, "max_position_embeddings": 512}
    made = {
        "llama": make_folder(place / "llama", "llama", num_hidden_layers=4, **decoder),
        "bert": make_folder(
            place / "bert", "bert", head="SequenceClassification", num_hidden_layers=4, **bert
        ),
        "text": place / "text.txt",
        "pairs": place / "pairs.jsonl",
    }
    made["text"].write_text("And so it goes, on and on, again and again. " * 2000)
    rows = [{"text": f"number {n} " * 200, "label": n % 2} for n in range(200)]
    made["pairs"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.mark.parametrize(
    ("model", "keys", "kernel"),
    [
        ("llama", {}, "flash"),
        ("llama", {"precision": "fp32"}, "efficient"),
        ("llama", {"adapter": "dora"}, "flash"),
        ("bert", {}, "efficient"),
    ],
    ids=["causal", "causal in fp32", "causal with DoRA", "pairs"],
)
def test_a_folder_trains_as_planned(
    in_child: Callable[..., Any], folders: dict[str, Path], model: str, keys: Found, kernel: str
) -> None:
    preset, data = ("hf-pairs", "pairs") if model == "bert" else ("hf-causal", "text")
    if kernel == "flash" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash needs an Ampere card or a later one")
    given = (str(folders[model]), str(folders[data]))
    found = in_child(trained, *given, {"preset": preset, "validation": given[1], **keys})
    if torch.cuda.get_device_capability()[0] in {9, 10} and keys.get("precision") != "fp32":
        kernel = "cudnn"  # torch prefers it there
    assert found["ran"] == kernel
    assert found["left_on_host"] == set()
    assert found["planned_bytes"] == pytest.approx(found["peak_bytes"], rel=0.15)
    assert found["flop"] == pytest.approx(found["plain_flop"], rel=0.01)
    assert found["losses"][0] > 0.0
    assert found["figures"]["validation_loss"] > 0.0


# --- a queue of jobs

TRAIN: Found = {"preset": "gpt-nano", "steps": 30}
HELD = "import torch; torch.ones(64 << 20, device='cuda'); print(torch.cuda.get_device_name())"


def night(folder: Path, *where: str) -> list[Found]:
    """Run a queue with a training and a command on this machine; return the events of the run."""
    jobs = [
        {"name": "one", "train": TRAIN},
        {"name": "two", "command": [sys.executable, "-c", HELD], "after": ["one"]},
    ]
    (folder / "night.yaml").write_text(json.dumps({"jobs": jobs}))
    words = ["jobs", "run", str(folder / "night.yaml"), "--plain", *where]
    done = subprocess.run(
        [*COMMAND, *words, "--run-dir", str(folder / "runs")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (log,) = (folder / "runs").glob("2*/events.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_queue_is_worked_off_and_a_training_has_the_whole_card(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    events = night(tmp_path, "--local")
    of = {each["event"]: each for each in reversed(events)}
    opened = of["device_opened"]
    assert opened["device"] == torch.cuda.get_device_name(0)
    shares_bytes = of["job_attempt_begun"]["budget_bytes"]
    held_bytes = opened["cap_bytes"] + opened["context_bytes"]
    assert held_bytes == pytest.approx(shares_bytes, rel=0.01), "all shares, less one context"
    assert shares_bytes > 0.5 * torch.cuda.get_device_properties(0).total_memory
    ended = [each["job"] for each in events if each["event"] == "job_attempt_ended"]
    assert ended == ["one", "two"]
