"""Predicts whether a training fits, without a card and without its memory: it is computed on
tensors that have no data.

Covers tensors: weights, sums of gradients, optimiser states, averaged weights, and the peak of the
activations in a part of a batch. Does not cover what a runtime takes (see `devices`), nor what an
allocator loses between its blocks.

`python -m workers.training.memory_plan` answers `plan`: it reads one JSON object from standard
input, and writes one as the last line of standard output. A user's task prints to standard error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.data import default_collate

from workers.host.cuda_environment import workspace_bytes, workspace_of
from workers.oom import one_line
from workers.training import order, precision
from workers.training.accumulator import Accumulator
from workers.training.batches import map_tensors, tensors_in
from workers.training.cut import BlockArgs, Cut, Portion, only_hidden
from workers.training.dispatch_modes import Operator, OperatorMode, Returned
from workers.training.errors import TrainingError
from workers.training.host_memory import host_bytes, power_of_two
from workers.training.host_states import hosted_of, parts_of
from workers.training.keyed_random import Dropouts
from workers.training.lora import new_model
from workers.training.model_levers import ModelLevers, Recomputation, level_of
from workers.training.models import GPTS
from workers.training.optimizers import Average, allocate_states, states_of, update_bytes
from workers.training.schedule import offered_micro_batches
from workers.training.settings import FOLDER_PRESETS, PICTURE_PRESETS, TrainSettings
from workers.training.tasks import TrainTask, find_task, refuse_without_data, trained_parameters
from workers.units import MIB

#: Block size to which the caching allocator rounds up (kMinBlockSize in
#: c10/cuda/CUDACachingAllocator.cpp).
_CUDA_BLOCK_BYTES: Final = 512

#: cuBLAS handles of a training: torch creates one for each thread that multiplies
#: (at/cuda/detail/DeviceThreadHandles.h), and an autograd thread computes the gradients.
_CUBLAS_HANDLES: Final = 2

#: Workspace of oneDNN on a CPU, measured with one thread (torch 2.13): 1 MiB for matrices, 4 MiB
#: for convolutions, 8 MiB in half precision.
_ONEDNN_BYTES: Final = 4 * MIB
_ONEDNN_HALF_BYTES: Final = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device that a training takes with parts of `micro` samples; for a report."""

    micro: int
    level: int
    """Number of recomputed blocks."""
    weights_bytes: int
    gradients_bytes: int
    """Sums over the parts of a batch, in fp32."""
    optimizer_bytes: int
    """Optimiser states on the device."""
    average_bytes: int
    activations_bytes: int
    """Peak of a part beyond the state: what the backward pass needs, and the part's gradients."""
    update_bytes: int
    """Peak of the update beyond the state; no activations exist then."""
    workspace_bytes: int
    """Workspaces of libraries."""
    on_host_bytes: int
    """Host memory, pinned or not, rounding included: optimiser states, averaged weights,
    activations, the copy for a checkpoint, and the state received for it from the process with the
    lent blocks. Not a part of the total.
    """
    checkpoint_copy_bytes: int
    """Part of `on_host_bytes`: the copy of the state from which a checkpoint is written."""

    @property
    def state_bytes(self) -> int:
        """Bytes that are allocated during the whole training."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.average_bytes

    @property
    def total_bytes(self) -> int:
        """Peak of the training."""
        highest_bytes = max(self.activations_bytes, self.update_bytes)
        return self.state_bytes + highest_bytes + self.workspace_bytes


class MemoryPlanner:
    """A training of one task on tensors without data.

    Raises:
        TaskError: There is nothing to train, or no data.
        Exception: Whatever the model or data set raises. Some models fail on tensors without data.
    """

    def __init__(
        self,
        task: TrainTask,
        settings: TrainSettings,
        *,
        on_card: bool,
        with_data: bool = False,
        portion: Portion | None = None,
    ) -> None:
        """Make the model and everything that outlives a step, without memory for it.

        `with_data` makes the model as for a training, and then removes its data: some models can be
        made in no other way. With a `portion` the planner has one part of a divided model.
        """
        self._task = task
        self._settings = settings
        self._on_card = on_card
        if task.largest is None:
            refuse_without_data(task)
            key = order.Sample(number=0, epoch=0, index=0)
            sample = task.dataset[key if task.by_sample else 0]
            self._batch_of_one = (task.collate or default_collate)([sample])
        else:
            self._batch_of_one = task.largest()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._live = _LiveBytes(_CUDA_BLOCK_BYTES if on_card else 1)
        held = [0]
        self._model = self._empty_model(with_data=with_data).train()
        with self._fake_tensors():
            self.cut = None if portion is None else Cut(task, settings, self._model, portion)
            """How the model is divided; `None`: this planner has the whole model."""
            blocks = task.blocks(self._model) if self.cut is None else self.cut.blocks
            self._levers = ModelLevers(settings, self._model, device_type="cpu", on_card=on_card)
            self._recomputation = Recomputation(blocks)
            self._dropouts = Dropouts(self._model, 0)
            held.append(self._live.now_bytes)
            self._parameters = trained_parameters(task, self._model)
            self._accumulator = Accumulator(self._parameters)
            held.append(self._live.now_bytes)
            self._optimizer = task.new_optimizer(self._model, settings)
            allocate_states(self._optimizer)
            held.append(self._live.now_bytes)
            if settings.ema_decay is not None and settings.ema_on == "device":
                self._average = Average(self._parameters, settings.ema_decay)
            held.append(self._live.now_bytes)
        self._held_bytes = [after - before for before, after in pairwise(held)]
        self._average_on_host_bytes = 0
        if settings.ema_decay is not None and settings.ema_on == "host":
            sizes = [parameter.nbytes for parameter in self._parameters]
            # A card needs a staging block as large as the largest weight.
            staging_bytes = power_of_two(max(sizes)) if on_card else 0
            self._average_on_host_bytes = host_bytes(sizes, on_card=on_card) + staging_bytes
        averaged = [] if settings.ema_decay is None else self._parameters
        copied = tensors_in([self._model.state_dict(), *self._optimizer.state.values(), averaged])
        sizes = [tensor.nbytes for tensor in copied]
        self.saved_bytes = sum(sizes)
        """Bytes that this process contributes to a checkpoint."""
        self._checkpoint_copy_bytes = host_bytes(sizes, on_card=on_card)
        self._received_bytes = 0
        """Bytes of a checkpoint that come from the process with the lent blocks."""
        self._cached_update_bytes = cache(self._update_bytes)
        self._cached_part_bytes = cache(self._part_bytes)

    def _empty_model(self, *, with_data: bool) -> nn.Module:
        """Return the model without data, and count its bytes."""
        if with_data:
            with torch.random.fork_rng(devices=[]):
                model = new_model(self._task, self._settings)
        with self._fake_tensors():
            if not with_data:
                model = new_model(self._task, self._settings)
            self._replace_weights(model)
        return model

    def _replace_weights(self, model: nn.Module) -> None:
        """Replace weights that have data, such as those of a file, by weights without data."""
        replaced: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None and not isinstance(weight, FakeTensor):
                    empty = torch.empty_strided(weight.size(), weight.stride(), dtype=weight.dtype)
                    new = nn.Parameter(empty, requires_grad=weight.requires_grad)
                    module._parameters[name] = replaced.setdefault(id(weight), new)

    @property
    def most_level(self) -> int:
        """Number of blocks that can be recomputed."""
        return self._recomputation.most_level

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums of gradients that a member of a team sends in each step."""
        return self._accumulator.flat.nbytes

    def largest_micro(
        self, cap_bytes: int, level: int, share_pct: int | None = None
    ) -> MemoryPlan | None:
        """Return the plan with the largest micro-batch that fits; `None`: none does."""
        *smaller, most = offered_micro_batches(self._settings)
        whole = self.plan(most, level, share_pct)
        if whole.total_bytes <= cap_bytes:  # the whole batch fits in most trainings
            return whole
        fitting = bisect_right(
            smaller, cap_bytes, key=lambda micro: self.plan(micro, level, share_pct).total_bytes
        )
        return self.plan(smaller[fitting - 1], level, share_pct) if fitting else None

    def _update_bytes(self, share_pct: int) -> tuple[int, int, int]:
        """Return the bytes of states on the device and on the host, and the peak of an update."""
        optimizer, on_card = self._optimizer, self._on_card
        hosted = hosted_of(self._parameters, share_pct)
        on_host_bytes = sum(map(self._states_bytes_of, hosted))
        on_device = [parameter for parameter in self._parameters if parameter not in set(hosted)]
        parts_bytes = [
            sum(map(self._states_bytes_of, part)) + update_bytes(optimizer, part, on_card=on_card)
            for part in parts_of(optimizer, hosted)
        ]
        highest_bytes = max(update_bytes(optimizer, on_device, on_card=on_card), *parts_bytes, 0)
        sizes = [
            tensor.nbytes
            for parameter in hosted
            for tensor in states_of(optimizer, parameter).values()
        ]
        return (
            self._held_bytes[2] - on_host_bytes,
            host_bytes(sizes, on_card=on_card),
            highest_bytes,
        )

    def plan(self, micro: int, level: int, share_pct: int | None = None) -> MemoryPlan:
        """Return the plan for parts of `micro` samples and this share of states on the host."""
        share_pct = self._settings.first_share_pct if share_pct is None else share_pct
        on_device_bytes, on_host_bytes, highest_bytes = self._cached_update_bytes(share_pct)
        activations_bytes, waiting_bytes = self._cached_part_bytes(micro, level)
        weights_bytes, gradients_bytes, _, average_bytes = self._held_bytes
        return MemoryPlan(
            micro=micro,
            level=level,
            weights_bytes=weights_bytes,
            gradients_bytes=gradients_bytes,
            optimizer_bytes=on_device_bytes,
            average_bytes=average_bytes,
            activations_bytes=activations_bytes,
            update_bytes=highest_bytes,
            workspace_bytes=self._workspace_bytes(),
            on_host_bytes=(
                on_host_bytes
                + self._average_on_host_bytes
                + waiting_bytes
                + self._checkpoint_copy_bytes
                + self._received_bytes
            ),
            checkpoint_copy_bytes=self._checkpoint_copy_bytes,
        )

    def _part_bytes(self, micro: int, level: int) -> tuple[int, int]:
        """Return the bytes of a part beyond the state, and those of its activations on the host."""
        with self._fake_tensors():
            before_bytes = self._live.reset_peak()
            self._compute_part(micro, level)
        waiting = self._levers.host_activations
        waiting_bytes = 0 if waiting is None else waiting.waiting_bytes
        return self._live.peak_bytes - before_bytes, waiting_bytes

    def _compute_part(self, micro: int, level: int) -> None:
        """Compute a part of a batch as the trainer does."""
        cpu = torch.device("cpu")
        self._recomputation.level = max(0, min(level, self._recomputation.most_level))
        self._dropouts.key(0, micro, cpu)
        self._accumulator.begin(micro, 1)
        with precision.autocast(self._settings.precision, cpu), self._levers.saving():
            loss, inputs = self._part_loss(micro)
        self._accumulator.add(micro, loss, inputs=inputs)

    def _part_loss(self, micro: int) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of `micro` samples, and the further tensors that get a gradient."""
        part = map_tensors(lambda one: one.new_empty((micro, *one.shape[1:])), self._batch_of_one)
        return self._task.loss(self._model, self._levers.ordered(part)), []

    def plan_lent_state(self, lent_bytes: int) -> None:
        """Add `lent_bytes` to the checkpoints: the state of the lent blocks, which is received in
        host memory and copied there.
        """
        self._received_bytes = lent_bytes
        self._checkpoint_copy_bytes += lent_bytes

    def lent_inputs(self, micro: int) -> tuple[Tensor, list[dict[str, Any]], list[int]]:
        """Return the lent blocks' inputs for `micro` samples: hidden states, kinds and of_block."""
        inputs: list[tuple[Tensor, list[dict[str, Any]], list[int]]] = []

        def compute(hidden: Tensor, given: BlockArgs) -> Tensor:
            inputs.append((hidden, given.kinds, given.of_block))
            return hidden * 1  # the answer is another tensor

        assert self.cut is not None  # noqa: S101 - it leads
        assert self.cut.lent is not None  # noqa: S101 - as above
        self.cut.lent.compute = compute
        with self._fake_tensors():
            self._compute_part(micro, self.most_level)
        return inputs[-1]

    def _states_bytes_of(self, parameter: nn.Parameter) -> int:
        states = states_of(self._optimizer, parameter).values()
        return sum(self._live.rounded(tensor.nbytes) for tensor in states)

    def _workspace_bytes(self) -> int:
        if self._on_card:
            config = workspace_of({"deterministic": self._settings.deterministic})
            return _CUBLAS_HANDLES * workspace_bytes(config)
        return _ONEDNN_HALF_BYTES if self._settings.precision in {"bf16", "fp16"} else _ONEDNN_BYTES

    @contextmanager
    def _fake_tensors(self) -> Iterator[None]:
        """Make tensors without data in the `with` block, and count their bytes."""
        with torch.random.fork_rng(devices=[]), self._fake, self._live:
            yield


