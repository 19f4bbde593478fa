"""The job under pressure: a real training step, on which larger is faster.

It is one of a deep & cross network (arXiv 1708.05123): a dense Adam sweeps over all embedding tables, however small
the batch, and each item's activations take memory. So larger is faster per item, as on a card; how large the tables
are says how precious memory is. Does not choose sizes, and measures nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from benches.pressure_grounds import Ground

FEATURES, WIDTH, LAYERS = 16, 32, 6
"""Of the network. An item is one row of each of `FEATURES` tables, `WIDTH` numbers each."""

STATE_BYTES_PER_ROW = FEATURES * WIDTH * 4 * 4
"""A parameter, its gradient and Adam's two moments, over all tables."""

_FIRST_ITEMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What every contestant's process is started with."""

    device: str
    memory_bytes: int
    """All that a step may take when nobody else wants memory."""
    rows: int
    """Of each table."""

    @property
    def state_bytes(self) -> int:
        """What the job holds between steps."""
        return self.rows * STATE_BYTES_PER_ROW


class Network(nn.Module):
    """Embeddings, cross layers, and one number for each item."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        wide = FEATURES * WIDTH
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for _ in range(FEATURES))
        self.crosses = nn.ParameterList(torch.randn(wide, 1) / wide**0.5 for _ in range(LAYERS))
        self.biases = nn.ParameterList(torch.zeros(wide) for _ in range(LAYERS))
        self.head = nn.Linear(wide, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of items given as one row number for each table."""
        first = torch.cat([table(rows[:, place]) for place, table in enumerate(self.tables)], dim=1)
        crossed = first
        for cross, bias in zip(self.crosses, self.biases, strict=True):
            # Not GELU, which torch hands to oneDNN: refused memory, that fails with words nobody takes for memory.
            crossed = functional.silu(first * (crossed @ cross) + bias + crossed)
        return self.head(crossed).squeeze(1)


class Job:
    """Model, optimiser and data; a step trains on so many fresh items."""

    def __init__(self, spec: JobSpec, ground: Ground) -> None:
        torch.manual_seed(0)
        self._rows = spec.rows
        self._device = ground.torch_device
        self._ground = ground
        self._network = Network(spec.rows).to(self._device)
        self._adam = torch.optim.Adam(self._network.parameters(), lr=1e-3, fused=ground.fused)
        self.sweeps_s: list[float] = []
        """What Adam took in each good step."""
        self.last_loss = float("nan")
        # Adam makes its moments in its first step; a library, what it keeps.
        for _ in range(2):
            self.step(_FIRST_ITEMS)
        self.sweeps_s.clear()

    def step(self, items: int) -> int:
        """Train once and return the most memory it took.

        Raises:
            RuntimeError: The device's own out-of-memory.

        """
        return self._ground.measured(lambda: self._train(items))

    def recover(self) -> None:
        """Let go of what a failed step left; call outside the handler of its exception, which holds its tensors."""
        self._ground.give_back()

    def _train(self, items: int) -> None:
        rows = torch.randint(self._rows, (items, FEATURES), device=self._device)
        labels = (rows.sum(dim=1) % 2).float()
        # Gradients stay where they are: they belong to the state and not to the step.
        self._adam.zero_grad(set_to_none=False)
        loss = functional.binary_cross_entropy_with_logits(self._network(rows), labels)
        loss.backward()
        self._ground.await_work()
        began_s = self._ground.clock_s()
        self._adam.step()
        self._ground.await_work()
        self.sweeps_s.append(self._ground.clock_s() - began_s)
        self.last_loss = float(loss.detach())  # waits for the card
