"""`ElasticStep` on inputs from bug reports of other tools: as the plain loop, or one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.training.plain_loop import (
    Loss,
    X,
    Y,
    adamw,
    classified,
    close,
    net,
    out_of_memory,
    plain,
    refused,
    weights,
)
from workers.training.elastic import ElasticStep
from workers.training.errors import TaskError
from workers.training.parts import PartsError


def two_passes(model: nn.Module) -> Loss:
    """R-Drop: each sample twice, with the distance between both predictions."""

    def loss(part: Any) -> Tensor:
        one, two = (model(part[0]).log_softmax(-1) for _ in range(2))
        apart = functional.kl_div(one, two, log_target=True, reduction="batchmean")
        seen.append(apart.item())
        return functional.nll_loss(one, part[1]) + apart

    seen: list[float] = []
    cast("Any", loss).seen = seen
    return loss


@pytest.mark.parametrize("reentrant", [None, False])
def test_two_passes_of_one_layer_have_masks_of_their_own(reentrant: bool | None) -> None:
    courses = []
    for most in (None, 5):
        model = net(nn.Dropout(0.5))
        called = model if reentrant is None else (
            lambda x, model=model: checkpoint(model, x, use_reentrant=False)
        )  # fmt: skip
        elastic, loss = ElasticStep(model, adamw(model)), two_passes(cast("nn.Module", called))
        elastic.most_rows = most
        courses.append([elastic.step((X, Y), loss) for _ in range(5)])
        assert min(cast("Any", loss).seen) > 0
    assert courses[0] == pytest.approx(courses[1], rel=1e-4)


def contrast(model: nn.Module, dropout: float) -> Loss:
    def loss(part: Any) -> Tensor:
        one, two = (functional.dropout(model(each), dropout, model.training) for each in part)
        return functional.cross_entropy(10 * one @ two.T, torch.arange(len(one)))

    return loss


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(16)])
def test_the_gravest_cause_is_refused_also_where_hazards_are_accepted(
    dropout: float, norm: Callable[[], nn.Module]
) -> None:
    model, told = net(norm()), list[str]()
    said = refused(contrast(model, dropout), model, (X, X.flip(1)), on_hazard=told.append)
    assert "compares samples with each other" in said
    assert told == []


def test_class_weights_are_counted_by_their_sum() -> None:
    of_classes = torch.tensor([1.0, 5.0, 0.2]).double()

    def loss(part: Any, reduction: str = "mean") -> Tensor:
        return functional.cross_entropy(model(part[0]), part[1], of_classes, reduction=reduction)

    model = net()
    assert "the sum of their weights" in refused(loss, model)
    wanted = plain(model, loss)
    model = net()
    elastic = ElasticStep(model, adamw(model))
    elastic.most_rows = 5
    for _ in range(4):
        elastic.step((X, Y), lambda part: loss(part, "sum"), count=float(of_classes[Y].sum()))
    assert close(weights(model), wanted)


def test_the_other_model_of_a_pair_is_handed_over_beside_it() -> None:
    maker, judge = net(), nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    judging = ElasticStep(judge, adamw(judge))
    judging.most_rows = 4
    judging.step(X[:, :3], lambda part: judge(part).square().mean())
    judge(X[:5, :3])  # in training mode, between two steps
    loss: Loss = lambda part: judge(maker(part)).square().mean()  # noqa: E731
    assert "an nn.ModuleList" in refused(loss, maker, X)
    both = nn.ModuleList([maker, judge])
    before = judge[0].weight.clone()
    ElasticStep(both, adamw(maker)).step(X, loss)
    assert judge[0].weight.equal(before)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda loss: {"loss": loss, "logits": 1}, ""),
        (lambda loss: loss[None], ""),
        (lambda loss: (loss, 1), "the loss is a tuple"),
        (lambda loss: loss.item(), "the loss is a float"),
        (lambda _: None, "the loss is a NoneType"),
        (lambda loss: loss.expand(6), r"the loss has the shape \(6,\)"),
        (lambda loss: loss.detach(), "depends on no parameter that requires a gradient"),
    ],
)
def test_what_a_loss_function_returns(form: Callable[[Tensor], Any], said: str) -> None:
    model = net()
    step = ElasticStep(model, adamw(model)).step
    if not said:
        assert step((X, Y), lambda part: form(classified(model)(part))) > 0
        return
    with pytest.raises(TaskError, match=said):
        step((X, Y), lambda part: form(classified(model)(part)))


def test_figures_are_counted_once_where_the_loss_asks() -> None:
    model, seen = net(), list[int]()
    elastic = ElasticStep(model, adamw(model))

    def loss(part: Any) -> Tensor:
        if not elastic.checking:
            seen.append(len(part[0]))
        return classified(model)(part)

    elastic.most_rows = 5
    elastic.step((X, Y), loss)
    assert sum(seen) == 12


def test_a_loss_may_take_values_out_of_its_batch() -> None:
    model = net()
    elastic = ElasticStep(model, adamw(model))
    batch = {"x": X, "labels": Y}
    for _ in range(2):
        elastic.step(
            batch, lambda part: functional.cross_entropy(model(part["x"]), part.pop("labels"))
        )
    assert list(batch) == ["x", "labels"]


def test_what_cannot_be_done_in_parts_is_one_sentence() -> None:
    model = net()

    def reentrant(part: Any) -> Tensor:
        x = part[0].clone().requires_grad_()
        return functional.cross_entropy(checkpoint(model, x, use_reentrant=True), part[1])

    assert "set use_reentrant=False" in refused(reentrant, model)
    bag = nn.EmbeddingBag(20, 3, sparse=True)
    tokens = torch.randint(20, (12, 5))
    assert "sparse=False" in refused(classified(bag), bag, (tokens, Y))
    with pytest.raises(TaskError, match="LBFGS computes the loss several times"):
        ElasticStep(model, torch.optim.LBFGS(model.parameters()))
    classified(model)((X, Y)).backward()
    assert "call optimizer.zero_grad() before the step" in refused(classified(model), model)
    model.zero_grad()
    elastic = ElasticStep(model, adamw(model))
    elastic.step((X, Y), classified(model))
    weight: Any = model[0].weight
    several: Any = torch.autograd.graph.register_multi_grad_hook
    hooks = (
        weight.register_post_accumulate_grad_hook(lambda _: None),
        *(several((weight,), print, mode=mode) for mode in ("all", "any")),
    )
    for hook in hooks:  # removed one after the other
        with pytest.raises(TaskError, match="register_post_accumulate_grad_hook or register_multi"):
            elastic.step((X, Y), classified(model))
        hook.remove()
    elastic.step((X, Y), classified(model))


class TimeFirst(nn.Module):
    def __init__(self, *, attention: bool) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(20, 16), nn.Dropout(0.2), nn.Linear(16, 20)
        self.reads: nn.Module = nn.LSTM(16, 16)
        if attention:
            self.reads = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        read = self.reads(self.drop(self.embed(tokens)))
        return self.head(read[0] if isinstance(read, tuple) else read)  # type: ignore[no-any-return]


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_time_before_samples_is_named_as_the_likely_cause(attention: bool, turned: bool) -> None:
    model = TimeFirst(attention=attention)
    tokens = torch.randint(20, (12, 4))

    def loss(part: Any) -> Tensor:
        given, labels = (each.T for each in part) if turned else part
        return functional.cross_entropy(model(given).flatten(0, 1), labels.flatten())

    batch = (tokens.T, tokens.T) if turned else (tokens, tokens)
    assert "has batch_first=False: if the first dimension of the batch is time" in refused(
        loss, model, batch
    )


def test_a_batch_that_cannot_be_cut_is_computed_whole_while_it_fits() -> None:
    """An example is a packed row: several samples in one row, and the index of each first token."""
    model, other, has_room = net(), net(), True
    batch = {"x": X[None], "y": Y[None], "begins": torch.tensor([0, 5, 9, 12])}

    def loss(part: Any) -> Tensor:
        if not has_room:
            raise out_of_memory()
        return functional.cross_entropy(model(part["x"][0]), part["y"][0])

    elastic = ElasticStep(model, adamw(model), max_wait_s=0)
    for _ in range(4):
        elastic.step(batch, loss)
    assert close(weights(model), plain(other, classified(other)))
    has_room = False
    with pytest.raises(
        TaskError, match=r"cannot be determined.*packing=False.*at once it does not fit"
    ):
        elastic.step(batch, loss)


def test_batch_norm_that_is_switched_on_later_is_refused() -> None:
    model = net(nn.BatchNorm1d(16)).eval()
    elastic = ElasticStep(model, adamw(model))
    elastic.step((X, Y), classified(model))
    model.train()
    with pytest.raises(PartsError, match="BatchNorm1d"):
        elastic.step((X, Y), classified(model))
    assert int(model[2].num_batches_tracked) == 0


def test_what_is_trained_may_be_the_batch_itself() -> None:
    """An example are vectors that are optimised by gradient descent, one for each sample."""
    one, other = (nn.Parameter(X.clone()) for _ in range(2))
    model, twin = net(), net()
    elastic = ElasticStep(model, torch.optim.SGD([one, *model.parameters()], 0.1))
    optimizer = torch.optim.SGD([other, *twin.parameters()], 0.1)
    elastic.most_rows = 5
    for _ in range(3):
        elastic.step((one, Y), classified(model))
        optimizer.zero_grad()
        classified(twin)((other, Y)).backward()
        optimizer.step()
    assert close([one, *model.parameters()], [other, *twin.parameters()])


#: The weight of the term that a loss adds.
WEIGHT = 0.0


@pytest.mark.parametrize("place", ["global", "own", "switch"])
def test_a_term_that_compares_samples_is_refused_when_it_comes(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The term appears in the fifth step, which is not a power of 2, also through a switch that is
    not visible in the batch, the mode or the code of the loss.
    """
    model, own, switches = net(), 0.0, [False]

    def contrast(made: Tensor) -> Tensor:
        return functional.cross_entropy(made @ made.T, torch.arange(len(made)))

    def by_global(part: Any) -> Tensor:
        return classified(model)(part) + WEIGHT * contrast(model(part[0]))

    def by_own(part: Any) -> Tensor:
        return classified(model)(part) + own * contrast(model(part[0]))

    def by_switch(part: Any) -> Tensor:
        value = classified(model)(part)
        return value + contrast(model(part[0])) if switches[0] else value

    elastic = ElasticStep(model, adamw(model))
    elastic.most_rows = 4
    loss = {"global": by_global, "own": by_own, "switch": by_switch}[place]
    for _ in range(4):
        elastic.step((X, Y), loss)
    own, switches[0], before = 0.5, True, weights(model)
    monkeypatch.setitem(globals(), "WEIGHT", 0.5)
    with pytest.raises(PartsError, match="compares samples with each other"):
        elastic.step((X, Y), loss)
    assert all(map(torch.equal, before, weights(model)))
