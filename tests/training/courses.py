"""A small training that features change while it is built: model, losses, optimisers, batches.

Only the tested course has parts, out-of-memory errors, recomputation and a restart. These must not
change the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

Columns: TypeAlias = dict[str, Any]

STEPS: Final = 20


class Net(nn.Module):
    """A body, and a head on its last dimension."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.by_task = False

    def forward(self, x: Tensor, task: Any) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden, task) if self.by_task else self.head(hidden)


class Heads(nn.Module):
    """One head for each task; a task belongs to the batch, or to each sample."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.heads: Any = nn.ModuleList(nn.Linear(width, classes) for _ in range(3))

    def forward(self, hidden: Tensor, task: Any) -> Tensor:
        if isinstance(task, int):
            return self.heads[task](hidden)  # type: ignore[no-any-return]
        made = hidden.new_zeros(*hidden.shape[:-1], self.heads[0].out_features)
        for number, head in enumerate(self.heads):
            if (task == number).any():
                made[task == number] = head(hidden[task == number])
        return made


class Wrapped(nn.Module):
    """A module, and a function of its result."""

    def __init__(self, inner: nn.Module, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.then = inner, then

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return self.then(self, made[0] if isinstance(made, tuple) else made)


class Tied(nn.Module):
    """A head with the weights of an embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T


class Cast(nn.Module):
    """A module that computes in another type."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(next(self.parameters()).dtype)).to(x.dtype)  # type: ignore[no-any-return]


def cross_entropy(outputs: Tensor, columns: Columns) -> Tensor:
    """Return the loss of each sample or token; 0 for an ignored one."""
    return functional.cross_entropy(
        outputs.movedim(-1, 1), columns["y"], reduction="none", ignore_index=-100
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default type of new parameters."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@dataclass(frozen=True)
class Feature:
    """A feature that a drawn course may have."""

    name: str
    add: Callable[[Course], None]
    share: float
    """The share of draws with this feature; in a group, its share within the group."""
    is_: Literal["right", "hazard", "wrong"] = "right"
    """A `wrong` feature may be refused, but must not change the result without a refusal. The same
    holds for a `hazard`, which may continue if the loop receives the sentences (`told`)."""
    without: str = ""
    """Names of features that exclude this one."""
    of: str = ""
    """The group, of which each draw has one feature: `model`, `reduction`, `optimizer`."""


#: In the order in which they change a course.
FEATURES: Final[list[Feature]] = []


def feature(
    share: float,
    is_: Literal["right", "hazard", "wrong"] = "right",
    without: str = "",
    of: str = "",
) -> Callable[[Callable[[Course], None]], Callable[[Course], None]]:
    """Register a function that changes a course as a feature with the function's name."""

    def named(add: Callable[[Course], None]) -> Callable[[Course], None]:
        FEATURES.append(Feature(add.__name__.replace("_", "-"), add, share, is_, without, of))
        return add

    return named


