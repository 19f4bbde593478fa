"""What courses are drawn from: models and losses. Each is a function that changes a course."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.training.courses import (
    STEPS,
    Cast,
    Columns,
    Course,
    Heads,
    Net,
    Tied,
    Wrapped,
)


class Output(dict[str, Any]):
    """As the outputs of transformers: a mapping with attributes."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]  # type: ignore[no-any-return]


# ---- Models


def _end(module: nn.Module, then: Callable[[Tensor], Tensor]) -> Wrapped:
    return Wrapped(module, lambda _, made: then(made))


def _of_tokens(course: Course) -> None:
    course.tokens, course.by_token = True, True
    course.inputs = lambda rows: torch.randint(11, (rows, 5))


def mlp(course: Course) -> None:
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
    course.model = Net(body, nn.Linear(8, 3))


def tied(course: Course) -> None:
    _of_tokens(course)
    course.classes, embedding = 11, nn.Embedding(11, 8)
    course.model = Net(nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh()), Tied(embedding))


def shared(course: Course) -> None:
    twice = nn.Linear(8, 8)
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), twice, nn.Tanh(), twice)
    course.model = Net(body, nn.Linear(8, 3))


def conv(course: Course) -> None:
    course.inputs = lambda rows: torch.randn(rows, 1, 6, 6)
    norm = nn.GroupNorm(2, 4) if course.draw.random() < 0.5 else nn.LayerNorm([4, 4, 4])
    body = nn.Sequential(
        nn.Conv2d(1, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh()
    )
    course.model = Net(body, nn.Linear(8, 3))


def recurrent(course: Course) -> None:
    _of_tokens(course)
    kind = course.draw.choice([nn.RNN, nn.GRU, nn.LSTM])
    body = nn.Sequential(nn.Embedding(11, 8), _end(kind(8, 8, batch_first=True), lambda made: made))
    course.model = Net(body, nn.Linear(8, 3))


def transformer(course: Course) -> None:
    _of_tokens(course)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    course.model = Net(nn.Sequential(nn.Embedding(11, 8), block), nn.Linear(8, 3))


def bag(course: Course) -> None:
    _of_tokens(course)
    course.by_token = False
    mode = course.draw.choice(["mean", "sum"])
    course.model = Net(nn.Sequential(nn.EmbeddingBag(11, 8, mode=mode), nn.Tanh()), nn.Linear(8, 3))


def sparse(course: Course) -> None:
    _of_tokens(course)
    course.model = Net(
        nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
    )


# ---- what is in a model


def heads_by_step(course: Course) -> None:
    course.model.head, course.model.by_task = Heads(8, course.classes), True
    course.task = lambda step, _: step % 3


def heads_by_sample(course: Course) -> None:
    course.model.head, course.model.by_task = Heads(8, course.classes), True
    course.task = lambda _, mark: mark % 3


def scalar(course: Course) -> None:
    course.model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    call = course.call
    course.call = lambda batch: call(batch) * course.model.scale


def unused(course: Course) -> None:
    course.model.add_module("spare", nn.Linear(3, 3))


def outside(course: Course) -> None:
    course.outside["layer"] = nn.Linear(course.classes, course.classes)
    call = course.call
    course.call = lambda batch: course.outside["layer"](call(batch))


def kept_out(course: Course) -> None:
    names = [name for name, _ in course.named()]
    course.kept_out = set(course.draw.sample(names, max(1, len(names) // 3)))


def counters(course: Course) -> None:
    def count(self: Any, made: Tensor) -> Tensor:
        if self.training:
            self.samples += len(made)
            self.total += made.detach().sum(0)[..., :1].sum()
        return made

    body = Wrapped(course.model.body, count)
    body.register_buffer("samples", torch.zeros((), dtype=torch.int64))
    body.register_buffer("total", torch.zeros(()))
    course.model.body = body


def running_mean(course: Course) -> None:
    def centre(self: Any, made: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(made.flatten(0, -2).mean(0), 0.1)
        return made - self.mean

    course.model.body = Wrapped(course.model.body, centre)
    course.model.body.register_buffer("mean", torch.zeros(8))


class _Normed(nn.Module):
    def __init__(self, inner: nn.Module, *, training: bool) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(8)
        self.norm.train(training)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return self.norm(made.flatten(0, -2)).view(made.shape)  # type: ignore[no-any-return]


def batch_norm_in_eval(course: Course) -> None:
    course.model.body = _Normed(course.model.body, training=False)
    norm = course.model.body.norm
    course.before.append(lambda _: norm.eval())


def batch_norm(course: Course) -> None:
    course.model.body = _Normed(course.model.body, training=True)


def dropout(course: Course) -> None:
    course.dropout = True
    course.model.body = nn.Sequential(course.model.body, nn.Dropout(0.3))


def functional_dropout(course: Course) -> None:
    course.model.body = _end(course.model.body, lambda made: functional.dropout(made, 0.3))


def _linears(course: Course) -> list[nn.Linear]:
    found = [each for each in course.model.modules() if type(each) is nn.Linear]
    return course.draw.sample(found, max(1, len(found) // 2))


def weight_norm(course: Course) -> None:
    for linear in _linears(course):
        parametrizations.weight_norm(linear)


def spectral_norm(course: Course) -> None:
    for linear in _linears(course):
        parametrizations.spectral_norm(linear)


def single(course: Course) -> None:
    course.dtype = torch.float32
    course.model.to(torch.float32)
    course.outside.to(torch.float32)


def head_in_single(course: Course) -> None:
    course.model.head = Cast(course.model.head, torch.float32)


def head_in_half(course: Course) -> None:
    course.model.head = Cast(course.model.head, torch.bfloat16)


def recomputed(course: Course) -> None:
    if course.tested:
        course.model.body = _Recomputed(course.model.body, reentrant=False)
    else:
        course.model.body = _Recomputed(course.model.body, reentrant=None)


def recomputed_reentrant(course: Course) -> None:
    course.model.body = _Recomputed(course.model.body, reentrant=True)


def recomputed_later(course: Course) -> None:
    """As `recomputed_reentrant`, from a later step on."""
    course.model.body = body = _Recomputed(course.model.body, reentrant=None)
    when = course.draw.randrange(1, STEPS)

    def recompute(step: int) -> None:
        body.reentrant = True if step >= when else None

    course.structure.append(recompute)


class _Recomputed(nn.Module):
    """`reentrant` is None: not at all."""

    def __init__(self, inner: nn.Module, *, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return self.inner(x)  # type: ignore[no-any-return]
        if self.reentrant and x.is_floating_point() and not x.requires_grad:
            x = x.detach().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


# ---- losses


def _one_hot(outputs: Tensor, columns: Columns) -> Any:
    hot = functional.one_hot(columns["y"].clamp(min=0), outputs.shape[-1]).to(outputs.dtype)
    return hot * (columns["y"] >= 0)[..., None]


def squares(course: Course) -> None:
    def items(outputs: Tensor, columns: Columns) -> Any:
        real = columns["y"] >= 0
        return (outputs - _one_hot(outputs, columns)).square().mean(-1) * real

    course.items = items


def binary(course: Course) -> None:
    def items(outputs: Tensor, columns: Columns) -> Any:
        hot, real = _one_hot(outputs, columns), columns["y"] >= 0
        made = functional.binary_cross_entropy_with_logits(outputs, hot, reduction="none")
        return made.mean(-1) * real

    course.items = items


def mean(course: Course) -> None:
    """The mean of all."""


def sum_and_count(course: Course) -> None:
    course.reduce = lambda items, _: items.sum()
    course.count = lambda columns: columns["y"].numel()


def sum_of_real(course: Course) -> None:
    course.padded = True
    course.reduce = lambda items, _: items.sum()
    course.count = lambda columns: max(1, int((columns["y"] >= 0).sum()))


def _weighted(items: Tensor, columns: Columns) -> Any:
    return (items.flatten(1).mean(1) if items.dim() > 1 else items) * columns["w"]


def sum_of_weighted(course: Course) -> None:
    course.reduce = lambda items, columns: _weighted(items, columns).sum()
    course.count = lambda columns: max(0.01, float(columns["w"].sum()))


def mean_of_weighted(course: Course) -> None:
    course.reduce = lambda items, columns: _weighted(items, columns).mean()


def mean_of_real(course: Course) -> None:
    course.padded = True
    course.reduce = lambda items, columns: items.sum() / (columns["y"] >= 0).sum()


def mean_by_weights(course: Course) -> None:
    course.reduce = lambda items, columns: _weighted(items, columns).sum() / columns["w"].sum()


def sum_alone(course: Course) -> None:
    course.reduce = lambda items, _: items.sum()


def count_ignored(course: Course) -> None:
    course.count = lambda columns: columns["y"].numel()


def decay_term(course: Course) -> None:
    course.terms.append(
        lambda *_: 0.01 * sum(each.square().sum() for each in course.model.parameters())
    )


def decay_term_of_sum(course: Course) -> None:
    sum_and_count(course)
    decay_term(course)


def penalty(course: Course) -> None:
    """A term over outputs, reduced as the loss."""
    course.terms.append(
        lambda outputs, columns: (
            0.1 * course.reduce(outputs.square().mean(-1) * (columns["y"] >= 0), columns)
        )
    )


def _flipped(columns: Columns) -> Columns:
    return columns | {"x": columns["x"].flip(-1)}


def two_passes(course: Course) -> None:
    def agree(outputs: Tensor, columns: Columns) -> Tensor:
        other = course.call(columns if course.dropout else _flipped(columns))
        return 0.5 * course.reduce((outputs - other).square().mean(-1), columns)

    course.terms.append(agree)


def gradient_penalty(course: Course) -> None:
    def slope(_: Tensor, columns: Columns) -> Tensor:
        x = columns["x"].detach().requires_grad_()
        outputs = course.call(columns | {"x": x})
        (found,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        steep = found.flatten(1).square().sum(1)
        return 0.01 * course.reduce(steep, columns)

    course.terms.append(slope)


def drawn_once(course: Course) -> None:
    """A random number for the whole batch, as the share of a mixup."""
    call = course.call
    course.call = lambda batch: call(batch) * (0.5 + torch.rand((), dtype=course.dtype))


def one_element(course: Course) -> None:
    wrap = course.wrap
    course.wrap = lambda loss: wrap(loss.reshape(1))


def contrast(course: Course) -> None:
    def apart(outputs: Tensor, _: Columns) -> Tensor:
        flat = functional.normalize(outputs.flatten(1), dim=1)
        places = torch.arange(len(flat))
        return functional.cross_entropy(flat @ flat.T, places)

    course.terms.append(apart)


def in_a_dict(course: Course) -> None:
    kind: Any = course.draw.choice([Output, dict])
    course.wrap = lambda loss: kind(loss=loss, figure=1.0)
