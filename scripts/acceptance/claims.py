"""What a desk check said of the card's side, one part a claim: a figure, and whether it holds.

Each part runs in a process of its own, and loads itself what a bare host may lack (pydantic). What
cannot be shown where it runs, such as on a CPU, is unproved: it tells its figure and counts neither
way. The parts keep the numbers of that check; four that no machine could refuse are gone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from benches.common import lone_worker

from acceptance.crew import in_child
from acceptance.machine import Machine
from acceptance.outcome import Outcome
from workers import oom
from workers.devices import open_device
from workers.engine.engine import Engine
from workers.messages import Directive, Report
from workers.nvml import queries
from workers.settings import FailureKind
from workers.units import GIB, MIB

_SHIPPED = Path(__file__).resolve().parents[2] / "cluster.yaml"
_CPU_PRESET, _CARD_PRESET = "gpt-nano", "gpt2-small"

#: A wait that spins takes a whole core.
_MOST_CORES = 0.5

#: What the caching allocator and small tensors add to a figure.
_SLACK = 1.05


class Given(NamedTuple):
    """What a part is given; it pickles."""

    device: str
    seconds: float
    budget_bytes: int

    @property
    def card(self) -> bool:
        return self.device == "cuda"

    def unproved(self) -> Outcome:
        """Return the outcome of what only a card shows."""
        return Outcome(figures={"cards": 0}, skipped="unproved: it needs a card")

    def trainer(self, **levers: Any) -> Any:  # noqa: ANN401 - fields of TrainSettings; a Trainer
        from workers.training.settings import TrainSettings
        from workers.training.tasks import find_task
        from workers.training.trainer import Trainer

        preset = _CARD_PRESET if self.card else _CPU_PRESET
        settings = TrainSettings(preset=preset, **{"batch": 4, "steps": 1000, **levers})
        return Trainer(find_task(settings, 0), settings, torch.device(self.device), 0)

    def train(self) -> list[Report]:
        """Run slices of a training in an engine in this process."""
        from workers.training.settings import TrainSettings

        spec = lone_worker(
            budget_bytes=self.budget_bytes,
            device=self.device,
            dtype="bf16" if self.card else "fp32",
            size=1,
            batch=8,
            floor_bytes=4 * MIB,
            name="train",
        )
        settings = TrainSettings(
            preset=_CARD_PRESET if self.card else _CPU_PRESET,
            batch=8,
            precision="bf16" if self.card else "fp32",
            steps=100_000,
        )
        workload = replace(spec.workload, settings=settings.model_dump())
        spec = replace(spec, policy="adaptive", workload=workload)
        engine, reports = Engine(spec), list[Report]()
        for number in range(4):
            directive = Directive(
                incarnation=0, sequence=number, duration_s=self.seconds / 4, resume=None
            )
            reports.append(engine.run_slice(directive))
        last = reports[-1]
        if not sum(report.counts.steps_ok for report in reports):
            raise RuntimeError(f"no good step: {last.reason} {last.error or ''}")
        return reports


def _claim(
    holds: bool, sentence: str, figures: Mapping[str, Any], *, unproved: str | None = None
) -> Outcome:
    if unproved is not None:
        return Outcome(figures=figures, skipped=f"unproved: {unproved}")
    return Outcome(figures=figures, broken=[] if holds else [sentence])


def texts(given: Given) -> Outcome:
    """A1. Take all memory, then call libraries that need some of their own."""
    device = open_device(given_spec(given))
    kinds: dict[str, str] = {}
    blocks: list[torch.Tensor] = []
    calls: dict[str, Callable[[], Any]] = {
        "block": lambda: torch.empty(
            2 * device.most_bytes, dtype=torch.uint8, device=device.torch_device
        ),
        "conv": lambda: torch.conv2d(torch.ones(8, 8, 64, 64).to(device.torch_device), kernel),
        "solve": lambda: torch.linalg.solve(square, square),
        "fft": lambda: torch.fft.fft2(square),
        "compiled": lambda: torch.compile(lambda x: (x.sin() * x).sum())(square),
    }
    names = list(calls) if given.card else ["block"]
    kernel = torch.ones(8, 8, 3, 3, device=device.torch_device)
    square = torch.eye(512, device=device.torch_device)
    if given.card:
        for size_bytes in (64 * MIB, MIB):
            try:
                while True:
                    blocks.append(
                        torch.empty(size_bytes, dtype=torch.uint8, device=device.torch_device)
                    )
            except torch.OutOfMemoryError:
                continue
    for name in names:
        try:
            with device.enforced():
                calls[name]()
            kinds[f"{name}_kind"] = "fitted"
        except Exception as error:  # noqa: BLE001 - it is what is asked
            failure = oom.classify(error)
            kinds[f"{name}_kind"], kinds[f"{name}_text"] = failure.kind.value, failure.text[:80]
    shortages = [
        kind for name, kind in kinds.items() if name.endswith("_kind") and kind != "fitted"
    ]
    wrong = [kind for kind in shortages if kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}]
    return _claim(
        not wrong,
        "a shortage of a library reads as an error of the workload",
        {"shortages": len(shortages), **kinds},
    )


def given_spec(given: Given) -> Any:  # noqa: ANN401 - a WorkerSpec
    """Return the spec of a lone worker."""
    return lone_worker(
        budget_bytes=given.budget_bytes, device=given.device, dtype="fp32", floor_bytes=4 * MIB
    )


def host_states(given: Given) -> Outcome:
    """A2. The states of adamw-8bit that are on the host stay there through steps and a rollback."""
    if not given.card:
        return given.unproved()
    trainer = given.trainer(optimizer="adamw-8bit", states_on_host=100)
    while trainer.step < 2:
        trainer.micro_batch(4)
    trainer.rollback(None)
    while trainer.step < 1:
        trainer.micro_batch(4)
    hosted = {id(each) for each in trainer.host_states.tensors}
    on_device_bytes = sum(
        each.nbytes
        for each in trainer.host_states.tensors
        if isinstance(each, torch.Tensor) and each.device.type == "cuda"
    )
    return _claim(
        on_device_bytes == 0 and bool(hosted),
        "states that belong on the host are on the card",
        {"states": len(hosted), "on_card_bytes": on_device_bytes},
    )


def pinned(given: Given) -> Outcome:
    """A4. Pinned bytes of a parked state, and after it has gone back."""
    if not given.card:
        return given.unproved()
    trainer = given.trainer()
    while trainer.step < 1:
        trainer.micro_batch(4)
    parked_bytes = trainer.park()
    at_most = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    trainer.unpark()
    gc.collect()
    left = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    figures = {
        "parked_bytes": parked_bytes,
        "pinned_bytes": at_most,
        "pinned_to_parked": at_most / max(1, parked_bytes),
        "pinned_after_bytes": left,
    }
    holds = at_most <= _SLACK * parked_bytes + 64 * MIB and left <= 64 * MIB
    return _claim(holds, "more is pinned than is parked, or it is not given back", figures)


def activations(given: Given) -> Outcome:
    """A5.

    Bytes that activations_on_host pins, against what the same step saves without half-precision
    copies.
    """
    if not given.card:
        return given.unproved()
    found: dict[str, Any] = {}
    for name in ("fp32", "bf16"):
        trainer = given.trainer(activations_on_host=True, precision=name)
        trainer.micro_batch(4)
        found[f"{name}_pinned_peak_bytes"] = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
        torch.cuda.reset_peak_host_memory_stats()
        del trainer
        gc.collect()
    holds = found["bf16_pinned_peak_bytes"] <= _SLACK * found["fp32_pinned_peak_bytes"]
    return _claim(holds, "bf16 moves more than fp32: copies of weights are among it", found)


def context(given: Given) -> Outcome:
    """A6. The process stays within its budget after training has loaded its kernels."""
    reports = given.train()
    grew = [event for report in reports for event in report.events if event.name == "context_grew"]
    device = reports[-1].device
    own_bytes = queries.process_used_bytes(queries.visible_card()) if given.card else None
    figures = {
        "context_bytes": device.context_bytes if device else None,
        "grown_bytes": sum(int(event.detail["grown_bytes"] or 0) for event in grew),
        "process_bytes": own_bytes,
        "budget_bytes": given.budget_bytes,
    }
    holds = own_bytes is None or own_bytes <= given.budget_bytes
    unproved = "NVML does not tell what this process holds" if own_bytes is None else None
    return _claim(holds, "the process holds more than its budget", figures, unproved=unproved)


def budgets(given: Given) -> Outcome:
    """A7. The shipped budgets fit what a card really shows."""
    del given
    from orchestrator.config.gpu_specs import PROFILES
    from orchestrator.config.load import load_config

    rows = {}
    for name, node in load_config(str(_SHIPPED)).nodes.items():
        profile = PROFILES[node.gpu]
        asked_gib = node.workers * node.vram_per_worker_gib / node.gpus
        rows[f"{name}_asked_gib"] = asked_gib
        rows[f"{name}_left_gib"] = profile.shown_gib * node.memory_fraction - asked_gib
    least_gib = min(value for key, value in rows.items() if key.endswith("left_gib"))
    return _claim(least_gib >= 0, "budgets exceed the share of the card", rows)


def waiting(given: Given) -> Outcome:
    """A9. CPU seconds of a training process for each second."""
    given.train()
    process, began_s = psutil.Process(), time.perf_counter()
    before = process.cpu_times()
    reports = given.train()
    took_s, after = time.perf_counter() - began_s, process.cpu_times()
    cores = (after.user + after.system - before.user - before.system) / took_s
    figures = {"cores": cores, "steps": sum(report.counts.steps_ok for report in reports)}
    return _claim(
        cores <= _MOST_CORES,
        "a training waits by spinning",
        figures,
        unproved=None if given.card else "it needs a card",
    )


_READERS: Mapping[str, Callable[[], object]] = {
    "matmul_precision": torch.get_float32_matmul_precision,
    "matmul_allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "matmul_fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "cudnn_allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    # torch's stubs lack these two.
    "conv_fp32_precision": partial(attrgetter("conv.fp32_precision"), torch.backends.cudnn),
    "rnn_fp32_precision": partial(attrgetter("rnn.fp32_precision"), torch.backends.cudnn),
}


def tf32(given: Given) -> Outcome:
    """A10. After the product's settings every reader of TF32 answers, and says the same."""
    from workers.training import precision

    figures: dict[str, Any] = {}
    for name in ("fp32", "tf32", "bf16"):
        if given.card and name == "fp32":
            open_device(given_spec(given))
        precision.set_up(name, deterministic=False)
        for reader, read in _READERS.items():
            try:
                figures[f"{name}_{reader}"] = read()
            except RuntimeError as error:
                figures[f"{name}_{reader}"] = f"raises: {str(error)[:40]}"
    raised = [key for key, value in figures.items() if str(value).startswith("raises")]
    figures = {key: str(value) for key, value in figures.items()} | {
        "readers_that_raise": len(raised)
    }
    return _claim(not raised, f"readers raise: {', '.join(raised)}", figures)


