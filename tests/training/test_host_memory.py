"""What waits in host memory for a card: what is pinned for it, what stays there, and how the host waits for a card.

No card is needed. A tensor that says it is on one has its data on the host, and the pinned memory
is that of an allocator that does as torch's: it rounds up to powers of two, and keeps what is free
until it is asked to give it back.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import re
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.in_child import InChild
from tests.training.scene import CPU, settings, task, trainer
from tests.training.test_memory_plan import M_MMAP_THRESHOLD, THRESHOLD_BYTES
from tests.training.test_trajectory import in_shared_memory, train
from workers.devices.cpu import process_memory, reset_highest
from workers.training import host_memory, host_states, optimizers
from workers.training.accumulator import Accumulator
from workers.training.checkpoints import HostCopy
from workers.training.errors import TaskError, UpdateInterruptedError
from workers.training.host_memory import Parking
from workers.training.host_states import HostStates, hosted_of, states_of
from workers.training.memory_plan import MemoryPlanner
from workers.training.model_levers import HostActivations
from workers.training.optimizers import Update, adamw, forget_states, load_states
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

CARD = torch.device("cuda", 0)


class OnCard(Tensor):
    """Says that it is on a card."""

    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    device = property(lambda _: CARD)  # type: ignore[assignment]


def on_card(tensor: Tensor) -> OnCard:
    return tensor.as_subclass(OnCard)


class HostAllocator:
    """Rounds up to powers of two, and keeps what is free."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        self.free: list[int] = []

    @property
    def pinned_bytes(self) -> int:
        return sum(self.used.values()) + sum(self.free)

    def pinned(self, size: int) -> Tensor:
        block = torch.zeros(size, dtype=torch.uint8)
        storage = (
            block.untyped_storage()
        )  # torch keeps this object as long as the memory has a user
        self.used[id(storage)] = whole = 1 << (size - 1).bit_length()
        if whole in self.free:
            self.free.remove(whole)
        weakref.finalize(storage, self._freed, id(storage)).atexit = False
        return block

    def _freed(self, number: int) -> None:
        self.free.append(self.used.pop(number))

    def give_back(self) -> None:
        self.free.clear()


class CardLog(list[str]):
    """What the host asked of the card, in order."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> CardLog:
    """Record events, and each value that is read."""
    calls = CardLog()

    class Event:
        def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
            self.kind = "sleeping" if blocking else "spinning"

        def record(self, _stream: object = None) -> None:
            """Nothing is under way."""

        def synchronize(self) -> None:
            calls.append(self.kind)

        def elapsed_time(self, _other: object) -> float:
            return 0.0

    def tolist(tensor: Tensor) -> Any:
        calls.append("read")
        return Tensor.tolist(tensor.as_subclass(Tensor))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: None)
    monkeypatch.setattr(OnCard, "tolist", tolist, raising=False)
    return calls


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch, log: CardLog) -> Iterator[HostAllocator]:
    """Pin by the model of torch's allocator; what is new on a card is on the host."""
    model, empty, empty_like = HostAllocator(), torch.empty, torch.empty_like

    def made(*shape: Any, pin_memory: bool = False, **keys: Any) -> Tensor:
        return model.pinned(*shape) if pin_memory else empty(*shape, **keys)

    def made_like(
        tensor: Tensor, *, device: Any = None, pin_memory: bool = False, **keys: Any
    ) -> Tensor:
        if pin_memory:
            return model.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if device == CARD:
            return on_card(empty(tensor.shape, dtype=tensor.dtype))
        return empty_like(tensor.as_subclass(Tensor), device=device, **keys)

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch, "empty_like", made_like)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", model.give_back)
    yield model
    assert "spinning" not in log


def weights() -> list[Tensor]:
    """Return tensors whose sizes are just past a power of two, as those of gpt2-small are."""
    return [on_card(torch.randn(rows, 129)) for rows in (520, 260, 130, 33, 33, 33, 9, 5, 1)]


def test_parking_pins_what_it_must_and_gives_it_back(allocator: HostAllocator) -> None:
    held: list[Any] = weights()
    size, values = sum(each.nbytes for each in held), [each.clone() for each in held]
    parking = Parking(CARD)
    told = parking.park(nn.Module(), [held])
    assert told == allocator.pinned_bytes <= 1.1 * size
    parking.unpark()
    assert allocator.pinned_bytes == 0
    assert all(one.equal(other) for one, other in zip(held, values, strict=True))


def test_a_checkpoint_is_copied_into_few_pinned_blocks(
    allocator: HostAllocator, log: CardLog
) -> None:
    state = {"weights": weights(), "step": 3}
    copy = HostCopy()
    copy.take(state)
    copy.complete()
    size = sum(each.nbytes for each in state["weights"])  # type: ignore[attr-defined]
    assert allocator.pinned_bytes <= 1.1 * size
    assert log == ["sleeping"]
    assert copy.state is not None
    held = copy.state["weights"]
    assert all(one.equal(other) for one, other in zip(held, state["weights"], strict=True))  # type: ignore[call-overload]