class _LiveBytes(OperatorMode):  # type: ignore[no-untyped-call]  # missing in torch's stubs
    """Counts the bytes of all storages that operators return, while these storages live."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self._block_bytes = block_bytes
        self._counted: set[int] = set()

    def reset_peak(self) -> int:
        """Reset the peak to the bytes that live now, and return these."""
        self.peak_bytes = self.now_bytes
        return self.now_bytes

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Count the tensors that an operator returns."""
        result = func(*args, **given)
        for each in tensors_in([result]):
            self._count(each.untyped_storage())
        return result

    def rounded(self, size: int) -> int:
        """Return the bytes that the allocator takes for a block of `size` bytes."""
        return -(-size // self._block_bytes) * self._block_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        number = id(storage)  # torch keeps one Python object per storage while that lives
        if number in self._counted:
            return
        size = self.rounded(storage.nbytes())
        weakref.finalize(storage, self._forget, number, size).atexit = False
        self._counted.add(number)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, number: int, size: int) -> None:
        self._counted.discard(number)
        self.now_bytes -= size


class LentBlocksPlanner(MemoryPlanner):
    """Plans for the process that computes the lent blocks; `leader` is its leader's planner."""

    def __init__(self, leader: MemoryPlanner, *args: Any, **how: Any) -> None:  # noqa: ANN401 - as above
        super().__init__(*args, **how)
        self._leader, self._lent_inputs = leader, leader.lent_inputs(1)
        leader.plan_lent_state(self.saved_bytes)
        self._checkpoint_copy_bytes = 0  # it writes no checkpoint

    def _part_bytes(self, micro: int, level: int) -> tuple[int, int]:
        self._lent_inputs = self._leader.lent_inputs(micro)
        return super()._part_bytes(micro, level)

    def _part_loss(self, _: int) -> tuple[Tensor, list[Tensor]]:
        hidden, kinds, of_block = self._lent_inputs
        first = out = torch.empty(hidden.shape, dtype=hidden.dtype, requires_grad=True)
        own = map_tensors(lambda each: torch.empty(each.shape, dtype=each.dtype), kinds)
        assert self.cut is not None  # noqa: S101 - it was made with a portion
        for block, place in zip(self.cut.blocks, of_block, strict=True):
            out = only_hidden(block(out, *own[place]["args"], **own[place]["kwargs"]))
        return (out * torch.empty_like(out)).sum(), [first]


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the steps to show for each cap, and the blocks computed there; or why no plan was
    possible.

    `question` has `settings`, `seed` and `caps`. Each cap has `cap_bytes` and `device`. If two
    members divide the model, the caps are theirs, and `budgets_bytes` has the budgets of both.
    """
    settings = TrainSettings.model_validate(question["settings"])
    for key, path in (("model", settings.model), ("data", settings.data)):
        is_read = settings.preset in {*FOLDER_PRESETS, *PICTURE_PRESETS}
        if is_read and path and not Path(path).expanduser().exists():
            return {"not_planned": f"train.{key}: {path} is not on this machine"}
    if settings.preset in GPTS:
        # The content of the text changes no size, and the text may be on other PCs only. Its
        # longest document is as long as a window.
        settings = settings.model_copy(update={"data": None, "documents": "windows"})
    try:
        task = find_task(settings, question["seed"])
        planners = _planners(task, settings, question)
        cut = planners[0].cut
        return {
            "blocks": max(planner.most_level for planner in planners),
            "lent": None if cut is None else cut.lent_range,
            "sums_bytes": planners[0].sums_bytes,
            "caps": [
                {
                    **cap,
                    "blocks": planner.most_level,
                    "steps": _steps_to_show(planner, settings, cap["cap_bytes"]),
                }
                for cap, planner in zip(question["caps"], planners, strict=True)
            ],
        }
    except TrainingError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - a user's model fails in any way
        reason = one_line(error)
        return {"not_planned": f"the model cannot be computed on tensors without data: {reason}"}


def _planners(
    task: TrainTask, settings: TrainSettings, question: Mapping[str, Any]
) -> list[MemoryPlanner]:
    """Return a planner for each cap."""
    on_card = [cap["device"] == "cuda" for cap in question["caps"]]
    make = partial(MemoryPlanner, task, settings, with_data=question.get("with_data", False))
    if "budgets_bytes" not in question:
        of_device = {each: make(on_card=each) for each in set(on_card)}
        return [of_device[each] for each in on_card]
    portions = [
        Portion(leads=leads, budgets_bytes=tuple(question["budgets_bytes"]))
        for leads in (True, False)
    ]
    leader = make(on_card=on_card[0], portion=portions[0])
    other = partial(LentBlocksPlanner, leader, *make.args, **make.keywords)
    return [leader, other(on_card=on_card[1], portion=portions[1])]


def _steps_to_show(
    planner: MemoryPlanner, settings: TrainSettings, cap_bytes: int
) -> list[dict[str, Any]]:
    """Return the smallest step; if it fits, also the largest with and without memory savings."""
    least, share_pct = offered_micro_batches(settings)[0], settings.first_share_pct
    most_share_pct = 100 if settings.states_on_host == "auto" else share_pct
    smallest = planner.plan(least, planner.most_level, most_share_pct)
    plans = []
    if smallest.total_bytes <= cap_bytes:
        levels = 0, level_of(settings.recompute, 0, planner.most_level), planner.most_level
        usual = [(level, share_pct) for level in levels]
        points = [*usual, (0, most_share_pct), (planner.most_level, most_share_pct)]
        plans = [
            planner.largest_micro(cap_bytes, *point) or planner.plan(least, *point)
            for point in points
        ]
    return [_step(plan, settings.batch, cap_bytes) for plan in dict.fromkeys([*plans, smallest])]


def _step(plan: MemoryPlan, batch: int, cap_bytes: int) -> dict[str, Any]:
    parts = {key: value for key, value in asdict(plan).items() if key.endswith("_bytes")}
    on_host = {key: parts.pop(key) for key in ("checkpoint_copy_bytes", "on_host_bytes")}
    return {
        "micro_batch": plan.micro,
        "accumulation": -(-batch // plan.micro),
        "memory_level": plan.level,
        **parts,
        "total_bytes": plan.total_bytes,
        **on_host,
        "fits": plan.total_bytes <= cap_bytes,
    }


def main() -> None:
    """Answer on standard output. A model that cannot be planned without data is planned with data,
    in a new process: a cached model may now hold tensors without data.
    """
    output, sys.stdout = sys.stdout, sys.stderr
    question = json.load(sys.stdin)
    answered = json.dumps(answer(question))
    if '"not_planned"' in answered and not question.get("with_data"):
        again = json.dumps({**question, "with_data": True})
        command = [sys.executable, "-m", "workers.training.memory_plan"]
        done = subprocess.run(  # noqa: S603 - this module again
            command, input=again, stdout=subprocess.PIPE, text=True, check=False
        )
        answered = (done.stdout.splitlines() or [answered])[-1]
    print(answered, file=output)


if __name__ == "__main__":
    main()
