"""How a model is computed, as far as `train:` says so: recomputed blocks, attention, the order of
pictures, where activations wait, torch.compile.

The training and the plan of its memory use the same levers, so that both do the same.
"""

from __future__ import annotations

import mmap
import resource
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

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

#: In the order in which torch itself takes them on a card that has all.
_KERNELS: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

#: Operators, and the kernel that each one is. The last one is called by torch's `math` alone.
_OPERATORS: Final = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_safe_softmax": "math",
}

#: Smaller activations stay: a page of host memory and a copy each would be worth more than they
#: are.
_LEAST_BYTES: Final = 4096

#: Through these a weight becomes what autocast computes with, and what a product saves of it.
_CASTS: Final = {
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
}

_NARROW: Final = {torch.bfloat16, torch.float16}

#: Graphs of one piece of code, for blocks that are alike or for one model. A training needs two:
#: without and with recomputation. With more, something that changes in every step is compiled into
#: them.
_MOST_GRAPHS: Final = 4

#: Parts that may run out of memory before the first compiled one ends well. The compiler takes host
#: memory itself, and on a CPU the cap counts that.
_MOST_FAILURES: Final = 3

#: Host memory that the compiler takes and keeps. Measured with two small blocks: 95 MiB; larger
#: graphs take more.
_NEEDED_BYTES: Final = 256 * MIB


class ModelLevers:
    """The levers of one model that say which kernels are used and where tensors are."""

    def __init__(
        self, settings: TrainSettings, model: nn.Module, *, device_type: str, on_card: bool
    ) -> None:
        """Put the weights of convolutions into the order that is asked for.

        Args:
            settings: Those of the training.
            model: On its device.
            device_type: Where it really is.
            on_card: What it is computed, or planned, for.
        """
        self._settings = settings
        self._channels_last = settings.channels_last is True or (
            # cuDNN's kernels for tensor cores read this order; in fp32 and on a CPU there is little
            # to gain.
            settings.channels_last == "auto"
            and on_card
            and settings.precision in {"bf16", "fp16"}
            and any(isinstance(module, nn.Conv2d) for module in model.modules())
        )
        self.host_activations: HostActivations | None = None
        if settings.activations_on_host:
            self.host_activations = HostActivations(model, device_type)
        if self._channels_last:
            # Not `model.to`: on tensors without data that replaces each parameter, which a memory
            # plan cannot follow.
            for weight in (*model.parameters(), *model.buffers()):
                weight.data = _channels_last(weight.data)

    def region(self) -> AbstractContextManager[object]:
        """Return the region for the forward and the backward pass of a part: it says which kernel
        of attention is used, where it can. What is recomputed must choose the same one again.

        A kernel that cannot compute a model's attention on this device is replaced by one after it
        in torch's order, so that a training never fails for it; cuDNN's, whose backward pass may
        give other bits each time, is never the replacement. `auto` leaves the choice to torch.
        """
        wanted = self._settings.attention
        if wanted == "auto":
            return nullcontext()
        # Those before it are switched off, not put behind it: on Hopper the first attention of a
        # process puts cuDNN first, whatever priority was set (torch, sdp_utils.cpp).
        names = list(_KERNELS)
        after = names[names.index(wanted) :]
        return sdpa_kernel([_KERNELS[name] for name in after], set_priority=True)

    def saving(self) -> AbstractContextManager[object]:
        """Return the region of the forward pass: where what the backward pass needs is kept."""
        return nullcontext() if self.host_activations is None else self.host_activations.saving()

    def ordered(self, part: Batch) -> Batch:
        """Return a part of a batch with its pictures in the order that the weights have."""
        return map_tensors(_channels_last, part) if self._channels_last else part


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


class Recomputation:
    """Has a model's first blocks compute their activations again in the backward pass, as many as
    one likes, changed at any time between two steps.

    Such a block keeps only its input. That changes memory and time, and no bit of the result: the
    second computation repeats the first, keyed dropout included.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """Take over the `forward` of each block."""
        self.most = len(blocks)
        self.level = 0
        """How many of them are recomputed."""
        for place, block in enumerate(blocks):
            setattr(block, "forward", partial(self._run, place, block.forward))  # noqa: B010 - mypy has methods constant

    def _run(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a block's own
        if place < self.level and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)


def level_of(wanted: str | int, offered: int, most: int) -> int:
    """Return how many of `most` blocks `train.recompute` has recomputed; `auto`: as offered."""
    levels = {"auto": offered, "none": 0, "all": most}
    level = levels[wanted] if isinstance(wanted, str) else wanted
    return max(0, min(level, most))


class KernelWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # missing in torch's stubs
    """Sees which kernels of attention run. Not a profiler: a process has only one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels: set[str] = set()

    @property
    def ran(self) -> str:
        """The kernels that have run, such as `flash`; empty: there was no attention."""
        return "+".join(sorted(self._kernels))

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        name = func._schema.name  # type: ignore[attr-defined]  # of an operator
        self._kernels.update(
            kernel for start, kernel in _OPERATORS.items() if name.startswith(start)
        )
        return func(*args, **(kwargs or {}))


