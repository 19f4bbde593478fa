"""Ways to compute a model that `train:` selects: recomputed blocks, activations on the host,
torch.compile. Also the memory format of pictures, which the device decides.

The training and its memory plan share these levers, so that both do the same.
"""

from __future__ import annotations

import mmap
import resource
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from workers.oom import classify, one_line
from workers.settings import FailureKind
from workers.training.batches import Batch, map_tensors
from workers.training.errors import TaskError, TrainingError
from workers.training.host_memory import like, power_of_two
from workers.training.keyed_random import KeyedDropout
from workers.training.settings import TrainSettings
from workers.units import MIB

T = TypeVar("T")

_Shape: TypeAlias = Sequence[int]

#: The attention kernel that each operator stands for.
_KERNELS: Final = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}

#: Smaller activations stay on the device: the memory saved is not worth a page and a copy each.
_LEAST_BYTES: Final = 4096

#: Most graphs of one piece of code: of all alike blocks, or of the model. A training needs two,
#: with and without recomputation. More graphs mean that something which changes in every step is
#: compiled into them.
_MOST_GRAPHS: Final = 4

#: Parts that may run out of memory before the first compiled part succeeds. The compiler takes host
#: memory itself, which the cap of a CPU counts.
_MOST_FAILURES: Final = 3

#: Host memory that the compiler takes and keeps. Measured with two small blocks: 95 MiB; larger
#: graphs take more.
_NEEDED_BYTES: Final = 256 * MIB


