"""A training runs out of memory at each kind of operation of one effective batch.

The failures are injected where torch dispatches its operations, below its Python functions. So
each operation may fail, including those of the backward pass. An operation on lists can also fail
halfway.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.training.scene import CPU, replay, settings, task
from workers.oom import classify
from workers.settings import FailureKind
from workers.training.batches import tensors_in
from workers.training.checkpoints import weights_sha256
from workers.training.dispatch_modes import OperatorMode
from workers.training.errors import NotFiniteError, UpdateInterruptedError
from workers.training.trainer import Trainer


class Watched(OperatorMode):
    """Records the operations, and makes one run out of memory, on lists possibly halfway."""

    def __init__(self, fail_at: int | None = None, *, halfway: bool = False) -> None:
        super().__init__()
        self.names: list[str] = []
        self._fail_at, self._halfway = fail_at, halfway

    def run(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        self.names.append(func.overloadpacket.__name__)
        if len(self.names) - 1 == self._fail_at:
            if self._halfway:
                func(
                    *(each[: len(each) // 2] if isinstance(each, list) else each for each in args),
                    **given,
                )
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return func(*args, **given)


def small(**keys: object) -> Trainer:
    """Return a training of three steps and 3,000 parameters, whose gradients are always clipped."""
    chosen = settings(**{"batch": 4, "steps": 3, "warmup_steps": 0, "clip": 0.01} | keys)
    return Trainer(
        task("gpt", chosen.dropout, layers=1, width=12, heads=1, vocabulary=16), chosen, CPU, 5
    )


def course(run: Trainer, watched: Watched) -> str:
    """Do the second optimiser step with injected failures, and one more step.

    Return the kind of failure that occurred.
    """
    failure, kinds = "none", []
    saved = copy.deepcopy(run.state())
    while run.step < 2:
        sums, done = run.sums, run.sums.done
        before = copy.deepcopy(sums.gradients)
        try:
            with watched:
                run.micro_batch(2)
        except torch.OutOfMemoryError:
            failure = "out of memory"
            for held, own, was in zip(sums._added, sums.gradients, before, strict=True):
                assert not held or held > done or own.equal(was), "a finished part was changed"
        except UpdateInterruptedError as error:
            failure = "update"
            kinds.append(classify(error).kind)
            with pytest.raises(UpdateInterruptedError):
                run.micro_batch(2)
            assert not run.at_boundary
            run.load(saved)
    assert set(kinds) <= {FailureKind.OTHER}, "the engine must not take it for an out-of-memory"
    run.micro_batch(2)
    run.micro_batch(2)
    return failure


def outcome(run: Trainer) -> str:
    """Return a hash of weights, moments and averages, and the numbers of updates."""
    state = run.state()
    tensors = list(tensors_in([state[key] for key in ("weights", "optimizer", "average")]))
    return weights_sha256({f"{place:04}": each for place, each in enumerate(tensors)}) + str(
        run.course.losses
    )


class Begun:
    """A training that can be reset to the state after its first step."""

    def __init__(self, optimizer: str) -> None:
        self._run = small(optimizer=optimizer)
        self._run.micro_batch(4)
        self._state = copy.deepcopy(self._run.state())
        self._run.load(self._state)  # so that the loader begins here, as after each failure
        watched = Watched()
        assert course(self._run, watched) == "none"
        self.names = watched.names
        self.undisturbed = outcome(self._run)

    def with_failure(self, place: int, *, halfway: bool = False) -> str:
        """Fail at one operation, and check that the result is the same as without the failure.

        Return the kind of failure.
        """
        self._run.load(self._state)
        failure = course(self._run, Watched(place, halfway=halfway))
        assert outcome(self._run) == self.undisturbed, f"{self.names[place]} at {place}"
        return failure


def test_running_out_of_memory_anywhere_costs_no_bit() -> None:
    """Each kind of operation fails at its first and at its last occurrence."""
    begun = Begun("adamw-fused")
    found: dict[str, set[str]] = {"none": set(), "out of memory": set(), "update": set()}
    last = {name: place for place, name in enumerate(begun.names)}
    for place, name in enumerate(begun.names):
        if place == last[name] or name not in begun.names[:place]:
            found[begun.with_failure(place)].add(name)
    assert not found["none"]
    assert {"_foreach_mul_", "_fused_adamw_", "_foreach_lerp_"} <= found["update"]
    assert {
        "mm",
        "gelu",
        "gelu_backward",
        "copy_",
        "add_",
        "_foreach_norm",
    } <= found["out of memory"]


def test_an_operation_on_lists_that_ends_halfway_costs_no_bit() -> None:
    begun = Begun("adamw-foreach")
    places = [
        place for place, name in enumerate(begun.names) if name.startswith(("_foreach_", "_fused_"))
    ]
    assert len(places) >= 6
    for place in places:
        assert begun.with_failure(place, halfway=True) != "none"


def test_a_loss_that_is_no_number_changes_no_weight() -> None:
    run = small(lr=1e30, clip=None, ema_decay=None)
    with pytest.raises(NotFiniteError, match=r"of optimiser step \d is (nan|inf)") as stopped:
        replay(run, [[4, 0, 3]])
    assert stopped.value.step == run.step > 0
    shorter = small(lr=1e30, clip=None, ema_decay=None)
    replay(shorter, [[4, 0, run.step]])
    assert run.weights_sha256() == shorter.weights_sha256()