class Course:
    """One training; each feature changes it while it is built."""

    def __init__(self, seed: int, features: Sequence[Feature], *, tested: bool) -> None:
        self.seed, self.features, self.tested = seed, features, tested
        self.dtype = torch.float64
        self.classes, self.tokens, self.by_token = 3, False, False
        self.careful = any(feature.is_ != "right" for feature in features)
        """Whether a check must be possible, which needs parts of at least two samples."""
        self.rows, self.most = [9] * STEPS, [4] * STEPS
        self.model: Any = nn.Identity()
        self.outside: nn.ModuleDict = nn.ModuleDict()
        self.task: Callable[[int, Tensor], Any] = lambda _step, _x: 0
        self.padded = self.dropout = False
        #: Whether a mask of real numbers, and not the labels, marks padding; the first step whose
        #: batch has padding.
        self.masked, self.padded_from = False, 0
        self.inputs: Callable[[int], Tensor] = lambda rows: torch.randn(rows, 6)
        self.call: Callable[[Columns], Tensor] = lambda batch: self.model(batch["x"], batch["task"])
        self.items: Callable[[Tensor, Columns], Tensor] = cross_entropy
        self.reduce: Callable[[Tensor, Columns], Tensor] = lambda items, _: items.mean()
        self.count: Callable[[Columns], float] | None = None
        self.terms: list[Callable[[Tensor, Columns], Any]] = []
        self.critic: Callable[[Tensor, Columns], Tensor] | None = None
        """The loss of the second optimiser, if it has a separate one."""
        self.place = 0
        """The index of the current optimiser."""
        self.kept_out: set[str] = set()
        """Names of parameters without an optimiser."""
        self.groups: Callable[[list[nn.Parameter]], list[Any]] = lambda parameters: [
            {"params": parameters}
        ]
        self.split: Callable[[str, nn.Parameter], int] = lambda _name, _parameter: 0
        """Returns the index of a parameter's optimiser."""
        self.makes: list[Callable[[Any], Any]] = [partial(optim.SGD, lr=0.05)]
        self.joint = False
        """Whether all optimisers update after one loss, and not each after its own."""
        self.schedulers_of: Callable[[optim.Optimizer], Any] | None = None
        self.prepare: list[Callable[[], None]] = []
        """Functions to call after the optimisers are made."""
        self.structure: list[Callable[[int], object]] = []
        """Functions to call before each step, which a restarted training must repeat."""
        self.before: list[Callable[[int], object]] = []
        self.after: list[Callable[[int], object]] = []
        self.clip: float | None = None
        self.is_idle = False
        """Whether a step of the plain loop gave an optimiser no gradient at all."""
        self.memory = [(10**9, "")] * STEPS
        """The number of samples that fit in each step, and the place where a larger part fails."""
        self.restart: int | None = None
        self.hazards: list[str] | None = None
        self.average: Any = None
        self.seen: dict[str, list[float]] = {"loss": []}
        """Observed numbers of each step, keyed by name."""
        self.step = 0
        self._build()

    def _build(self) -> None:
        with torch.random.fork_rng(), default_dtype(self.dtype):
            for feature in self.features:
                self.draw = random.Random(f"{self.seed} {feature.name}")  # noqa: S311 - no secret
                torch.manual_seed(self.draw.getrandbits(32))
                feature.add(self)
        named = [pair for pair in self.named() if pair[0] not in self.kept_out]
        shares = [
            [parameter for name, parameter in named if self.split(name, parameter) == place]
            for place in range(len(self.makes))
        ]
        self.optimizers = [
            make(self.groups(share))
            for make, share in zip(self.makes, shares, strict=True)
            if share
        ]
        of = self.schedulers_of
        self.schedulers = [] if of is None else [of(each) for each in self.optimizers]
        for prepared in self.prepare:
            prepared()

    def sets(self) -> list[list[Any]]:
        """Return the optimisers of each update."""
        return [self.optimizers] if self.joint else [[each] for each in self.optimizers]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters, including those outside the model."""
        outside = ((f"outside {name}", each) for name, each in self.outside.named_parameters())
        return [*self.model.named_parameters(), *outside]

    def batch(self, step: int) -> Columns:
        """Draw the batch of a step: labels, weights and tasks are functions of the inputs."""
        with torch.random.fork_rng():
            torch.manual_seed(1000 * self.seed + step)
            x = self.inputs(self.rows[step])
        return self.columns(x if self.tokens else x.to(self.dtype), step)

    def columns(self, x: Tensor, step: int) -> Columns:
        """Return inputs with their labels, weights, tasks and masks."""
        mark = (x.flatten(1).double().abs().sum(1) * 10).long()
        if self.tokens:
            y = (x * 7 + 3) % self.classes
            y = y if self.by_token else y[:, 0]
        else:
            y = x.flatten(1)[:, : self.classes].argmax(1)
        empty = mark % 3 == 0
        if self.by_token:
            empty = torch.arange(x.shape[1]) >= 1 + mark[:, None] % x.shape[1]
        empty = empty & (step >= self.padded_from)
        if self.padded:
            y = y.masked_fill(empty, -100)
        weights = (0.37 * x.flatten(1).double().square().sum(1) % 2).to(self.dtype)
        if not self.careful:  # a check cannot use samples without weight
            weights = weights * (mark % 5 > 0)
        mask = {"m": (~empty).to(self.dtype)} if self.masked else {}
        return {"x": x, "y": y, "w": weights, "task": self.task(step, mark), **mask}

    def loss(self, columns: Columns, *, room: bool = False) -> Any:
        """Return the loss of a part, as a user of ElasticStep would write it."""
        limit, place = self.memory[self.step]
        short = self.tested and not room and len(columns["x"]) > limit
        if short and place == "begin":
            _run_out()
        outputs = self.call(columns)
        if short and place == "forward":
            _run_out()
        if short and outputs.requires_grad:
            outputs.register_hook(lambda _: _run_out())  # type: ignore[no-untyped-call]
        if self.place and self.critic is not None:
            return self.critic(outputs, columns)
        value = self.reduce(self.items(outputs, columns), columns)
        for term in self.terms:
            value = value + term(outputs, columns)
        return value

    def whole(self, step: int) -> tuple[Any, float | None]:
        """Return the batch of a step and its count."""
        batch = self.batch(step)
        return batch, None if self.count is None else self.count(batch)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that the training changes, keyed by name."""
        found: dict[str, Tensor] = {}
        modules = {"model": self.model, "outside": self.outside, "average": self.average}
        for kind, module in modules.items():
            if module is not None:
                for name, parameter in module.named_parameters():
                    found[f"{kind} {name}"] = parameter.detach().clone()
                for name, buffer in module.named_buffers():
                    found[f"{kind} buffer {name}"] = buffer.detach().clone()
        names = {parameter: name for name, parameter in self.named()}
        for place, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                if float(state.get("step", 1)):  # a state before its first step counts as no state
                    for key, value in state.items():
                        if isinstance(value, int | float | Tensor):
                            of = f"state {place} {names.get(parameter, '?')} {key}"
                            found[of] = torch.as_tensor(value).detach().clone()
        return found


def _run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. (acted)")