def test_states_that_go_back_to_the_card_are_pinned_no_more(
    allocator: HostAllocator, monkeypatch: Any
) -> None:
    parameters = [nn.Parameter(each) for each in weights()]
    monkeypatch.setattr(
        host_states, "_copied", lambda states, _: {k: on_card(v.clone()) for k, v in states.items()}
    )
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    optimizer.param_groups[0]["params"] = parameters
    states = HostStates(optimizer, parameters, 100)
    size = 2 * sum(each.nbytes for each in parameters)
    assert allocator.pinned_bytes <= 1.1 * size
    states.hold(50)
    assert allocator.pinned_bytes <= 0.6 * size
    states.hold(0)
    assert allocator.pinned_bytes == 0


def test_a_plan_counts_states_and_the_copy_for_a_checkpoint() -> None:
    chosen = TrainSettings(
        preset="gpt-mini", states_on_host=100, batch=1, seq=16, activations_on_host=True
    )
    plan = MemoryPlanner(find_task(chosen, 0), chosen, on_card=True).plan(1, 0)
    states, copy = 2 * plan.weights_bytes, 3 * plan.weights_bytes
    assert plan.on_host_bytes > states + copy, (
        "the states, a copy of them and of the weights, and activations"
    )
    assert plan.checkpoint_copy_bytes == pytest.approx(copy, rel=0.05)


@pytest.mark.parametrize("loads", [False, True])
def test_8_bit_states_stay_on_the_host(monkeypatch: pytest.MonkeyPatch, loads: bool) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra train8bit)")
    for module in (host_states, optimizers):
        monkeypatch.setattr(
            module,
            "like_all",
            lambda some, **_: [torch.empty_like(each, device="cpu") for each in some],
            raising=False,
        )
        monkeypatch.setattr(
            module, "like", lambda each: torch.empty_like(each, device="cpu"), raising=False
        )
    monkeypatch.setattr(host_states, "wait_asleep", lambda _: None, raising=False)
    monkeypatch.setattr(host_states, "give_back", lambda _: None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=int))
    monkeypatch.setattr(sys.modules["bitsandbytes.optim.optimizer"], "sync_gpu", lambda _: None)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        parameters = [nn.Parameter(torch.empty(256, 256, device="cuda")) for _ in range(3)]
    optimizer: Any = adamw(parameters, TrainSettings(optimizer="adamw-8bit"), 1e-3)
    with mode, torch.no_grad():
        states = HostStates(optimizer, parameters, 100)
        on_device: list[int] = []
        monkeypatch.setattr(
            optimizer, "update_step", lambda *_: on_device.append(_on_card(optimizer, parameters))
        )
        if loads:
            saved = optimizer.state_dict()
            forget_states(optimizer)
            assert _on_card(optimizer, parameters) == 0, "a rollback to the beginning"
            load_states(optimizer, saved)
            assert _on_card(optimizer, parameters) == 0, "a checkpoint that is loaded"
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        states.step()
    assert on_device == [1, 1, 1], "one part after the other"
    assert _on_card(optimizer, parameters) == 0


def _on_card(optimizer: Any, parameters: list[nn.Parameter]) -> int:
    """Return of how many parameters a state is on the card."""
    return sum(
        any(each.is_cuda for each in states_of(optimizer, own).values()) for own in parameters
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_autocast_made_narrower_stay(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    if frozen:
        model[1].requires_grad_(requires_grad=False)
    waits = HostActivations(model, "cpu")
    with torch.autocast("cpu", torch.bfloat16), waits.saving():
        loss = model(torch.randn(2, 1024)).float().sum()
    loss.backward()
    # What went into a layer, of 2 x 1024 numbers with 2 bytes each; of the frozen one only its
    # weight is needed.
    assert waits.waiting_bytes == (4096 if frozen else 2 * 4096)


def test_the_host_sleeps_until_the_gradient_is_known(log: CardLog) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    sums = Accumulator([parameter])
    sums.gradients = [on_card(each) for each in sums.gradients]
    sums.loss = [on_card(each) for each in sums.loss]
    sums.begin(1, 1)
    sums.add(1, torch.tensor(2.0), [torch.ones(3)])
    update = Update(torch.optim.SGD([parameter], lr=1.0))
    scaler = trainer(steps=1)._scaler
    assert sums.finish(update, scaler, step=0, clip=None, rates=None) == (2.0, True)
    assert log == ["sleeping", "read"]


def test_no_place_in_training_waits_in_a_loop() -> None:
    # The whole card or a stream is waited for in a loop, and so is an event that is not blocking.
    root = Path(host_memory.__file__).parent
    for file in (*root.rglob("*.py"), root.parent / "workloads" / "train.py"):
        assert not re.search(r"(cuda|current_stream\(.*\))\.synchronize\(", file.read_text()), file


SHARES_PCT = (0, 25, 50, 100)


def private_bytes(run: Trainer) -> int:
    """Return the bytes of the optimiser's states that the cap of a CPU device counts."""
    optimizer = run._update.optimizer
    states = [
        each for parameter in run.parameters for each in states_of(optimizer, parameter).values()
    ]
    return sum(each.nbytes for each in states if not in_shared_memory(each))


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "adamw-loop"])
def test_no_bit_changes_with_the_share_of_states_on_the_host(optimizer: str) -> None:
    runs = [
        trainer(steps=15, clip=0.1, optimizer=optimizer, states_on_host=share)
        for share in SHARES_PCT
    ]
    losses = [train(each, lambda: 5) for each in runs]
    assert losses[0][-1] < losses[0][0]
    assert losses[1:] == losses[:1] * 3
    assert len({each.weights_sha256() for each in runs}) == 1
    held = [private_bytes(each) for each in runs]
    assert held[3] == 0
    assert held[1:3] == pytest.approx([0.75 * held[0], 0.5 * held[0]], rel=0.05)


