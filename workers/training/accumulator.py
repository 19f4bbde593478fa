"""The gradient of an effective batch, added up over its parts in memory that exists before its
first part.

Each gradient of a part goes into its sum as soon as the backward pass has it, and is freed: beside
the sums, the gradients of a part never live all at once. Only those of the smallest parameters do,
up to 1 MiB: those of a first part are copied in one call. A part may run out of memory when some of
its gradients are in their sums already. So each sum says up to which row of the batch it counts:
where it holds those of a part, it does not take them again, and no part reaches across such a row.

The loss of the effective batch is the sum over its items divided by their count, which is known
before the first part. A parameter that no part gave a gradient has none, as after `backward`: the
optimiser then leaves it alone.
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

#: How the names of operators begin that are straight on both sides of a bend.
_BENDS: Final = (
    "AbsBackward", "Clamp", "ReluBackward", "LeakyRelu", "Hardtanh", "Max", "Min", "Amax", "Amin",
    "SmoothL1", "Huber", "Softplus", "LogSigmoid", "Hardsigmoid", "Hardshrink", "Softshrink",
    "Threshold", "PreluKernel",
)  # fmt: skip

#: The gradients that are taken together live at once, and take so much at most. A call for each
#: takes 20 us of a processor, which is half of the time of a step of many small layers.
_TOGETHER_BYTES: Final = MIB

#: What `torch.nn.utils.clip_grad_norm_` adds to a norm.
_CLIP_EPS: Final = 1e-6


class Accumulator:
    """Sums of gradients and of losses of one effective batch after the other."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Allocate the sums."""
        self.parameters: list[nn.Parameter] = []
        """Those that are trained, in the order of their sums."""
        self.gradients: list[Tensor] = []
        """The sums, by parameter. What they hold counts up to the row that `_held` says."""
        self._held: list[int] = []
        """For each sum the last row whose gradient is in it; 0: what it holds means nothing."""
        #: A list, so that it can be parked like the gradients.
        self.loss: list[Tensor] = []
        self.beginnings = 0
        """Counts the calls of `begin`."""
        self.hold(parameters)
        self.begin(0, 1)

    def holds(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the sums are those of just these parameters, as they are now."""
        return len(parameters) == len(self.parameters) and all(
            new is old and _fits(new, own)
            for new, old, own in zip(parameters, self.parameters, self.gradients, strict=True)
        )

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have sums for these parameters alone. Call it between two effective batches."""
        held = dict(zip(self.parameters, self.gradients, strict=True))
        self.gradients = [
            held[each] if each in held and _fits(each, held[each]) else _zeros(each)
            for each in parameters
        ]
        self.parameters, self._held = list(parameters), [0] * len(parameters)
        self._small = _smallest(parameters, _TOGETHER_BYTES)
        """The places of parameters whose gradients are added in one call."""
        self.used = set[int]()
        """The places of parameters that a loss has depended on."""
        self._fewest = len(parameters) + 1
        device = parameters[0].device if parameters else None
        self.loss = [torch.zeros((), dtype=torch.float64, device=device)]

    @property
    def pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that have a gradient, each with its sum."""
        sums = zip(self.parameters, self.gradients, self._held, strict=True)
        return [(parameter, own) for parameter, own, held in sums if held]

    def totals(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the same after the hooks of each parameter, which are called once in a batch.

        Raises:
            TaskError: The loss depends on nothing that wants a gradient.
        """
        if not self._follows:
            raise TaskError(
                "the loss depends on no parameter that wants a gradient; return it as the model "
                "gives it, without detach(), item() or no_grad(), and leave something to train"
            )
        return [
            (parameter, reduce(_hooked, (parameter._backward_hooks or {}).values(), own))
            for parameter, own in self.pairs
        ]

    @property
    def mean(self) -> Tensor:
        """The loss of what was added, divided by the items of the whole batch."""
        return self.loss[0] / self._count

    def begin(self, rows: int, count: float) -> None:
        """Begin an effective batch of so many rows and items; what was there is forgotten."""
        self.beginnings += 1
        self._rows = rows
        self._ends: list[int] = []
        """Where each range of its rows ends: no part reaches across."""
        self._count = count
        self.done = 0
        """Rows of the finished parts, of which all sums hold what there is."""
        self._held = [0] * len(self.parameters)
        self._follows = False

    def extend(self, rows: int) -> None:
        """Have another range of so many rows after the others."""
        self._rows += rows
        self._ends.append(self._rows)

    @property
    def is_torn(self) -> bool:
        """Whether a part has failed when some of its gradients were in their sums. What is computed
        next completes it, as long as it would give those gradients again.
        """
        return any(held > self.done for held in self._held)

    @property
    def remaining(self) -> int:
        """Rows that are still missing; 0: only the update is left."""
        return self._rows - self.done

    def next_rows(self, most_rows: int) -> int:
        """Return the size of the next part, 0 after the last. It ends at the latest where its range
        does, or a part that failed after some of its gradients were in their sums.
        """
        ends = chain(self._held, self._ends)
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
        """Add a part, of which this is the summed loss. It may fail at any place: then the part,
        or smaller ones that end where it ends, are added instead.

        `changed` sees each gradient of a parameter, and returns what is added. `inputs` get their
        gradients as well, as `backward` of torch leaves them.

        Raises:
            TaskError: A gradient is sparse.
        """
        end = self.done + rows

        def take(given: Mapping[int, Tensor]) -> None:
            first = dict[int, Tensor]()
            for place, gradient in given.items():
                if self._held[place] >= end:  # of an attempt that failed later
                    continue
                new = changed(self.parameters[place], gradient)
                if self._held[place]:
                    self.gradients[place].add_(new)
                    self._held[place] = end
                else:
                    first[place] = new
            if first:  # where the copy ends halfway, what is there means nothing still
                torch._foreach_copy_([self._anew(place) for place in first], [*first.values()])
            for place in first:
                self._held[place] = end

        self.backward(loss, scale, take, inputs)
        with torch.no_grad():
            total = loss.detach()
            self.loss[0].copy_(self.loss[0] + total if self.done else total)
        self._follows = self._follows or any(self._held)
        self.done = end

    def backward(
        self,
        loss: Tensor,
        scale: float,
        take: Callable[[Mapping[int, Tensor]], object],
        inputs: Sequence[Tensor] = (),
    ) -> None:
        """Compute the gradients of a part's summed loss, and hand over each, by the place of its
        parameter, when it is there; those of the smallest together. Gradients and hooks of the
        parameters stay as they were; `inputs` get theirs.

        Raises:
            TaskError: A gradient is sparse.
        """
        self._follows = self._follows or loss.requires_grad
        if not loss.requires_grad or not self.parameters:  # of a part; others may
            return
        seed = torch.full_like(loss, scale / self._count)
        before = [(each, each.grad, each._backward_hooks) for each in self.parameters]
        given = set[int]()

        def taken(*places: int) -> None:
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

        def hooked(place: int) -> Callable[[Tensor], None]:
            return lambda _: taken(place)

        hooks = [
            each.register_post_accumulate_grad_hook(hooked(place))  # type: ignore[no-untyped-call]
            for place, each in enumerate(self.parameters)
            if place not in self._small
        ]
        try:
            for parameter, *_ in before:
                parameter.grad = parameter._backward_hooks = None
            torch.autograd.backward(loss, seed, inputs=[*self.parameters, *inputs])
            taken(*self._small)
        except RuntimeError:
            _refuse_reentrant(loss)
            raise
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, gradient, own_hooks in before:
                parameter.grad, parameter._backward_hooks = gradient, own_hooks
        if len(given) < self._fewest:
            _refuse_reentrant(loss)
            self._fewest = len(given)
        self.used.update(given)

    @property
    def flat(self) -> Tensor:
        """What `read` fills, without data: the numbers of all sums one after the other."""
        numbers = sum(own.numel() for own in self.gradients)
        dtype = reduce(torch.promote_types, (own.dtype for own in self.gradients), torch.float32)
        return torch.empty(numbers, dtype=dtype, device="meta")

    @torch.no_grad()
    def read(self, into: Tensor) -> tuple[float, list[bool]]:
        """Copy the sums to the host; return that of the losses, and which parameters have one."""
        for own, there, held in zip(self.gradients, self._places(into), self._held, strict=True):
            if held:
                there.copy_(own, non_blocking=True)
            else:
                there.zero_()
        wait_asleep(self.loss[0].device)
        return (float(self.loss[0]) if self.done else 0.0), [held > 0 for held in self._held]

    @torch.no_grad()
    def write(self, total: Tensor, loss: float, used: Sequence[bool]) -> None:
        """Have sums of the whole batch, as `read` gives them, in the place of the own ones."""
        for place, there in enumerate(self._places(total)):
            self._anew(place).copy_(there, non_blocking=True)
        self._held = [int(each) for each in used]
        self.loss[0].fill_(loss)
        self._follows = any(used)

    def _anew(self, place: int) -> Tensor:
        """Return a sum that is written anew: another one where the old one is held elsewhere, such
        as by an optimiser that compares a gradient with the next one.
        """
        if _is_kept(self.gradients, place):
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
        """Unscale, clip and update, unless the scale was too large; return the loss. Can be
        repeated until the update begins. Where several trainings do the same, `agreed` returns loss
        and norm of the gradient (scaled) that hold for all, from the own ones.

        Raises:
            NotFiniteError: The loss or the gradient is NaN or infinite; nothing was changed.
            TaskError: The loss depends on nothing that wants a gradient.
            UpdateInterruptedError: Memory ran out in the update.
        """
        totals = self.totals()
        norms = torch.stack(torch._foreach_norm([own for _, own in totals] or self.loss)).double()
        both = torch.stack((self.loss[0], torch.linalg.vector_norm(norms)))
        wait_asleep(both.device)  # the one moment at which the host waits for a card
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
    """Return the places of the smallest parameters, which take no more than this together, as far
    as their gradients are added without a change of their type: that takes memory, and could fail
    when some of them are in their sums.
    """
    places, left_bytes = list[int](), most_bytes
    for place in sorted(range(len(parameters)), key=lambda place: parameters[place].nbytes):
        left_bytes -= parameters[place].nbytes
        if left_bytes < 0:
            break
        if parameters[place].dtype in {torch.float32, torch.float64}:
            places.append(place)
    return places


def _holders(sums: list[Tensor], place: int) -> tuple[int, int, int]:
    """Count what holds the storage, the tensor and the Python object of a sum."""
    own = sums[place]
    storage = torch._C._storage_Use_Count(own.untyped_storage()._cdata)
    return storage, own._use_count(), sys.getrefcount(own)  # type: ignore[attr-defined]


#: Those of a tensor that only a list holds.
_ALONE: Final = _holders([torch.zeros(1)], 0)


def _is_kept(sums: list[Tensor], place: int) -> bool:
    """Whether anything but this list holds a sum, or a view of it."""
    return any(map(operator.gt, _holders(sums, place), _ALONE))


def _fits(parameter: nn.Parameter, own: Tensor) -> bool:
    """Whether a sum still has the form of its parameter, which a model may change in place."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return (own.dtype, own.device, own.shape) == (
        dtype, parameter.device, parameter.shape,
    )  # fmt: skip


def _hooked(gradient: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    given = gradient.clone()  # the hook may be asked again, after an out-of-memory
    changed = hook(given)
    return given if changed is None else changed  # which it may have written into


def _refuse_reentrant(loss: Tensor) -> None:
    """Raise a `TaskError` where activations are recomputed in a way that hides parameters."""
    if "CheckpointFunctionBackward" in operators_of(loss):
        raise TaskError(
            "the model uses torch.utils.checkpoint with use_reentrant=True, from which no "
            "gradients of parts can be had; set use_reentrant=False, in transformers by "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def operators_of(loss: Tensor) -> set[str]:
    """Return the names of the operators that a loss was computed with, as autograd has them."""
    return {node.name() for node in _nodes_of(loss.grad_fn)}


def readers_of(loss: Tensor, parameters: Collection[Tensor]) -> set[str]:
    """Return the names of the operators that have read these parameters themselves."""
    return {
        node.name()
        for node in _nodes_of(loss.grad_fn)
        for each, _ in node.next_functions
        if any(getattr(each, "variable", None) is parameter for parameter in parameters)
    }


def bends_of(loss: Tensor) -> dict[object, set[object]]:
    """Return the operators that bend a number, or a list of them, which a loss was computed with:
    for each name, and shapes of what it bends, all the shapes that this was computed from.
    """
    found: dict[object, set[object]] = {}
    for node in _nodes_of(loss.grad_fn):
        given = [_shapes(each)[at] for each, at in node.next_functions if each and _shapes(each)]
        if given and _bends(node) and all(len(shape) < 2 for shape in given):
            below = frozenset(shape for each in _nodes_of(node) for shape in _shapes(each))
            found.setdefault((node.name(), *given), set()).add(below)
    return found


def _bends(node: Node) -> bool:
    """Whether an operator is straight on both sides of a bend; a norm is if it adds up sizes, and
    `where` if it chooses between two that want a gradient.
    """
    name = node.name()
    order = getattr(node, "_saved_ord", 2) if name.startswith("LinalgVectorNorm") else 2
    chooses = name.startswith("Where") and all(each for each, _ in node.next_functions)
    return chooses or name.startswith(_BENDS) or order in {1, math.inf}


def _shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what an operator returned."""
    return tuple(tuple(each.shape) for each in getattr(node, "_input_metadata", ()))


def _nodes_of(first: Node | None) -> set[Node]:
    waiting, seen = [first], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return seen
