"""The gradient of an effective batch, added up over its parts in memory that exists before its
first part.

`autograd.grad` returns new tensors and changes none, so a part that fails leaves the finished ones
as they were. The loss of the effective batch is the sum over its items divided by their count,
which is known before the first part. A parameter that no part gave a gradient has none, as after
`backward`: the optimiser then leaves it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Final

import torch
from torch import Tensor, nn

from workers.training import schedule
from workers.training.errors import NotFiniteError, TaskError
from workers.training.host_memory import wait_asleep
from workers.training.optimizers import Update
from workers.training.precision import LossScaler

#: What `torch.nn.utils.clip_grad_norm_` adds to a norm.
_CLIP_EPS: Final = 1e-6


class Accumulator:
    """Sums of gradients and of losses of one effective batch after the other."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Allocate the sums."""
        self.parameters: list[nn.Parameter] = []
        """Those that are trained, in the order of their sums."""
        self.gradients: list[Tensor] = []
        """The sums, by parameter. What they hold counts where a gradient was `_given`."""
        self._given: list[bool] = []
        #: A list, so that it can be parked like the gradients.
        self.loss: list[Tensor] = []
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
        self.parameters, self._given = list(parameters), [False] * len(parameters)
        self.used = set[int]()
        """The places of parameters that a loss has depended on."""
        self._fewest = len(parameters) + 1
        device = parameters[0].device if parameters else None
        self.loss = [torch.zeros((), dtype=torch.float64, device=device)]

    @property
    def pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that have a gradient, each with its sum."""
        held = zip(self.parameters, self.gradients, self._given, strict=True)
        return [(parameter, own) for parameter, own, given in held if given]

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
        self._rows = rows
        self._count = count
        self.done = 0
        """Rows in the sums. With 0, what the sums hold means nothing."""
        self._adding = self._follows = False

    @property
    def remaining(self) -> int:
        """Rows that are still missing; 0: only the update is left."""
        return self._rows - self.done

    def next_rows(self, limit: int) -> int:
        """Return the size of the next part, 0 after the last. A cut addition begins all again."""
        if self._adding:
            self.begin(self._rows, self._count)
        return schedule.next_part(self.remaining, limit) if self.remaining else 0

    def gradients_of(self, loss: Tensor, scale: float = 1.0) -> list[Tensor | None]:
        """Return the gradients of a part's summed loss; `None`: the parameter has none.

        Raises:
            TaskError: A gradient is sparse.
        """
        self._follows = self._follows or loss.requires_grad
        if not loss.requires_grad or not self.parameters:  # of a part; others may
            return [None] * len(self.parameters)
        seed = torch.full_like(loss, scale / self._count)
        hooks = [(each, each._backward_hooks) for each in self.parameters if each._backward_hooks]
        try:
            for parameter, _ in hooks:
                parameter._backward_hooks = None
            found = torch.autograd.grad(loss, self.parameters, grad_outputs=seed, allow_unused=True)
        except RuntimeError:
            _refuse_reentrant(loss)
            raise
        finally:
            for parameter, each in hooks:
                parameter._backward_hooks = each
        given = [place for place, each in enumerate(found) if each is not None]
        if len(given) < self._fewest:
            _refuse_reentrant(loss)
            self._fewest = len(given)
        self.used.update(given)
        if any(each is not None and each.is_sparse for each in found):
            raise TaskError(
                "the gradient of an embedding is sparse, and sums of parts are dense; make the "
                "embedding with sparse=False, and train it with an optimiser for dense gradients"
            )
        return list(found)

    @torch.no_grad()
    def add(self, rows: int, loss: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add a part. The first gradient of each parameter replaces what was there."""
        self._adding = True
        if self.done == 0:
            self._given = [False] * len(self.gradients)
            self.loss[0].zero_()
        pairs = list(zip(self.gradients, gradients, self._given, strict=True))
        first = [(own, new) for own, new, given in pairs if new is not None and not given]
        more = [(own, new) for own, new, given in pairs if new is not None and given]
        if first:
            torch._foreach_copy_([own for own, _ in first], [new for _, new in first])
        if more:
            torch._foreach_add_([own for own, _ in more], [new for _, new in more])
        self._given = [given or new is not None for _, new, given in pairs]
        self._follows = self._follows or any(self._given)
        self.loss[0].add_(loss)
        self.done += rows
        self._adding = False

    @torch.no_grad()
    def finish(
        self,
        update: Update,
        scaler: LossScaler,
        *,
        step: int,
        clip: float | None,
        rates: Sequence[float] | None,
    ) -> tuple[float, bool]:
        """Unscale, clip and update; return the loss, and whether it was updated. Can be repeated
        until that begins.

        Raises:
            NotFiniteError: The loss or the gradient is NaN or infinite; nothing was changed.
            TaskError: The loss depends on nothing that wants a gradient.
            UpdateInterruptedError: Memory ran out in the update.
        """
        totals = self.totals()
        norms = [
            norm.double() for norm in torch._foreach_norm([own for _, own in totals] or self.loss)
        ]
        both = torch.stack((self.loss[0], torch.linalg.vector_norm(torch.stack(norms))))
        wait_asleep(both.device)  # the one moment at which the host waits for a card
        total, scaled_norm = both.tolist()
        loss, norm = total / self._count, scaled_norm / scaler.scale
        if math.isfinite(loss) and not math.isfinite(norm) and scaler.overflowed():
            return loss, False
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise NotFiniteError(what, value, step)
        factor = 1.0 if clip is None else min(1.0, clip / (norm + _CLIP_EPS))
        update.run(totals, factor / scaler.scale, rates)
        scaler.succeeded()
        return loss, True


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _fits(parameter: nn.Parameter, own: Tensor) -> bool:
    """Whether a sum still has the form of its parameter, which a model may change in place."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return (own.dtype, own.device, own.shape) == (
        dtype, parameter.device, parameter.shape,
    )  # fmt: skip


def _hooked(gradient: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    changed = hook(gradient.clone())  # it may be asked again, after an out-of-memory
    return gradient if changed is None else changed


def _refuse_reentrant(loss: Tensor) -> None:
    """Raise a `TaskError` where activations are recomputed in a way that hides parameters."""
    waiting, seen = [loss.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise TaskError(
                "the model uses torch.utils.checkpoint with use_reentrant=True, from which no "
                "gradients of parts can be had; set use_reentrant=False, in transformers by "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