def test_the_share_on_the_host_may_change_at_any_time() -> None:
    alone, run = trainer(steps=12), trainer(steps=12, states_on_host=25)
    train(alone, lambda: 5)
    for share in (25, 100, 50, 0):
        run.host_states.hold(share)
        run.micro_batch(5)
        held = private_bytes(run)
        run.park()
        run.unpark()
        assert private_bytes(run) == held, "parking leaves on the host what belongs there"
        run.micro_batch(5)
        run.micro_batch(5)
    other = trainer(steps=12, states_on_host=100)
    other.load(run.state())
    assert private_bytes(other) == 0
    other.rollback(run.state())
    assert private_bytes(other) == 0
    train(other, lambda: 5)
    assert other.weights_sha256() == alone.weights_sha256()


def test_an_update_out_of_memory_is_rolled_back() -> None:
    alone, run = trainer(steps=4), trainer(steps=4, states_on_host=100)
    train(alone, lambda: 12)
    run.micro_batch(12)

    class Full(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "_to_copy" in str(func) and in_shared_memory(args[0]):
                raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
            return func(*args, **kwargs or {})

    with Full(), pytest.raises(UpdateInterruptedError):
        run.micro_batch(12)
    assert private_bytes(run) == 0
    assert run.rollback(None) == 1
    train(run, lambda: 12)
    assert run.weights_sha256() == alone.weights_sha256()


def test_memory_falls_as_the_plan_predicts(in_child: InChild, record_property: Any) -> None:
    planned, measured = in_child(_planned_and_measured)
    record_property(
        "planned_and_measured_mib",
        [(a / 2**20, b / 2**20) for a, b in zip(planned, measured, strict=True)],
    )
    assert planned[0] - planned[3] > 80 * 2**20
    for share in (1, 2, 3):
        assert measured[0] - measured[share] == pytest.approx(planned[0] - planned[share], rel=0.05)


def _planned_and_measured() -> tuple[list[int], list[int]]:
    """Return what the plan says of each share, and the most that the kernel counts in a step."""
    warnings.simplefilter("ignore")
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES)
    torch.set_num_threads(1)
    planned, measured = [], []
    for share in (None, *SHARES_PCT):  # once before, for what libraries load
        chosen = TrainSettings(
            preset="gpt-mini", batch=4, seq=64, precision="fp32", states_on_host=share or 0
        )
        found = find_task(chosen, 0)
        run = Trainer(found, chosen, CPU, 0)
        run.micro_batch(4)
        gc.collect()
        libc.malloc_trim(0)
        reset_highest()
        run.micro_batch(4)
        planned.append(MemoryPlanner(found, chosen, on_card=False).plan(4, 0).total_bytes)
        measured.append(process_memory().highest_bytes)
        del run
    return planned[1:], measured[1:]


def test_states_that_are_not_known_are_refused_on_the_host() -> None:
    def own(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    other = dataclasses.replace(task("gpt"), optimizer=own)
    with pytest.raises(TaskError, match="the states of SGD are not known"):
        Trainer(other, settings(states_on_host=1), CPU, 0)


def test_the_largest_states_that_fit_go_to_the_host() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (60, 30, 6, 4)]

    def chosen(share_pct: int) -> list[int]:
        return [len(each) for each in hosted_of(parameters, share_pct)]

    assert [chosen(share) for share in (0, 3, 40, 65, 100)] == [
        [],
        [],
        [30, 6, 4],
        [60, 4],
        [60, 30, 6, 4],
    ]