def gaps(given: Given) -> Outcome:
    """A12.

    A training finds its size with few failures, and its peak agrees with what was reserved.
    """
    reports = given.train()
    told = [report.memory for report in reports if report.memory is not None]
    figures = {
        "failures": sum(report.counts.steps_oom for report in reports),
        "peak_bytes": max(memory.peak_bytes for memory in told),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved() if given.card else None,
        "cap_bytes": reports[-1].device.cap_bytes if reports[-1].device else None,
    }
    return _claim(figures["failures"] <= 2, "more than two failures in a training", figures)  # type: ignore[operator]


def workspaces(given: Given) -> Outcome:
    """A14. How many cuBLAS workspaces a training holds: one for each thread that multiplies."""
    if not given.card:
        return given.unproved()
    trainer = given.trainer()
    trainer.micro_batch(4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()  # the only way to count them
    freed_bytes = before - torch.cuda.memory_allocated()
    square = torch.ones(64, 64, device="cuda")
    empty = torch.cuda.memory_allocated()
    torch.mm(square, square, out=torch.empty_like(square))
    one_bytes = torch.cuda.memory_allocated() - empty
    figures = {
        "workspace_bytes": one_bytes,
        "all_bytes": freed_bytes,
        "workspaces": freed_bytes / max(1, one_bytes),
    }
    return _claim(freed_bytes <= 2.1 * one_bytes, "more than two workspaces", figures)


def measure(part: Callable[[Given], Outcome], machine: Machine) -> Outcome:
    budget_bytes, _ = machine.fitting(1, 8 * GIB if machine.device == "cuda" else GIB)
    # On a CPU one micro-batch a slice shows that the part runs.
    seconds = 8 * machine.scale.turn_s if machine.device == "cuda" else 0.0
    return in_child(machine.watch, part, Given(machine.device, seconds, budget_bytes))  # type: ignore[no-any-return]


def judge(outcome: Outcome) -> Outcome:
    return outcome


#: By the name that `--only` takes: what must hold, and its part.
CLAIMS: Mapping[str, tuple[str, Callable[[Given], Outcome]]] = {
    "a1_texts": ("a shortage in a library is read as one of memory", texts),
    "a2_host_states": ("8-bit states on the host stay there", host_states),
    "a4_pinned": (f"pinned <= {_SLACK} x parked, and 0 after it", pinned),
    "a5_activations": ("half-precision copies of weights stay on the card", activations),
    "a6_context": ("the process stays within its budget once kernels are loaded", context),
    "a7_budgets": ("the shipped budgets fit their cards", budgets),
    "a9_waiting": (f"a training takes <= {_MOST_CORES} cores", waiting),
    "a10_tf32": ("each of the six readers of TF32 answers", tf32),
    "a12_gaps": ("a training finds its size with <= 2 failures", gaps),
    "a14_workspaces": ("two cuBLAS workspaces at most", workspaces),
}

#: For the suite: how each is measured.
MEASURED = {name: (must_hold, partial(measure, part)) for name, (must_hold, part) in CLAIMS.items()}
