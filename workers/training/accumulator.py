"""The gradient of an effective batch, added up over its parts. The memory of the sums is allocated
before the first part.

The backward pass adds each gradient of a part to its sum as soon as it is computed, and frees it.
So the gradients of a part never exist all at once beside the sums, except those of the smallest
parameters, up to 1 MiB, which are copied in one call. A part may run out of memory when some of its
gradients are in their sums. So each sum records up to which row of the batch it counts.
A sum that already holds a part does not add it again, and no later part reaches across that row.

The loss of the effective batch is the sum over its items divided by their count, which is known
before the first part. A parameter that received no gradient from any part has none, as after
`backward`: the optimiser then leaves it unchanged.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from workers.training import schedule
from workers.training.errors import NotFiniteError, TaskError
from workers.training.host_memory import wait_asleep
from workers.training.optimizers import Update
from workers.training.precision import LossScaler
from workers.units import MIB

#: Prefixes of the names of operators with a kink, such as abs: linear on both sides of it.
_WITH_KINK: Final = (
    "AbsBackward", "Clamp", "ReluBackward", "LeakyRelu", "Hardtanh", "Max", "Min", "Amax", "Amin",
    "SmoothL1", "Huber", "Softplus", "LogSigmoid", "Hardsigmoid", "Hardshrink", "Softshrink",
    "Threshold", "PreluKernel",
)  # fmt: skip

#: Upper limit for the gradients that are added in one call, which exist at the same time. A call
#: for each would take 20 us of a processor: half the time of a step of many small layers.
_TOGETHER_BYTES: Final = MIB

#: The term that `torch.nn.utils.clip_grad_norm_` adds to a norm.
_CLIP_EPS: Final = 1e-6


class Accumulator:
    """Sums of the gradients and losses of one effective batch at a time."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Allocate the sums."""
        self.parameters: list[nn.Parameter] = []
        """The trained parameters, in the order of their sums."""
        self.gradients: list[Tensor] = []
        """One sum for each parameter. It counts up to the row in `_added`."""
        self._added: list[int] = []
        """For each sum, the number of rows whose gradient is in it; 0: its content is invalid."""
        #: A list, so that it can be parked like the gradients.
        self.loss: list[Tensor] = []
        self.beginnings = 0
        """Number of calls of `begin`."""
        self.allocate(parameters)
        self.begin(0, 1)

    def is_allocated_for(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the sums belong to exactly these parameters, in their present form."""
        return len(parameters) == len(self.parameters) and all(
            new is old and _matches(new, own)
            for new, old, own in zip(parameters, self.parameters, self.gradients, strict=True)
        )

    def allocate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Allocate sums for exactly these parameters. Call it between two effective batches."""
        held = dict(zip(self.parameters, self.gradients, strict=True))
        self.gradients = [
            held[each] if each in held and _matches(each, held[each]) else _zeros(each)
            for each in parameters
        ]
        self.parameters, self._added = list(parameters), [0] * len(parameters)
        self._small = _smallest(parameters, _TOGETHER_BYTES)
        """Places of the parameters whose gradients are added in one call."""
        self.used = set[int]()
        """Places of the parameters that a loss has depended on."""
        self._fewest_received = len(parameters) + 1
        device = parameters[0].device if parameters else None
        self.loss = [torch.zeros((), dtype=torch.float64, device=device)]

    @property
    def pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that have a gradient, each with its sum."""
        sums = zip(self.parameters, self.gradients, self._added, strict=True)
        return [(parameter, own) for parameter, own, held in sums if held]

    def totals(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return `pairs` after applying the hooks of each parameter, which run once for a batch.

        Raises:
            TaskError: The loss depends on no parameter that requires a gradient.
        """
        if not self._requires_grad:
            raise TaskError(
                "the loss depends on no parameter that requires a gradient; return it as the model "
                "does, without detach(), item() or no_grad(), and leave something to train"
            )
        return [
            (parameter, reduce(_after_hook, (parameter._backward_hooks or {}).values(), own))
            for parameter, own in self.pairs
        ]

    @property
    def mean(self) -> Tensor:
        """The loss of the added parts, divided by the items of the whole batch."""
        return self.loss[0] / self._count

    def begin(self, rows: int, count: float) -> None:
        """Begin an effective batch of `rows` rows and `count` items, and discard the last one."""
        self.beginnings += 1
        self._rows = rows
        self._range_ends: list[int] = []
        """The end of each range of rows; no part reaches across it."""
        self._count = count
        self.done = 0
        """Rows of the finished parts, which are in all sums."""
        self._added = [0] * len(self.parameters)
        self._requires_grad = False

    def extend(self, rows: int) -> None:
        """Add a range of `rows` rows after the others."""
        self._rows += rows
        self._range_ends.append(self._rows)

    @property
    def is_partly_added(self) -> bool:
        """Whether a part has failed when some of its gradients were in their sums. The next part
        completes it, if it would compute those gradients again.
        """
        return any(held > self.done for held in self._added)

    @property
    def remaining(self) -> int:
        """Rows that are not finished; 0: only the update remains."""
        return self._rows - self.done

    def next_rows(self, most_rows: int) -> int:
        """Return the rows of the next part, 0 after the last. A part ends no later than its range,
        or than a part that failed after some of its gradients were in their sums.
        """
        ends = chain(self._added, self._range_ends)
        end = min((each for each in ends if each > self.done), default=self._rows)
        return schedule.next_part(end - self.done, most_rows) if self.remaining else 0

    def add(
        self,
        rows: int,
        loss: Tensor,
        scale: float = 1.0,
        changed: Callable[[nn.Parameter, Tensor], Tensor] = lambda _, gradient: gradient,
        inputs: Sequence[Tensor] = (),
    ) -> None:
        """Add a part, given its summed loss. It may fail at any point: then the part, or smaller
        ones that end where it ends, must be added instead.

        `changed` maps a parameter and its gradient to the tensor to add. `inputs` also get their
        gradients, in `.grad`, as from torch's `backward`.

        Raises:
            TaskError: A gradient is sparse.
        """
        end = self.done + rows

        def take(given: Mapping[int, Tensor]) -> None:
            first = dict[int, Tensor]()
            for place, gradient in given.items():
                if self._added[place] >= end:  # from an attempt that failed later
                    continue
                new = changed(self.parameters[place], gradient)
                if self._added[place]:
                    self.gradients[place].add_(new)
                    self._added[place] = end
                else:
                    first[place] = new
            if first:  # a copy that fails halfway leaves `_added` at 0
                torch._foreach_copy_([self._writable(place) for place in first], [*first.values()])
            for place in first:
                self._added[place] = end

        self.backward(loss, scale, take, inputs)
        with torch.no_grad():
            total = loss.detach()
            self.loss[0].copy_(self.loss[0] + total if self.done else total)
        self._requires_grad = self._requires_grad or any(self._added)
        self.done = end

    def backward(
        self,
        loss: Tensor,
        scale: float,
        take: Callable[[Mapping[int, Tensor]], object],
        inputs: Sequence[Tensor] = (),
    ) -> None:
        """Compute the gradients of a part's summed loss, and pass each to `take` as soon as it
        exists, keyed by the place of its parameter; those of the smallest parameters in one call.
        Gradients and hooks of the parameters stay unchanged; `inputs` get their gradients.

        Raises:
            TaskError: A gradient is sparse.
        """
        self._requires_grad = self._requires_grad or loss.requires_grad
        if not loss.requires_grad or not self.parameters:  # other parts may
            return
        seed = torch.full_like(loss, scale / self._count)
        before = [(each, each.grad, each._backward_hooks) for each in self.parameters]
        given = set[int]()

        def pass_on(*places: int) -> None:
            new = dict[int, Tensor]()
            for place in places:
                parameter = self.parameters[place]
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:
                    new[place] = gradient
            if any(each.is_sparse for each in new.values()):
                raise TaskError(
                    "the gradient of an embedding is sparse, and sums of parts are dense; make the "
                    "embedding with sparse=False, and train it with an optimiser for dense "
                    "gradients"
                )
            given.update(new)
            take(new)

        def hook_of(place: int) -> Callable[[Tensor], None]:
            return lambda _: pass_on(place)

        hooks = [
            each.register_post_accumulate_grad_hook(hook_of(place))  # type: ignore[no-untyped-call]
            for place, each in enumerate(self.parameters)
            if place not in self._small
        ]
        try:
            for parameter, *_ in before:
                parameter.grad = parameter._backward_hooks = None
            torch.autograd.backward(loss, seed, inputs=[*self.parameters, *inputs])
            pass_on(*self._small)
        except RuntimeError:
            _refuse_reentrant(loss)
            raise
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, gradient, own_hooks in before:
                parameter.grad, parameter._backward_hooks = gradient, own_hooks
        if len(given) < self._fewest_received:
            _refuse_reentrant(loss)
            self._fewest_received = len(given)
        self.used.update(given)

    @property
    def flat(self) -> Tensor:
        """An empty tensor in the form that `read` fills: the numbers of all sums in one row."""
        numbers = sum(own.numel() for own in self.gradients)
        dtype = reduce(torch.promote_types, (own.dtype for own in self.gradients), torch.float32)
        return torch.empty(numbers, dtype=dtype, device="meta")

    @torch.no_grad()
    def read(self, into: Tensor) -> tuple[float, list[bool]]:
        """Copy the sums to the host; return the summed loss and which parameters have gradients."""
        for own, there, held in zip(self.gradients, self._places(into), self._added, strict=True):
            if held:
                there.copy_(own, non_blocking=True)
            else:
                there.zero_()
        wait_asleep(self.loss[0].device)
        return (float(self.loss[0]) if self.done else 0.0), [held > 0 for held in self._added]

    @torch.no_grad()
    def write(self, total: Tensor, loss: float, used: Sequence[bool]) -> None:
        """Replace the sums by those of the whole batch, in the form of `read`."""
        for place, there in enumerate(self._places(total)):
            self._writable(place).copy_(there, non_blocking=True)
        self._added = [int(each) for each in used]
        self.loss[0].fill_(loss)
        self._requires_grad = any(used)

    def _writable(self, place: int) -> Tensor:
        """Return the sum to overwrite. Allocate a new one if others hold the old one, such as an
        optimiser that compares a gradient with the next one.
        """
        if _is_shared(self.gradients, place):
            self.gradients[place] = torch.empty_like(self.gradients[place])
        return self.gradients[place]

    def _places(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [own.numel() for own in self.gradients])
        return [part.view(own.shape) for part, own in zip(parts, self.gradients, strict=True)]

    @torch.no_grad()
    def finish(
        self,
        update: Update,
        scaler: LossScaler,
        *,
        step: int,
        clip: float | None,
        agreed: Callable[[float, float], tuple[float, float]] = lambda *own: own,
    ) -> float:
        """Unscale, clip and update, unless the scale was too large; return the loss. May be
        repeated until the update begins. If several trainings update together, `agreed` maps the
        own loss and scaled gradient norm to those of all.

        Raises:
            NotFiniteError: The loss or the gradient is NaN or infinite; nothing was changed.
            TaskError: The loss depends on no parameter that requires a gradient.
            UpdateInterruptedError: Memory ran out in the update.
        """
        totals = self.totals()
        norms = torch.stack(torch._foreach_norm([own for _, own in totals] or self.loss)).double()
        both = torch.stack((self.loss[0], torch.linalg.vector_norm(norms)))
        wait_asleep(both.device)  # only here the host waits for the card
        total, scaled_norm = agreed(*both.tolist())
        loss, norm = total / self._count, scaled_norm / scaler.scale
        if math.isfinite(loss) and not math.isfinite(norm) and scaler.overflowed():
            return loss
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise NotFiniteError(what, value, step)
        factor = 1.0 if clip is None else min(1.0, clip / (norm + _CLIP_EPS))
        update.run(totals, factor / scaler.scale)
        scaler.succeeded()
        return loss


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _smallest(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[int]:
    """Return the places of the smallest parameters, of at most `most_bytes` together. Leave out
    those whose gradients change their type when they are added: that takes memory, and could fail
    when some are in their sums.
    """
    places, left_bytes = list[int](), most_bytes
    for place in sorted(range(len(parameters)), key=lambda place: parameters[place].nbytes):
        left_bytes -= parameters[place].nbytes
        if left_bytes < 0:
            break
        if parameters[place].dtype in {torch.float32, torch.float64}:
            places.append(place)
    return places


def _reference_counts(sums: list[Tensor], place: int) -> tuple[int, int, int]:
    """Count the references to the storage, the tensor and the Python object of a sum."""
    own = sums[place]
    storage = torch._C._storage_Use_Count(own.untyped_storage()._cdata)
    return storage, own._use_count(), sys.getrefcount(own)  # type: ignore[attr-defined]


#: The counts for a tensor that only a list holds.
_COUNTS_IN_LIST: Final = _reference_counts([torch.zeros(1)], 0)


def _is_shared(sums: list[Tensor], place: int) -> bool:
    """Whether anything but this list holds a sum, or a view of it."""
    return any(map(operator.gt, _reference_counts(sums, place), _COUNTS_IN_LIST))


def _matches(parameter: nn.Parameter, own: Tensor) -> bool:
    """Whether a sum has the form of its parameter, which a model may change in place."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return (own.dtype, own.device, own.shape) == (
        dtype, parameter.device, parameter.shape,
    )  # fmt: skip


def _after_hook(gradient: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    given = gradient.clone()  # the hook is called again after an out-of-memory
    changed = hook(given)
    return given if changed is None else changed  # it may have written into `given`


def _refuse_reentrant(loss: Tensor) -> None:
    """Raise a `TaskError` if activations are recomputed in a way that hides parameters."""
    if "CheckpointFunctionBackward" in operators_of(loss):
        raise TaskError(
            "the model uses torch.utils.checkpoint with use_reentrant=True, which "
            "hides the gradients of parts; set use_reentrant=False, in transformers by "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def operators_of(loss: Tensor) -> set[str]:
    """Return autograd's names of the operators that computed a loss."""
    return {node.name() for node in _nodes_of(loss.grad_fn)}


def readers_of(loss: Tensor, parameters: Collection[Tensor]) -> set[str]:
    """Return the names of the operators that have read these parameters directly."""
    return {
        node.name()
        for node in _nodes_of(loss.grad_fn)
        for each, _ in node.next_functions
        if any(getattr(each, "variable", None) is parameter for parameter in parameters)
    }


def kinks_of(loss: Tensor) -> dict[object, set[object]]:
    """Return the operators with a kink whose inputs are numbers or vectors, among those that
    computed a loss. Maps the name and input shapes of each to the shapes of all tensors below it,
    once for each use.
    """
    found: dict[object, set[object]] = {}
    for node in _nodes_of(loss.grad_fn):
        given = [_shapes(each)[at] for each, at in node.next_functions if each and _shapes(each)]
        if given and _has_kink(node) and all(len(shape) < 2 for shape in given):
            below = frozenset(shape for each in _nodes_of(node) for shape in _shapes(each))
            found.setdefault((node.name(), *given), set()).add(below)
    return found


def _has_kink(node: Node) -> bool:
    """Whether an operator has a kink: also a norm that adds up absolute values, and a `where`
    between two inputs that require a gradient.
    """
    name = node.name()
    order = getattr(node, "_saved_ord", 2) if name.startswith("LinalgVectorNorm") else 2
    chooses = name.startswith("Where") and all(each for each, _ in node.next_functions)
    return chooses or name.startswith(_WITH_KINK) or order in {1, math.inf}


def _shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the outputs of an operator."""
    return tuple(tuple(each.shape) for each in getattr(node, "_input_metadata", ()))


def _nodes_of(first: Node | None) -> set[Node]:
    waiting, visited = [first], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            waiting += [each for each, _ in node.next_functions]
    return visited