class ModelLevers:
    """Memory format and place of one model's tensors."""

    def __init__(
        self, settings: TrainSettings, model: nn.Module, *, device_type: str, on_card: bool
    ) -> None:
        """Put the weights of convolutions into the memory format that the device reads fastest.

        Args:
            settings: The section `train:`.
            model: On its device.
            device_type: Type of the device that the tensors are really on.
            on_card: Whether the model is computed, or planned, for a card.
        """
        # cuDNN's kernels for tensor cores read channels last. fp32 or a CPU would gain little.
        self._channels_last = (
            on_card
            and settings.precision in {"bf16", "fp16"}
            and any(isinstance(module, nn.Conv2d) for module in model.modules())
        )
        self.host_activations: HostActivations | None = None
        if settings.activations_on_host:
            self.host_activations = HostActivations(model, device_type)
        if self._channels_last:
            # Not `model.to`: on tensors without data it replaces each parameter, which a memory
            # plan cannot follow.
            for weight in (*model.parameters(), *model.buffers()):
                weight.data = _channels_last(weight.data)

    def saving(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass, which decides where saved activations are kept."""
        return nullcontext() if self.host_activations is None else self.host_activations.saving()

    def ordered(self, part: Batch) -> Batch:
        """Return a part of a batch with its pictures in the memory format of the weights."""
        return map_tensors(_channels_last, part) if self._channels_last else part


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


class Recomputation:
    """Recomputes the activations of a model's first `level` blocks in the backward pass.

    Such a block keeps only its input. That changes memory and time, and no bit of the result: the
    second computation repeats the first, keyed dropout included. `level` may change between two
    steps.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """Replace the `forward` of each block."""
        self.most_level = len(blocks)
        self.level = 0
        """Number of recomputed blocks."""
        for place, block in enumerate(blocks):
            setattr(block, "forward", partial(self._run, place, block.forward))  # noqa: B010 - mypy has methods constant

    def _run(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a block's own
        if place < self.level and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)


def level_of(wanted: str | int, offered: int, most: int) -> int:
    """Return how many of `most` blocks `train.recompute` recomputes; `auto`: `offered`."""
    levels = {"auto": offered, "none": 0, "all": most}
    level = levels[wanted] if isinstance(wanted, str) else wanted
    return max(0, min(level, most))


def _attention_flop(query: _Shape, key: _Shape, value: _Shape, *_: object, **__: object) -> int:
    """Count both matrix products for each query head, also for grouped keys, which torch 2.11
    refuses (torch/utils/flop_counter.py).
    """
    *heads, length, width = query
    return 2 * prod(heads) * length * key[-2] * (width + value[-1])


def _backward_flop(
    _: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: object, **___: object
) -> int:
    """Count one product for each factor; recomputed scores are not counted."""
    return 2 * _attention_flop(query, key, value)


#: Only torch's plain implementation of attention ("math") calls this operator.
_PLAIN_SOFTMAX: Final = torch.ops.aten._safe_softmax

#: Operators that torch does not count, or only with as many keys as queries.
_FLOP_OF_ATTENTION: Final = {
    getattr(torch.ops.aten, f"{kernel}{end}"): count
    for kernel in _KERNELS
    for end, count in (("", _attention_flop), ("_backward", _backward_flop))
} | {_PLAIN_SOFTMAX: lambda *_, **__: 0}


class OperationCounter(FlopCounterMode):
    """Counts floating-point operations, and records the attention kernels. Not a profiler: a
    process can have only one.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_FLOP_OF_ATTENTION)

    @property
    def kernels(self) -> str:
        """Attention kernels that ran, such as `flash`; empty: there was no attention."""
        counts = self.get_flop_counts().get("Global", {})
        names = [
            kernel for name, kernel in _KERNELS.items() if getattr(torch.ops.aten, name) in counts
        ]
        return "+".join(sorted({*names, *(["math"] if _PLAIN_SOFTMAX in counts else [])}))


class HostActivations:
    """Keeps saved activations in host memory: each tensor is copied there when the forward pass
    saves it, and back when the backward pass needs it.

    Differs from `torch.autograd.graph.save_on_cpu`: weights stay, strides are restored, and no cap
    of a CPU counts the copies. Copies change no bit. Activations that a recomputed block computes
    again stay. The host needs room for all activations of a part of a batch.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._model = model
        self._device_type = device_type
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self.waiting_bytes = 0
        """Host memory of the current or last forward pass, rounding included."""

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context for a forward pass."""
        self.waiting_bytes = 0
        weights = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            if (
                tensor.nbytes < _LEAST_BYTES
                or tensor.device.type != self._device_type
                or tensor.untyped_storage()._cdata in weights
            ):
                return tensor
            unexpanded = _unexpanded(tensor.detach())
            self.waiting_bytes += power_of_two(unexpanded.nbytes)
            return self._on_host(unexpanded, tensor.shape)

        def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed()

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _on_host(self, tensor: Tensor, size: torch.Size) -> Callable[[], Tensor]:
        """Copy a tensor to the host. Return a function that copies it back and repeats it up to
        `size`. Tensors of a plan have no data: the function only allocates them again.
        """
        # A compiled backward pass insists on the old strides, even if they leave gaps.
        form, strides, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        empty = partial(torch.empty_strided, form, strides, dtype=dtype, device=device)
        if isinstance(tensor, FakeTensor):
            return lambda: empty().expand(size)
        host = like(tensor) if tensor.is_cuda else self._shared(tensor)
        # Pageable memory must be written before anything reads it. Pinned memory is read in the
        # order of the stream.
        fast = host.is_pinned()
        host.copy_(tensor, non_blocking=fast)
        return lambda: empty().copy_(host, non_blocking=fast).expand(size)

    def _shared(self, tensor: Tensor) -> Tensor:
        """Return memory that no cap counts, from blocks that are kept: the CPU device subtracts the
        shared memory that still exists from the kernel's peak (VmHWM). torch keeps pinned blocks in
        the same way, by powers of two.
        """
        layout = torch.empty_like(tensor, device="meta")
        size = power_of_two(layout.nbytes)
        free = self._free[size]
        block = free.pop() if free else mmap.mmap(-1, size)
        flat = torch.frombuffer(block, dtype=tensor.dtype, count=layout.numel())
        host = flat.as_strided(layout.shape, layout.stride())
        weakref.finalize(host, free.append, block).atexit = False
        return host


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return the tensor without the dimensions along which it only repeats itself."""
    size = [
        1 if step == 0 else length
        for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(size, tensor.stride())


class Compiling:
    """Applies torch.compile to a model or to each block, and stops if that fails or compiles
    repeatedly.

    The first dimension of inputs is marked dynamic, so that one graph serves parts of all sizes. A
    part of one sample is not compiled, because torch would compile that size separately. Only parts
    of a training are compiled, not its evaluation. The result differs by rounding.
    """

    def __init__(
        self,
        settings: TrainSettings,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        tell: Callable[..., None],
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        """Replace `forward` of the model or of its blocks, before other levers do. Nothing is
        compiled before the first part. `tell` gets the events `compiled` and `not_compiled`.

        Raises:
            TaskError: `train.compile` is `block`, and the task names no blocks.
        """
        self._unit, self._backend, self._tell_event = settings.compile, backend, tell
        self._pending = self._unit != "off"
        """Whether to compile parts; false after a failure."""
        self._in_compiled_part = False
        """Whether a compiled part is being computed."""
        self._failures = 0
        self._graphs = 0
        self._dropouts = [module for module in model.modules() if isinstance(module, KeyedDropout)]
        if self._unit == "block" and not blocks:
            raise TaskError(
                "train.compile: block needs a task that names its blocks; set train.compile: model"
            )
        units = {"off": [], "block": list(blocks), "model": [model]}[self._unit]
        kinds = {tuple(parameter.shape for parameter in unit.parameters()) for unit in units}
        self._most_graphs = _MOST_GRAPHS * len(kinds)
        self._eager: list[Callable[..., Any]] = [unit.forward for unit in units]
        self._compiled: list[Callable[..., Any]] = []
        """Compiled versions of `_eager`; torch compiles them when they are called."""
        for place, unit in enumerate(units):
            setattr(unit, "forward", partial(self._forward, place))  # noqa: B010 - mypy has methods constant

    def run(self, rows: int, compute: Callable[[], T]) -> T:
        """Compute a part of `rows` samples, compiled if that is wanted and possible.

        `compute` must change nothing: after a compiler failure it is called again, uncompiled.
        """
        if not self._pending or rows == 1:
            return compute()
        began_s = time.perf_counter()
        if not self._compiled and (lack := _lack_of_memory()) is not None:
            self._pending = False
            self._tell("not_compiled", 0.0, reason=lack)
            return compute()
        try:
            result = self._run_compiled(compute)
        except Exception as error:
            reason = self._reason_to_stop(error)
            if reason is None:
                raise
        else:
            self._report_graphs(rows, time.perf_counter() - began_s)
            return result
        # Outside the handler, so that the memory of the failed part is free.
        self._pending = False
        torch.compiler.reset()
        self._graphs = 0
        self._tell("not_compiled", time.perf_counter() - began_s, reason=reason)
        return compute()

    def _run_compiled(self, compute: Callable[[], T]) -> T:
        from torch._dynamo import config  # noqa: PLC0415 - takes a second, and most trainings compile nothing
        from torch._inductor import config as inductor  # noqa: PLC0415 - as above

        if not self._compiled:
            self._compiled = [
                torch.compile(forward, backend=self._backend) for forward in self._eager
            ]
        limits = {"recompile_limit": self._most_graphs, "fail_on_recompile_limit_hit": True}
        self._in_compiled_part = True
        try:
            # One thread: more threads are processes, which would outlive a killed worker.
            with config.patch(limits), inductor.patch({"compile_threads": 1}):
                return compute()
        finally:
            self._in_compiled_part = False

    def _forward(self, place: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the unit's own
        if not self._in_compiled_part:
            return self._eager[place](*args, **kwargs)
        for tensor in (*args, *kwargs.values(), *(dropout.keys for dropout in self._dropouts)):
            if isinstance(tensor, Tensor) and tensor.dim():
                torch._dynamo.mark_dynamic(tensor, 0)
        return self._compiled[place](*args, **kwargs)

    def _reason_to_stop(self, error: Exception) -> str | None:
        """Return why to continue without the compiler; `None`: the error is not the compiler's."""
        verdict = classify(error)
        if isinstance(error, TrainingError) or verdict.kind is FailureKind.CONTEXT_CORRUPTED:
            return None
        if verdict.kind is not FailureKind.OTHER:
            self._failures += not self._graphs
            bearable = self._graphs or self._failures < _MOST_FAILURES
            return None if bearable else f"memory ran out: {one_line(error)}"
        if type(error).__name__ == "FailOnRecompileLimitHit":
            return (
                f"it was compiled more than {self._most_graphs} times, and would be in every step"
            )
        return one_line(error)

    def _report_graphs(self, rows: int, seconds: float) -> None:
        graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if graphs != self._graphs:
            self._tell("compiled", seconds, rows=rows, graphs=graphs)
            self._graphs = graphs

    def _tell(self, name: str, seconds: float, **figures: object) -> None:
        self._tell_event(name, unit=self._unit, seconds=round(seconds, 3), **figures)


def _lack_of_memory() -> str | None:
    """Return why the cap of a CPU leaves no room for the compiler; `None`: there is room."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    left_bytes = limit_bytes - psutil.Process().memory_info().data
    if limit_bytes == resource.RLIM_INFINITY or left_bytes >= _NEEDED_BYTES:
        return None
    left_mib, needed_mib = left_bytes // MIB, _NEEDED_BYTES // MIB
    return (
        f"the cap leaves {left_mib} MiB, and the compiler may take and keep {needed_mib} MiB of "
        "that on a CPU"
    )