def _attention_flop(query: _Shape, key: _Shape, value: _Shape, *_: object, **__: object) -> int:
    """Count both products for each head of the queries, also where several share their keys: torch
    2.11 refuses those (torch/utils/flop_counter.py).
    """
    *heads, length, width = query
    return 2 * prod(heads) * length * key[-2] * (width + value[-1])


def _backward_flop(
    _: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: object, **___: object
) -> int:
    """Count a product for each factor; not the scores, which are only computed again."""
    return 2 * _attention_flop(query, key, value)


#: For a `FlopCounterMode`: what a card's kernels of attention compute.
FLOP_OF_ATTENTION: Final = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{end}"): count
    for kernel in ("cudnn", "flash", "efficient")
    for end, count in (("", _attention_flop), ("_backward", _backward_flop))
}


class HostActivations:
    """Keeps what the backward pass will need in host memory: each tensor is copied there when the
    forward pass saves it, and comes back when the backward pass asks for it.

    Copies change no bit. Weights stay where they are, also those that autocast has made narrower,
    and so does what a recomputed block computes again. The host needs room for all activations of a
    part of a batch. What a compiled graph saves does not say what it came from: there such weights
    move.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._model = model
        self._device_type = device_type
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self.waiting_bytes = 0
        """Host memory of the forward pass under way, or of the last one, rounding included."""

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the region for a forward pass."""
        self.waiting_bytes = 0
        weights = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}
        # No graph leads to a frozen one, so its copy is known by its shape alone.
        frozen = {
            shape
            for parameter in self._model.parameters()
            if not parameter.requires_grad
            for shape in (parameter.shape, parameter.shape[::-1])
        }

        def is_weight(tensor: Tensor) -> bool:
            if tensor.untyped_storage()._cdata in weights:
                return True
            if not tensor.requires_grad:
                return tensor.dtype in _NARROW and tensor.shape in frozen
            node = tensor.grad_fn
            while node is not None and node.name() in _CASTS:
                node = node.next_functions[0][0]
            leaf = getattr(node, "variable", None)  # of the node that adds up a weight's gradient
            return leaf is not None and leaf.untyped_storage()._cdata in weights

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            if (
                tensor.nbytes < _LEAST_BYTES
                or tensor.device.type != self._device_type
                or is_weight(tensor)
            ):
                return tensor
            once = _once(tensor.detach())
            self.waiting_bytes += power_of_two(once.nbytes)
            fill = _leave if isinstance(tensor, FakeTensor) else self._copied(once)
            size, device = tensor.shape, tensor.device
            # With the strides that it had, though it may take gaps: a compiled backward pass
            # insists on them.
            empty = partial(
                torch.empty_strided, once.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            return lambda: fill(empty()).expand(size)

        def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed()

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _copied(self, tensor: Tensor) -> Callable[[Tensor], Tensor]:
        """Copy it to the host, and return what copies it back into another tensor."""
        host = like(tensor) if tensor.is_cuda else self._shared(tensor)
        # Pageable memory must be written before anything reads it; pinned memory is read in the
        # order of the stream.
        fast = host.is_pinned()
        host.copy_(tensor, non_blocking=fast)
        return lambda back: back.copy_(host, non_blocking=fast)

    def _shared(self, tensor: Tensor) -> Tensor:
        """Return memory that no cap counts, from blocks that stay: the kernel's highest size is
        then that of the rest.

        On a card torch keeps its pinned blocks in the same way, by powers of two.
        """
        layout = torch.empty_like(tensor, device="meta")
        size = power_of_two(layout.nbytes)
        free = self._free[size]
        block = free.pop() if free else mmap.mmap(-1, size)
        flat = torch.frombuffer(block, dtype=tensor.dtype, count=layout.numel())
        host = flat.as_strided(layout.shape, layout.stride())
        weakref.finalize(host, free.append, block).atexit = False
        return host


def _once(tensor: Tensor) -> Tensor:
    """Return the tensor without the dimensions along which it only repeats itself."""
    size = [
        1 if step == 0 else length
        for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(size, tensor.stride())


def _leave(tensor: Tensor) -> Tensor:
    """Take the memory that bringing a tensor back would take; there is no data."""
    return tensor


class Compiling:
    """torch.compile for a model, or for each of its blocks; taken back where it fails or compiles
    again and again.

    The first dimension of what goes in is marked dynamic, so that one graph serves parts of all
    sizes. A part of one sample is computed without it: torch would compile that size anew. Only
    parts of a training are compiled, not its evaluation. The result differs by rounding.
    """

    def __init__(
        self,
        settings: TrainSettings,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        """Take over `forward` of the model or of its blocks, before what else does so. Nothing is
        compiled before the first part.

        Raises:
            TaskError: Blocks shall be compiled, and the task names none.
        """
        self._unit, self._mode, self._backend = settings.compile, settings.compile_mode, backend
        self._pending = self._unit != "off"
        """Whether parts are to be compiled: until it fails."""
        self._on = False
        """Whether such a part is being computed."""
        self._failures = 0
        self._graphs = 0
        self._dropouts = [module for module in model.modules() if isinstance(module, KeyedDropout)]
        self._news: list[tuple[str, dict[str, Any]]] = []
        if self._unit == "block" and not blocks:
            raise TaskError(
                "train.compile: block needs a task that names its blocks; set train.compile: model"
            )
        units = {"off": [], "block": list(blocks), "model": [model]}[self._unit]
        kinds = {tuple(parameter.shape for parameter in unit.parameters()) for unit in units}
        self._most_graphs = _MOST_GRAPHS * len(kinds)
        self._eager: list[Callable[..., Any]] = [unit.forward for unit in units]
        self._made: list[Callable[..., Any]] = []
        """The same, as torch compiles them when they are called."""
        for place, unit in enumerate(units):
            setattr(unit, "forward", partial(self._forward, place))  # noqa: B010 - mypy has methods constant

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events since the last call: `compiled` and `not_compiled`,
        with their figures.
        """
        news, self._news = self._news, []
        return news

    def run(self, rows: int, compute: Callable[[], T]) -> T:
        """Compute a part of so many samples, compiled if that is wanted and possible.

        `compute` must change nothing: after a failure of the compiler it is called again without
        it.
        """
        if not self._pending or rows == 1:
            return compute()
        began_s = time.perf_counter()
        if not self._made and (lack := _lack()) is not None:
            self._pending = False
            self._tell("not_compiled", 0.0, reason=lack)
            return compute()
        try:
            result = self._compiled(compute)
        except Exception as error:
            reason = self._reason(error)
            if reason is None:
                raise
        else:
            self._note(rows, time.perf_counter() - began_s)
            return result
        # Outside the handler, so that what the failed part held is free.
        self._pending = False
        self._forget()
        self._tell("not_compiled", time.perf_counter() - began_s, reason=reason)
        return compute()

    def park(self) -> None:
        """Drop CUDA graphs, which hold memory and addresses; the next part makes new ones."""
        if self._pending and self._mode != "default":
            self._forget()

    def _forget(self) -> None:
        torch.compiler.reset()
        self._graphs = 0

    def _compiled(self, compute: Callable[[], T]) -> T:
        from torch._dynamo import config  # noqa: PLC0415 - takes a second, and most trainings compile nothing
        from torch._inductor import config as inductor  # noqa: PLC0415 - as above

        if not self._made:
            mode = None if self._mode == "default" else self._mode
            self._made = [
                torch.compile(forward, backend=self._backend, mode=mode) for forward in self._eager
            ]
        limits = {"recompile_limit": self._most_graphs, "fail_on_recompile_limit_hit": True}
        self._on = True
        try:
            # One thread: more are processes, and they would outlive a worker that is killed.
            with config.patch(limits), inductor.patch({"compile_threads": 1}):
                if self._mode != "default":
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch has no types
                return compute()
        finally:
            self._on = False

    def _forward(self, place: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the unit's own
        if not self._on:
            return self._eager[place](*args, **kwargs)
        for tensor in (*args, *kwargs.values(), *(dropout.keys for dropout in self._dropouts)):
            if isinstance(tensor, Tensor) and tensor.dim():
                torch._dynamo.mark_dynamic(tensor, 0)
        return self._made[place](*args, **kwargs)

    def _reason(self, error: Exception) -> str | None:
        """Return why to go on without the compiler; `None`: the error is no fault of it."""
        verdict = classify(error)
        if isinstance(error, TrainingError) or verdict.kind is FailureKind.CONTEXT_CORRUPTED:
            return None
        if verdict.kind is not FailureKind.OTHER:
            self._failures += not self._graphs
            bearable = self._graphs or self._failures < _MOST_FAILURES
            return None if bearable else f"memory ran out: {verdict.text}"
        if type(error).__name__ == "FailOnRecompileLimitHit":
            return (
                f"it was compiled more than {self._most_graphs} times, and would be in every step"
            )
        return one_line(error)

    def _note(self, rows: int, seconds: float) -> None:
        graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if graphs != self._graphs:
            self._tell("compiled", seconds, rows=rows, graphs=graphs)
            self._graphs = graphs

    def _tell(self, name: str, seconds: float, **figures: object) -> None:
        common = {"unit": self._unit, "mode": self._mode, "seconds": round(seconds, 3)}
        self._news.append((name, {**common, **figures}))


def _lack() -> str | None:
    """Return why the cap of a CPU leaves no room for the compiler; `None`: it does."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    left_bytes = limit_bytes - psutil.Process().memory_info().data
    if limit_bytes == resource.RLIM_INFINITY or left_bytes >= _NEEDED_BYTES:
        return None
    left_mib, needed_mib = left_bytes // MIB, _NEEDED_BYTES // MIB
    return (
        f"the cap leaves {left_mib} MiB, and the compiler may take and keep {needed_mib} MiB of "
        "that on a CPU"
    )
