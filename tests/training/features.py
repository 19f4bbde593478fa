"""Features of drawn courses: models and losses. Each is a function that changes a course."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.training.courses import STEPS, Cast, Columns, Course, Heads, Net, Tied, Wrapped, feature

# ---- Models


def _end(module: nn.Module, then: Callable[[Tensor], Tensor]) -> Wrapped:
    return Wrapped(module, lambda _, made: then(made))


def _of_tokens(course: Course) -> None:
    course.tokens, course.by_token = True, True
    course.inputs = lambda rows: torch.randint(11, (rows, 5))


@feature(3, of="model")
def mlp(course: Course) -> None:
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
    course.model = Net(body, nn.Linear(8, 3))


@feature(1, of="model")
def tied(course: Course) -> None:
    _of_tokens(course)
    course.classes, embedding = 11, nn.Embedding(11, 8)
    course.model = Net(nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh()), Tied(embedding))


@feature(1, of="model")
def shared(course: Course) -> None:
    twice = nn.Linear(8, 8)
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), twice, nn.Tanh(), twice)
    course.model = Net(body, nn.Linear(8, 3))


@feature(1, of="model")
def conv(course: Course) -> None:
    course.inputs = lambda rows: torch.randn(rows, 1, 6, 6)
    norm = nn.GroupNorm(2, 4) if course.draw.random() < 0.5 else nn.LayerNorm([4, 4, 4])
    body = nn.Sequential(
        nn.Conv2d(1, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh()
    )
    course.model = Net(body, nn.Linear(8, 3))


@feature(1, of="model")
def recurrent(course: Course) -> None:
    _of_tokens(course)
    kind = course.draw.choice([nn.RNN, nn.GRU, nn.LSTM])
    body = nn.Sequential(nn.Embedding(11, 8), _end(kind(8, 8, batch_first=True), lambda made: made))
    course.model = Net(body, nn.Linear(8, 3))


@feature(1, of="model")
def transformer(course: Course) -> None:
    _of_tokens(course)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    course.model = Net(nn.Sequential(nn.Embedding(11, 8), block), nn.Linear(8, 3))


@feature(1, of="model")
def bag(course: Course) -> None:
    _of_tokens(course)
    course.by_token = False
    mode = course.draw.choice(["mean", "sum"])
    course.model = Net(nn.Sequential(nn.EmbeddingBag(11, 8, mode=mode), nn.Tanh()), nn.Linear(8, 3))


# ---- what is in a model


@feature(0.06, without="tied")
def heads_by_step(course: Course) -> None:
    course.model.head, course.model.by_task = Heads(8, course.classes), True
    course.task = lambda step, _: step % 3


@feature(0.06, without="tied heads-by-step")
def heads_by_sample(course: Course) -> None:
    course.model.head, course.model.by_task = Heads(8, course.classes), True
    course.task = lambda _, mark: mark % 3


@feature(0.1)
def scalar(course: Course) -> None:
    course.model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    call = course.call
    course.call = lambda batch: call(batch) * course.model.scale


@feature(0.08)
def unused(course: Course) -> None:
    course.model.add_module("spare", nn.Linear(3, 3))


@feature(0.1)
def outside(course: Course) -> None:
    course.outside["layer"] = nn.Linear(course.classes, course.classes)
    call = course.call
    course.call = lambda batch: course.outside["layer"](call(batch))


class _Normed(nn.Module):
    def __init__(self, inner: nn.Module, *, training: bool) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(8)
        self.norm.train(training)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return self.norm(made.flatten(0, -2)).view(made.shape)  # type: ignore[no-any-return]


@feature(0.06)
def batch_norm_in_eval(course: Course) -> None:
    course.model.body = _Normed(course.model.body, training=False)
    norm = course.model.body.norm
    course.before.append(lambda _: norm.eval())


@feature(0.12)
def dropout(course: Course) -> None:
    course.dropout = True
    course.model.body = nn.Sequential(course.model.body, nn.Dropout(0.3))


@feature(0.015, is_="hazard")
def functional_dropout(course: Course) -> None:
    course.model.body = _end(course.model.body, lambda made: functional.dropout(made, 0.3))


def _linears(course: Course) -> list[nn.Linear]:
    found = [each for each in course.model.modules() if type(each) is nn.Linear]
    return course.draw.sample(found, max(1, len(found) // 2))


@feature(0.06)
def weight_norm(course: Course) -> None:
    for linear in _linears(course):
        parametrizations.weight_norm(linear)


@feature(0.03, is_="hazard", without="weight-norm heads-by-sample heads-by-step")
def spectral_norm(course: Course) -> None:
    for linear in _linears(course):
        parametrizations.spectral_norm(linear)


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, *, recomputes: bool) -> None:
        super().__init__()
        self.inner, self.recomputes = inner, recomputes

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return self.inner(x)  # type: ignore[no-any-return]
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


@feature(0.1, without="spectral-norm")
def recomputed(course: Course) -> None:
    course.model.body = _Recomputed(course.model.body, recomputes=course.tested)


@feature(0.1)
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


@feature(0.015, is_="hazard")
def running_mean(course: Course) -> None:
    def centre(self: Any, made: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(made.flatten(0, -2).mean(0), 0.1)
        return made - self.mean

    course.model.body = Wrapped(course.model.body, centre)
    course.model.body.register_buffer("mean", torch.zeros(8))


@feature(0.015, is_="hazard", without="batch-norm-in-eval")
def batch_norm(course: Course) -> None:
    course.model.body = _Normed(course.model.body, training=True)


@feature(0.05, without="tied heads-by-step heads-by-sample")
def head_in_single(course: Course) -> None:
    course.model.head = Cast(course.model.head, torch.float32)


@feature(0.08, without="head-in-single")
def single(course: Course) -> None:
    course.dtype = torch.float32
    course.model.to(torch.float32)
    course.outside.to(torch.float32)


@feature(0.03, without="single head-in-single")
def cast_late(course: Course) -> None:
    """A model that becomes float64 before the first step, after the optimiser was made."""
    course.model.to(torch.float32)

    def cast(step: int) -> None:
        if step == 0:
            course.model.double()
            course.outside.double()

    course.structure.append(cast)


@feature(0.08)
def kept_out(course: Course) -> None:
    names = [name for name, _ in course.named()]
    course.kept_out = set(course.draw.sample(names, max(1, len(names) // 3)))


# ---- losses


@feature(8, of="reduction")
def mean(course: Course) -> None:
    """The mean of all losses."""


@feature(3, of="reduction")
def sum_and_count(course: Course) -> None:
    course.reduce = lambda items, _: items.sum()
    course.count = lambda columns: columns["y"].numel()


@feature(3, of="reduction")
def sum_of_real(course: Course) -> None:
    course.padded = True
    course.reduce = lambda items, _: items.sum()
    course.count = lambda columns: max(1, int((columns["y"] >= 0).sum()))


@feature(2, of="reduction")
def sum_of_mask(course: Course) -> None:
    course.masked = True
    course.reduce = lambda items, columns: (items * columns["m"]).sum()
    course.count = lambda columns: max(1.0, float(columns["m"].sum()))


def _weighted(items: Tensor, columns: Columns) -> Any:
    return (items.flatten(1).mean(1) if items.dim() > 1 else items) * columns["w"]


@feature(2, of="reduction")
def sum_of_weighted(course: Course) -> None:
    course.reduce = lambda items, columns: _weighted(items, columns).sum()
    course.count = lambda columns: max(0.01, float(columns["w"].sum()))


@feature(2, of="reduction")
def mean_of_weighted(course: Course) -> None:
    course.reduce = lambda items, columns: _weighted(items, columns).mean()


@feature(0.4, is_="wrong", of="reduction")
def mean_of_real(course: Course) -> None:
    course.padded = True
    course.reduce = lambda items, columns: items.sum() / (columns["y"] >= 0).sum()


@feature(0.4, is_="wrong", of="reduction")
def mean_of_mask(course: Course) -> None:
    course.masked = True
    course.reduce = lambda items, columns: (items * columns["m"]).sum() / columns["m"].sum()


@feature(0.4, is_="wrong", of="reduction")
def mean_by_weights(course: Course) -> None:
    course.reduce = lambda items, columns: _weighted(items, columns).sum() / columns["w"].sum()


@feature(0.4, is_="wrong", of="reduction")
def sum_alone(course: Course) -> None:
    course.reduce = lambda items, _: items.sum()


@feature(0.4, is_="wrong", of="reduction")
def count_ignored(course: Course) -> None:
    course.count = lambda columns: columns["y"].numel()


@feature(0.4, is_="wrong", of="reduction")
def decay_term_of_sum(course: Course) -> None:
    sum_and_count(course)
    decay_term(course)


@feature(0.1)
def late_padding(course: Course) -> None:
    course.padded_from = course.draw.randrange(STEPS)


@feature(0.15)
def squares(course: Course) -> None:
    def items(outputs: Tensor, columns: Columns) -> Any:
        real = columns["y"] >= 0
        hot = functional.one_hot(columns["y"].clamp(min=0), outputs.shape[-1]).to(outputs.dtype)
        return (outputs - hot * real[..., None]).square().mean(-1) * real

    course.items = items


@feature(
    0.08,
    without="sum-and-count sum-of-real sum-of-mask sum-of-weighted sum-alone count-ignored "
    "decay-term-of-sum",
)
def decay_term(course: Course) -> None:
    course.terms.append(
        lambda *_: 0.01 * sum(each.square().sum() for each in course.model.parameters())
    )


@feature(0.1)
def penalty(course: Course) -> None:
    """A term over outputs, reduced like the loss."""
    course.terms.append(
        lambda outputs, columns: (
            0.1 * course.reduce(outputs.square().mean(-1) * (columns["y"] >= 0), columns)
        )
    )


def _flipped(columns: Columns) -> Columns:
    return columns | {"x": columns["x"].flip(-1)}


@feature(0.1)
def two_passes(course: Course) -> None:
    def agree(outputs: Tensor, columns: Columns) -> Tensor:
        other = course.call(columns if course.dropout else _flipped(columns))
        return 0.5 * course.reduce((outputs - other).square().mean(-1), columns)

    course.terms.append(agree)


@feature(0.05, without="tied recurrent transformer bag recomputed")
def gradient_penalty(course: Course) -> None:
    def slope(_: Tensor, columns: Columns) -> Tensor:
        x = columns["x"].detach().requires_grad_()
        outputs = course.call(columns | {"x": x})
        (found,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        steep = found.flatten(1).square().sum(1)
        return 0.01 * course.reduce(steep, columns)

    course.terms.append(slope)
