"""The gradient of an effective batch, added up over its parts in memory that exists before the
first step.

`autograd.grad` returns new tensors and changes none, so a part that fails leaves the finished ones
as they were. The loss of the effective batch is the sum over its items divided by their count,
which is known before the first part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workers.training import schedule
from workers.training.errors import NotFiniteError
from workers.training.host_memory import wait_asleep
from workers.training.optimizers import Update
from workers.training.precision import LossScaler


class Accumulator:
    """Sums of gradients and of losses of one effective batch after the other."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, set_to_none: bool = True) -> None:
        """Allocate the sums. Without `set_to_none` each effective batch begins with zeros."""
        self._parameters = parameters
        self._set_to_none = set_to_none
        self.gradients = [
            torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for parameter in parameters
        ]
        #: A list, so that it can be parked like the gradients.
        self.loss = [torch.zeros((), dtype=torch.float64, device=parameters[0].device)]
        self.begin(0, 1)

    def begin(self, rows: int, count: int) -> None:
        """Begin an effective batch of so many rows and items; what was there is forgotten."""
        self._rows = rows
        self._count = count
        self.done = 0
        """Rows in the sums. With 0, what the sums hold means nothing."""
        self._adding = False

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
        """Return the gradients of a part's summed loss; `None`: the parameter has none."""
        seed = torch.full_like(loss, scale / self._count)
        return list(
            torch.autograd.grad(loss, self._parameters, grad_outputs=seed, allow_unused=True)
        )

    @torch.no_grad()
    def add(self, rows: int, loss: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add a part. The first one replaces what was there."""
        pairs = list(zip(self.gradients, gradients, strict=True))
        sums = [own for own, new in pairs if new is not None]
        summands = [new for _, new in pairs if new is not None]
        self._adding = True
        if self.done == 0 and self._set_to_none:
            torch._foreach_copy_(sums, summands)
            for own, new in pairs:
                if new is None:
                    own.zero_()
            self.loss[0].copy_(loss)
        else:
            if self.done == 0:
                torch._foreach_zero_([*self.gradients, *self.loss])
            torch._foreach_add_(sums, summands)
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
            UpdateInterruptedError: Memory ran out in the update.
        """
        norms = torch.stack(torch._foreach_norm(self.gradients)).to(torch.float64)
        both = torch.stack((self.loss[0], torch.linalg.vector_norm(norms)))
        wait_asleep(both.device)  # the one moment at which the host waits for a card
        total, scaled_norm = both.tolist()
        loss, norm = total / self._count, scaled_norm / scaler.scale
        if math.isfinite(loss) and not math.isfinite(norm) and scaler.overflowed():
            return loss, False
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise NotFiniteError(what, value, step)
        factor = 1.0 if clip is None or norm <= clip else clip / norm
        update.run(self._parameters, self.gradients, factor / scaler.scale, rates)
        scaler.succeeded()
        return loss, True
