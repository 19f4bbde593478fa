"""Whether a training fits, told without a card and without its memory: it is computed on tensors
that have no data.

Covers what tensors take: weights, sums of gradients, states of the optimiser, averaged weights, and
the highest level that activations reach in a part of a batch. Not what a runtime takes (see
`devices`), and not what an allocator loses between its blocks.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from workers.host.cuda_environment import workspace_bytes, workspace_of
from workers.training import eight_bit, order, precision
from workers.training.accumulator import Accumulator
from workers.training.adapters import new_model
from workers.training.averaging import Average
from workers.training.host_memory import host_bytes, power_of_two
from workers.training.host_states import hosted_of, parts_of, states_of
from workers.training.keyed import Dropouts
from workers.training.model_levers import ModelLevers
from workers.training.optimizers import adamw, allocate_states
from workers.training.recompute import Recomputation
from workers.training.rungs import offered_micro_batches
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, refuse_without_data, trained_parameters
from workers.units import MIB

#: What the caching allocator rounds a block up to (c10/cuda/CUDACachingAllocator.cpp,
#: kMinBlockSize).
_CUDA_BLOCK_BYTES: Final = 512

#: cuBLAS handles of a training: torch has one for each thread that multiplies
#: (at/cuda/detail/DeviceThreadHandles.h), and gradients are computed by a thread of autograd's.
_CUBLAS_HANDLES: Final = 2

#: The same of oneDNN on a CPU, measured with one thread (torch 2.13): 1 MiB for matrices, 4 MiB for
#: convolutions, 8 MiB in half precision.
_ONEDNN_BYTES: Final = 4 * MIB
_ONEDNN_HALF_BYTES: Final = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device that a training takes with parts of so many samples; for a report."""

    micro: int
    level: int
    """Blocks that are recomputed."""
    weights_bytes: int
    gradients_bytes: int
    """Sums over the parts of a batch, in fp32."""
    optimizer_bytes: int
    """Its states that are on the device."""
    average_bytes: int
    activations_bytes: int
    """The most that a part takes beside all that: what is kept for the backward pass, and its
    gradients.
    """
    update_bytes: int
    """The most that the update takes, when no activations are there."""
    workspace_bytes: int
    """What libraries keep for their own use."""
    on_host_bytes: int
    """What is pinned, or taken, of host memory: states of the optimiser, averaged weights,
    activations and the copy for a checkpoint, rounding included; not a part of the total."""
    checkpoint_copy_bytes: int
    """Of that, the copy of the state that a checkpoint is written from."""

    @property
    def state_bytes(self) -> int:
        """What is there at all times."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.average_bytes

    @property
    def total_bytes(self) -> int:
        """The highest level of all."""
        return (
            self.state_bytes + max(self.activations_bytes, self.update_bytes) + self.workspace_bytes
        )


class MemoryPlanner:
    """Holds a training of one task without its data.

    Raises:
        TaskError: There is nothing to train, or no data.
        Exception: Whatever the task's model or data set raises. A model may also do what tensors
            without data cannot.
    """

    def __init__(self, task: TrainTask, settings: TrainSettings, *, on_card: bool) -> None:
        """Make the model and all that outlives a step; takes no memory for it."""
        self._task = task
        self._settings = settings
        self._on_card = on_card
        refuse_without_data(task)
        key = order.Sample(number=0, epoch=0, index=0)
        self._batch_of_one = (
            (task.collate or default_collate)([task.dataset[key if task.by_sample else 0]])
            if task.largest is None
            else task.largest()
        )
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._live = _LiveBytes(_CUDA_BLOCK_BYTES if on_card else 1)
        held = []
        with self._without_data():
            self._model = new_model(task, settings).train()
            self._levers = ModelLevers(settings, self._model, device_type="cpu", on_card=on_card)
            self._recomputation = Recomputation(task.blocks(self._model))
            self._dropouts = Dropouts(self._model, 0)
            held.append(self._live.now_bytes)
            parameters = trained_parameters(task, self._model)
            self._accumulator = Accumulator(parameters)
            held.append(self._live.now_bytes)
            optimizer = (
                task.optimizer or (lambda some: adamw(list(some), settings, 1e-3, planned=True))
            )(parameters)
            allocate_states(optimizer)
            held.append(self._live.now_bytes)
            if settings.ema_decay is not None and settings.ema_on == "device":
                self._average = Average(parameters, settings.ema_decay)
            held.append(self._live.now_bytes)
        self._optimizer = optimizer
        self._state = [after - before for before, after in zip([0, *held], held, strict=False)]
        self._parameters = parameters
        self._average_on_host_bytes = 0
        if settings.ema_decay is not None and settings.ema_on == "host":
            sizes = [each.nbytes for each in parameters]
            # On a card the largest weight is copied to a place of its own before it is averaged.
            staging_bytes = power_of_two(max(sizes)) if on_card else 0
            self._average_on_host_bytes = host_bytes(sizes, on_card=on_card) + staging_bytes
        state = [*self._model.state_dict().values(), *tree_leaves(list(optimizer.state.values()))]
        state += [] if settings.ema_decay is None else parameters
        self._checkpoint_copy_bytes = host_bytes(
            [each.nbytes for each in state if isinstance(each, Tensor)], on_card=on_card
        )
        self.states = cache(self._states)
        self._part = cache(self._computed)
        self.plan = cache(self._plan)

    @property
    def most_level(self) -> int:
        """How many blocks can be recomputed."""
        return self._recomputation.most

    def level_of(self, offered: int) -> int:
        """Return how many blocks a step recomputes that is offered so many.

        `train.recompute` may have fixed it.
        """
        return self._recomputation.level_of(self._settings.recompute, offered)

    def largest_micro(
        self, cap_bytes: int, level: int, share_pct: int | None = None
    ) -> MemoryPlan | None:
        """Return the plan with the largest micro-batch of a run that fits.

        `None`: not even the smallest one fits.
        """
        *smaller, most = offered_micro_batches(self._settings)
        if (
            whole := self.plan(most, level, share_pct)
        ).total_bytes <= cap_bytes:  # most trainings fit as a whole
            return whole
        fitting = bisect_right(
            smaller, cap_bytes, key=lambda micro: self.plan(micro, level, share_pct).total_bytes
        )
        return self.plan(smaller[fitting - 1], level, share_pct) if fitting else None

    def _states(self, share_pct: int) -> tuple[int, int, int]:
        """Return the bytes of the optimiser's states on the device and on the host, and what an
        update takes beside.
        """
        optimizer, on_card = self._optimizer, self._on_card
        hosted = hosted_of(self._parameters, share_pct)
        on_host_bytes = sum(self._states_bytes(each) for each in hosted)
        here = [each for each in self._parameters if each not in set(hosted)]
        coming = [
            sum(map(self._states_bytes, part)) + _update_bytes(optimizer, part, on_card=on_card)
            for part in parts_of(optimizer, hosted)
        ]
        update_bytes = max(_update_bytes(optimizer, here, on_card=on_card), *coming, 0)
        sizes = [
            each.nbytes for parameter in hosted for each in states_of(optimizer, parameter).values()
        ]
        return self._state[2] - on_host_bytes, host_bytes(sizes, on_card=on_card), update_bytes

    def _plan(self, micro: int, level: int, share_pct: int | None = None) -> MemoryPlan:
        """Return the plan for parts of `micro` samples, with so many per cent of the states on the
        host.
        """
        states = self.states(self._settings.first_share_pct if share_pct is None else share_pct)
        on_device_bytes, on_host_bytes, update_bytes = states
        activations_bytes, waiting_bytes = self._part(micro, level)
        weights, gradients, _, average = self._state
        return MemoryPlan(
            micro=micro,
            level=level,
            weights_bytes=weights,
            gradients_bytes=gradients,
            optimizer_bytes=on_device_bytes,
            average_bytes=average,
            activations_bytes=activations_bytes,
            update_bytes=update_bytes,
            workspace_bytes=self._workspace_bytes(),
            on_host_bytes=(
                on_host_bytes
                + self._average_on_host_bytes
                + waiting_bytes
                + self._checkpoint_copy_bytes
            ),
            checkpoint_copy_bytes=self._checkpoint_copy_bytes,
        )

    def _computed(self, micro: int, level: int) -> tuple[int, int]:
        """Return what a part takes beside the state on the device, and what of it waits on the
        host.
        """
        with self._without_data():
            before_bytes = self._live.begin()
            self._compute_part(micro, level)
        waiting = self._levers.host_activations
        waiting_bytes = 0 if waiting is None else waiting.waiting_bytes
        return self._live.peak_bytes - before_bytes, waiting_bytes

    def _states_bytes(self, parameter: nn.Parameter) -> int:
        return sum(
            self._live.rounded(each.nbytes)
            for each in states_of(self._optimizer, parameter).values()
        )

    def _workspace_bytes(self) -> int:
        if self._on_card:
            config = workspace_of({"deterministic": self._settings.deterministic})
            return _CUBLAS_HANDLES * workspace_bytes(config)
        return _ONEDNN_HALF_BYTES if self._settings.precision in {"bf16", "fp16"} else _ONEDNN_BYTES

    def _compute_part(self, micro: int, level: int) -> None:
        """Do what the trainer does with a part of a batch."""
        self._recomputation.level = max(0, min(level, self._recomputation.most))
        part = tree_map(lambda each: _of_rows(each, micro), self._batch_of_one)
        self._dropouts.key(0, micro, torch.device("cpu"))
        self._accumulator.begin(micro, 1)
        with self._levers.region():
            with (
                precision.autocast(self._settings.precision, torch.device("cpu")),
                self._levers.saving(),
            ):
                loss = self._task.loss(self._model, self._levers.ordered(part))
            self._accumulator.add(micro, loss.detach(), self._accumulator.gradients_of(loss))

    def _without_data(self) -> ExitStack:
        """Enter the mode in which tensors have no data, and count their bytes."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(self._fake)
            stack.enter_context(self._live)
            return stack.pop_all()


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # missing in torch's stubs
    """Counts the bytes of all storages that operators return, for as long as they live."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peak_bytes = 0
        self._block_bytes = block_bytes
        self._known: set[int] = set()

    def begin(self) -> int:
        """Forget the peak; return what lives now."""
        self.peak_bytes = self.now_bytes
        return self.now_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return result

    def rounded(self, size: int) -> int:
        """Return what a block of so many bytes takes."""
        return -(-size // self._block_bytes) * self._block_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        number = id(storage)  # torch keeps one Python object for a storage as long as that lives
        if number in self._known:
            return
        size = self.rounded(storage.nbytes())
        weakref.finalize(storage, self._forget, number, size).atexit = False
        self._known.add(number)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.now_bytes -= size


def _of_rows(one: object, rows: int) -> object:
    return one.new_empty((rows, *one.shape[1:])) if isinstance(one, Tensor) else one


def _update_bytes(optimizer: Optimizer, parameters: list[nn.Parameter], *, on_card: bool) -> int:
    """What torch's Adam allocates in a step (torch/optim/adam.py).

    Of other optimisers little is known.
    """
    if eight_bit.is_bitsandbytes(optimizer):
        return eight_bit.update_bytes(parameters, on_card=on_card)
    sizes = [0, *(each.numel() * each.element_size() for each in parameters)]
    defaults = optimizer.defaults
    if defaults.get("fused"):
        return 0
    if defaults.get("foreach"):
        return sum(sizes)  # the roots of all second moments at once
    return 2 * max(sizes)  # of one parameter, the root and the root divided
