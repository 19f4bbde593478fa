"""Losses that choose among samples or keep a state, and batches with unusual values: the result of
the plain loop, or one sentence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.plain_loop import (
    Loss,
    LossOf,
    X,
    Y,
    adamw,
    classified,
    close,
    net,
    of_classes,
    out_of_memory,
    plain,
    refused,
    short,
    trained,
    trained_as_plain,
    weights,
)
from workers.training.elastic import ElasticStep
from workers.training.errors import TaskError
from workers.training.parts import PartsError

PAIRS = torch.arange(12) % 6
COMPARES = "compares samples with each other"


def same_label(labels: Tensor) -> Tensor:
    return (labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool)


def hardest_triplets(model: nn.Module, part: Any) -> Tensor:
    made, labels = functional.normalize(model(part[0]), dim=1), part[1]
    apart = (made[:, None] - made).square().sum(-1)
    same, other = same_label(labels), labels[:, None] != labels
    counts = same.any(1) & other.any(1)
    far = apart.masked_fill(~same, -1.0).amax(1)
    near = apart.masked_fill(~other, 99.0).amin(1)
    return (functional.relu(far - near + 0.3) * counts).sum() / len(labels)


def supervised_contrast(model: nn.Module, part: Any) -> Tensor:
    made, same = functional.normalize(model(part[0]), dim=1), same_label(part[1])
    alike = (2 * made @ made.T).masked_fill(torch.eye(len(made), dtype=torch.bool), -1e9)
    of_pairs = (alike.log_softmax(1) * same).sum(1)
    return -(of_pairs / same.sum(1).clamp(min=1)).mean()


def ranking(model: nn.Module, part: Any) -> Tensor:
    scores = model(part[0])[:, 0]
    pairs = same_label(part[1]).triu()
    return (functional.softplus(scores - scores[:, None]) * pairs).sum() / len(scores)


def of_each(model: nn.Module, part: Any) -> Tensor:
    return functional.cross_entropy(model(part[0]), part[1], reduction="none")


def hardest(model: nn.Module, part: Any) -> Tensor:
    each = of_each(model, part)
    return each.topk(min(5, len(each))).values.mean()


def without_outliers(model: nn.Module, part: Any) -> Tensor:
    each = of_each(model, part)
    known = each.detach()
    return (each * (known <= known.mean() + 1.5 * known.std())).mean()


def mixed_by(draw: Callable[[], Any]) -> LossOf:
    """Mix two losses by a random number for the whole batch."""

    def loss(model: nn.Module, part: Any) -> Tensor:
        share, scores = draw(), model(part[0])
        one, other = (functional.cross_entropy(scores, each) for each in (part[1], 2 - part[1]))
        return share * one + (1 - share) * other  # type: ignore[no-any-return]

    return loss


def test_a_batch_norm_that_keeps_no_statistics_is_refused_by_name() -> None:
    """In eval mode it normalises over the batch as well."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False))
    assert "1 (BatchNorm1d) normalises over" in refused(classified(model), model.double().eval())


def penalised(model: nn.Module, part: Any) -> Tensor:
    """Compute a gradient penalty, which needs a gradient within the loss."""
    inputs = part[0].detach().requires_grad_()
    each = functional.cross_entropy(model(inputs), part[1], reduction="none")
    (slope,) = torch.autograd.grad(each.sum(), inputs, create_graph=True)
    return (each + slope.square().sum(1)).mean()


def a_little_contrast(model: nn.Module, part: Any) -> Tensor:
    """Compare samples under autocast, in a small term. In bf16 an eighth of a gradient may be
    rounding, so the check computes in fp32.
    """
    single = {name: each.float() for name, each in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        made = torch.func.functional_call(model, single, part[0].float())
        contrast = functional.cross_entropy(made @ made.T, torch.arange(len(made)))
        return functional.cross_entropy(made, part[1]) + 0.05 * contrast


@pytest.mark.parametrize(
    "batch",
    [
        [[place % 9] * (9 if place == 20 else 3) for place in range(40)],
        [torch.full((9 if place == 20 else 3,), place % 9) for place in range(40)],
        ["abcdefghi"[place % 9] * (9 if place == 20 else 3) for place in range(40)],
    ],
    ids=["lists", "tensors", "texts"],
)
def test_a_mean_over_samples_of_unequal_lengths_is_refused(batch: Any) -> None:
    """One sample of 40 is longer, and at most four fit."""
    model = nn.Embedding(9, 9).double()

    def loss(part: Any) -> Tensor:
        if len(part) > 4:
            raise out_of_memory()
        tokens = torch.tensor([
            ord(token) - ord("a") if isinstance(token, str) else int(token)
            for sample in part
            for token in sample
        ])  # fmt: skip
        return functional.cross_entropy(model(tokens), tokens)

    assert "unequally many" in refused(loss, model, batch)


def test_a_loss_that_fills_samples_up_to_the_longest_is_refused() -> None:
    """The padding contributes to the loss."""
    samples = [X[place, : 4 + place % 5] for place in range(12)]
    model = nn.Conv1d(1, 3, 3, padding=1).double()

    def loss(part: Any) -> Tensor:
        padded = nn.utils.rnn.pad_sequence(part[0], batch_first=True)
        return functional.cross_entropy(model(padded[:, None]).amax(-1), part[1])

    refused(loss, model, (samples, Y))


class Averaging(nn.Module):
    """Updates a slow average of its weights in a forward pass, as momentum encoders do."""

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.fast, self.slow = net(), net().requires_grad_(requires_grad=False)
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for new, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
                self._write(slow, new)
            wanted = self.slow(x)
        made: Tensor = self.fast(x)
        return functional.mse_loss(made, wanted) + made.square().mean()


def lerp(slow: Tensor, new: Tensor) -> None:
    slow.lerp_(new, 1e-5)


def replace(slow: Tensor, new: Tensor) -> None:
    slow.data = slow.data * 0.99999 + new.data * 0.00001


def behind(slow: Tensor, new: Tensor) -> None:
    slow.data.mul_(0.99999).add_(new.data, alpha=0.00001)


@pytest.mark.parametrize("write", [lerp, replace, behind])
def test_weights_that_a_pass_changes_are_named(write: Callable[[Tensor, Tensor], None]) -> None:
    """The change is too small to show in a gradient: at first both weights are equal."""
    model = Averaging(write).float()
    elastic = ElasticStep(model, adamw(model))

    def two_steps() -> None:
        for _ in range(2):
            elastic.step(X.float(), model)

    with pytest.raises(PartsError, match=r"weight \(Linear\) is changed by each pass"):
        two_steps()


class Queue(nn.Module):
    """Contrasts samples with those of earlier passes, which a table of 2 MiB holds."""

    earlier: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("earlier", functional.normalize(torch.randn(2**17, 4), dim=1))

    def forward(self, x: Tensor) -> Tensor:
        made = functional.normalize(self.inner(x), dim=1)
        own = (made * made.roll(1, 1)).sum(1, keepdim=True)
        logits = torch.cat([own, made @ self.earlier[:, :3].T], 1)
        self.earlier[: len(x), :3] = made.detach()
        return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64))


def test_a_large_table_that_a_pass_changes_is_named() -> None:
    model = Queue().float()
    assert "earlier (Queue) is changed by each pass" in refused(model, model, X.float())


class Annealed(nn.Module):
    """Counts its passes and samples in attributes and buffers, which change its scale."""

    seen: Tensor
    own: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(net()[0])
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.zeros((), dtype=torch.int64), persistent=False)
        self.passes, self.samples, self.warm = 0, 0, True
        self.tensor, self.of_numpy = torch.zeros((), dtype=torch.int64), np.int64(0)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.samples += len(x)
        self.seen += len(x)
        self.own += 1
        self.tensor += 1
        self.of_numpy += 1
        self.warm = self.passes + self.own + self.tensor + self.of_numpy < 12
        made: Tensor = self.inner(x)
        return made * (1.0 if self.warm else 0.5)


@pytest.mark.parametrize("rows", [2, 5, 12])
def test_numbers_that_a_module_keeps_are_those_of_one_pass(rows: int) -> None:
    model, other = trained_as_plain(of_classes, rows=rows, model=Annealed)
    for name in ("passes", "samples", "warm", "own", "tensor", "of_numpy"):
        assert getattr(model, name) == getattr(other, name), name


class Carrying(nn.Module):
    """Begins each batch with the final state of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.head = nn.GRU(4, 8, batch_first=True).double(), nn.Linear(8, 3).double()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        read, state = self.reads(x.view(len(x), 2, 4), self.state)
        self.state = state.detach()
        return self.head(read[:, -1])  # type: ignore[no-any-return]


def test_what_only_a_whole_batch_can_compute_is_computed_while_it_fits() -> None:
    """A state with a row for each sample, weights of classes, positions, and neighbours."""
    matrix, classes = torch.softmax(X @ X.T, 1), torch.linspace(0.1, 2.0, 12)
    model, other = Carrying(), Carrying()
    other.load_state_dict(model.state_dict())
    wide, wider = net(classes=12), net(classes=12)

    def weighted(model: nn.Module) -> Loss:
        return lambda part: functional.cross_entropy(
            model(part[0]), part[1], part[2].double(), reduction="none"
        ).mean()

    def beside(model: nn.Module) -> Loss:
        return lambda part: functional.cross_entropy(model(part[2] @ part[0]), part[1])

    for one, same, made, batch in (
        (model, other, classified, (X, Y)),
        (wide, wider, weighted, (X, Y, classes)),
        (wide, wider, beside, (X, Y, matrix)),
    ):
        assert close(
            trained(one, made(one), lambda batch=batch: batch),  # type: ignore[misc]
            plain(same, made(same), lambda batch=batch: batch),  # type: ignore[misc]
        )
        for limited, most in ((made(one), 5), (short(made(one), 7), None)):
            elastic = ElasticStep(one, adamw(one), sleep=lambda _: None)
            elastic.most_rows = most
            before = weights(one)
            with pytest.raises(TaskError, match="the loss fails with some of the 12 samples") as it:
                elastic.step(batch, limited)
            assert "\n" not in str(it.value)
            assert all(map(torch.equal, before, weights(one)))


@pytest.mark.parametrize(
    ("made", "called"),
    [
        (lambda: X.relu().to_sparse(), "sparse"),
        (lambda: X.relu().to_sparse_csr(), "sparse"),
        (lambda: torch.nested.nested_tensor(list(X[:, None])), "nested"),
        (lambda: torch.nested.nested_tensor(list(X[:, None]), layout=torch.jagged), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(nested|Sparse).*")
def test_a_tensor_that_is_not_dense_is_not_cut(made: Callable[[], Tensor], called: str) -> None:
    batch, model = made(), nn.Linear(8, 3, bias=False).double()

    def loss(part: Any) -> Tensor:
        if part[0].is_nested:
            return model(torch.cat(part[0].unbind())).square().mean()  # type: ignore[no-any-return]
        made: Tensor = part[0] @ model.weight.T
        return made.square().mean()

    assert sum(len(each) for each in trained(model, loss, lambda: (batch, Y))) == 3
    with pytest.raises(TaskError, match=rf"batch\[0\] is a {called} tensor"):
        trained(model, loss, lambda: (batch, Y), 5)


def of_unsigned(model: nn.Module, part: Any) -> Any:
    return functional.cross_entropy(model(part[0].double()), part[1])


def writing(model: nn.Module, part: Any) -> Tensor:
    """Write into the batch, also if a part is computed again."""
    part[0].sub_(part[0].mean(1, keepdim=True)).mul_(2)
    return functional.cross_entropy(model(part[0]), part[1])


def writing_twice(model: nn.Module, part: Any) -> Tensor:
    """Write into a tensor that the batch has twice: as input, and as target."""
    part[0].mul_(0.5)
    return (model(part[0]).sum(1) - part[1].sum(1)).square().mean()


def hooked_activation(model: Any, part: Any) -> Tensor:
    """Add a hook that depends on the sign of a gradient."""
    hidden = model[0](part[0])
    hidden.register_hook(lambda gradient: gradient.clamp(min=0))
    return functional.cross_entropy(model[1:](hidden), part[1])


def keep_first_rows(model: Any) -> torch.optim.Optimizer:
    """Add a hook that writes into a gradient and returns nothing, which freezes rows of an
    embedding.
    """

    def keep(gradient: Tensor) -> None:
        gradient[:5] = 0

    model[0].weight.register_hook(keep)
    return adamw(model)


class Balanced(nn.Module):
    """Divides its loss by the loss's running mean, and counts its calls in a number."""

    usual: Tensor

    def __init__(self, *, reads_late: bool = False) -> None:
        super().__init__()
        self.inner, self.last, self.total, self._reads_late = net(), 0.0, 0.0, reads_late
        self.register_buffer("usual", torch.ones((), dtype=torch.float64))
        self.calls = 0

    def forward(self, part: Any) -> Tensor:
        value = of_classes(self.inner, part)
        usual = self.usual.clone()
        if self.training:
            self.usual.lerp_(value.detach(), 0.1)
        self.last = value.item()  # nothing reads this
        self.total += self.last
        self.calls += 1
        value = value if self.calls < 3 else 0.7 * value
        return value / (self.usual.clone() if self._reads_late else usual)


@pytest.mark.parametrize(("rows", "is_model"), [(1, True), (5, True), (12, True), (5, False)])
def test_a_mean_that_a_module_keeps_is_that_of_one_pass(rows: int, is_model: bool) -> None:
    """The mean of the loss or of outputs, in numbers and in buffers, read or not. The module is the
    model, or another module that the loss uses.
    """
    one, other = Balanced(), Balanced()
    found = trained(one if is_model else one.inner, short(one, rows), most=rows)
    assert close(found, plain(other if is_model else other.inner, other))
    for name in ("calls", "last", "total", "usual"):
        assert float(getattr(one, name)) == pytest.approx(float(getattr(other, name)), rel=1e-9)


def test_a_mean_that_is_read_after_it_was_changed_is_named() -> None:
    model = Balanced(reads_late=True)
    assert refused(model, model).startswith("usual (Balanced) is changed by each pass")


GENERATOR = torch.Generator().manual_seed(3)


def drawn_by_own_generator(model: nn.Module, part: Any) -> Tensor:
    """Draw from a separate generator. Its state advances, so it is noticed whatever it drew."""
    is_left_out = torch.rand((), generator=GENERATOR) < 1e-6
    return of_classes(model, part) * (0.0 if is_left_out else 1.0)


def drawn_for_each_sample(draw: Callable[[], float]) -> LossOf:
    """Draw an event for each sample that is so rare that nothing changes."""

    def loss(model: nn.Module, part: Any) -> Tensor:
        kept = torch.tensor([draw() > 1e-9 for _ in part[1]])
        return (of_each(model, part) * kept).mean()

    return loss


def summed(model: nn.Module, part: Any) -> Any:
    return of_each(model, part).sum()


def free_bits(model: nn.Module, part: Any) -> Any:
    return model(part[0]).square().mean(0).clamp(min=1e-9).sum()


def flooded(model: nn.Module, part: Any) -> Any:
    return (of_classes(model, part) - 0.01).abs() + 0.01


def near(model: nn.Module, part: Any) -> Any:
    return functional.smooth_l1_loss(model(part[0]).mean(0), -9 * torch.ones(3).double())


def worse_of_two(model: nn.Module, part: Any) -> Tensor:
    made = model(part[0])
    return torch.stack([made[:, 0].square().mean(), (made[:, 1] - 9).square().mean()]).max()


def sizes_of_means(model: nn.Module, part: Any) -> Any:
    return torch.linalg.vector_norm(model(part[0]).mean(0) - 9, ord=1)


def less_where_small(model: nn.Module, part: Any) -> Any:
    loss = of_classes(model, part)
    return loss if loss > 0.4 else 0.5 * loss


def less_where_small_in_python(model: nn.Module, part: Any) -> Any:
    loss = of_classes(model, part)
    return loss if loss.detach().item() > 0.8 else 0.5 * loss


def lesser(model: nn.Module, part: Any) -> Any:
    return min(of_classes(model, part), 3 * model(part[0]).square().mean() + 3)


def without_far_outliers(model: nn.Module, part: Any) -> Any:
    each = of_each(model, part)
    return (each * (each.detach() <= 4 * each.detach().mean())).mean()


KINK = "applies abs, clamp, relu, maximum or an `if` to a sum or mean over samples"


@pytest.mark.parametrize(
    ("made", "rows", "labels", "said"),
    [
        # Pairs with the same label. If at most four samples fit, rare labels have no pair.
        *(
            (made, rows, labels, COMPARES)
            for made in (hardest_triplets, supervised_contrast, ranking)
            for rows in (4, 12)
            for labels in (PAIRS, PAIRS.sort().values)
        ),
        # If not all samples fit, or just one, losses are compared without gradients.
        *((hardest, rows, Y, COMPARES) for rows in (4, 12)),
        *((supervised_contrast, rows, Y, COMPARES) for rows in (1, 2)),
        (ranking, 1, Y, COMPARES),
        *((a_little_contrast, rows, Y, COMPARES) for rows in (1, 4, 12)),
        (summed, 1, Y, "is a sum over its items"),
        (drawn_by_own_generator, 12, Y, "draws from torch's own random numbers"),
        *(
            (drawn_for_each_sample(draw), 12, Y, "or those of Python or NumPy for each sample")
            for draw in (random.random, np.random.rand)
        ),
        # Refused before parts lie on both sides of the kink.
        *((made, 12, Y, KINK) for made in (free_bits, flooded, near, worse_of_two)),
        (sizes_of_means, 12, Y, KINK),
        # Refused before a part decides differently.
        *((less_where_small, rows, Y, KINK) for rows in (1, 2, 12)),
        *((less_where_small_in_python, rows, Y, KINK) for rows in (2, 12)),
        (lesser, 12, Y, KINK),
        *((made, 12, Y, KINK) for made in (without_outliers, without_far_outliers)),
    ],
)
def test_what_does_not_add_up_is_refused(
    made: LossOf, rows: int, labels: Tensor, said: str
) -> None:
    model = net()
    assert said in refused(short(partial(made, model), rows), model, (X, labels))


def balanced(model: nn.Module, part: Any) -> Tensor:
    """Add a small loss that balances the load of experts in a mixture."""
    scores = model(part[0].float())
    chosen = functional.one_hot(scores.argmax(1), 3).float().mean(0)
    load = 3 * (chosen * scores.softmax(1).mean(0)).sum()
    return functional.cross_entropy(scores, part[1]) + 1e-4 * load


def test_a_small_term_that_compares_samples_is_told_and_rounding_is_not() -> None:
    model, told = net().float(), list[str]()
    loss = partial(balanced, model)
    assert "load balancing" in refused(loss, model)
    ElasticStep(model, adamw(model), on_hazard=told.append).step((X, Y), loss)
    assert ["load balancing" in sentence for sentence in told] == [True]
    # An ill-conditioned model, whose gradients differ by more than this loss.
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(40)))
    for weight in deep.parameters():
        weight.data *= 3
    ElasticStep(deep, adamw(deep)).step((torch.randn(12, 128), Y), classified(deep))


def bends_each_sample(model: nn.Module, part: Any) -> Tensor:
    """Use kinks that are allowed: of samples, of parameters alone, and of values of each sample."""
    each = of_each(model, part).clamp(max=1.0)
    own = sum(parameter.norm().clamp(min=0.1) for parameter in model.parameters())
    one_by_one = sum((model(x).mean() - 0.1).abs() for x in part[0])
    close_by = functional.smooth_l1_loss(model(part[0])[:, 0], part[1].double())
    return each.mean() + close_by + 0.01 * own + one_by_one / len(part[0])


SEEN: list[float] = []


def decides_nothing(model: Any, part: Any) -> Any:
    """Compare and return numbers of the batch on which no loss depends, or which parts have too."""
    scores = model(part[0])
    loss, size = functional.cross_entropy(scores, part[1]), model[0].weight.norm()
    if torch.isnan(loss) or loss > 1e4 or not torch.isfinite(scores).all():
        raise ValueError("diverged")
    if loss < 1.0 or scores.argmax(1).eq(part[1]).double().mean() > 0.5:
        SEEN.append(loss.item())
    scale = 1.0 if part[0].abs().max() < 99 else 1 / 255
    each = [one if one > 1.0 else one / 2 for one in of_each(model, part)]
    return loss * scale + torch.stack(each).mean() + (size if size > 1 else 0.0) + size.item()


def of_counted(model: nn.Module, part: Any) -> Any:
    """Divide by a count that is at least one in every part."""
    each = of_each(model, part)
    return each.sum() / max(torch.ones_like(each).sum(), 1)


def packed(model: nn.Module, part: Any) -> Tensor:
    """Require sequences sorted by length, the longest first."""
    x, lengths, labels = part
    given = nn.utils.rnn.pack_padded_sequence(x.view(len(x), 8, 1), lengths, batch_first=True)
    return functional.cross_entropy(model(given)[1][0][0], labels)


def slopes(model: nn.Module, part: Any) -> Tensor:
    """Differentiate with torch.func, as for a differential equation."""

    def at(x: Tensor) -> Any:
        given = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        return given.square().sum()

    return torch.func.vmap(torch.func.grad(at))(part[0]).square().sum(1).mean()


def of_lists(model: nn.Module, part: Any) -> Any:
    return sum(model(x).square().mean() for x in part) / len(part)


def of_arrays(model: nn.Module, part: Any) -> Tensor:
    part[0][:] = part[0] / 2
    return of_classes(model, tuple(map(torch.from_numpy, part)))


def copied(model: nn.Module, part: Any) -> Any:
    return of_classes(model, tuple(each.clone() for each in part))


def inferred() -> Any:
    with torch.inference_mode():
        return X + 0, Y + 0


def lstm() -> Any:
    return nn.LSTM(1, 3, batch_first=True).double()


LENGTHS = torch.tensor([8, 8, 8, 7, 6, 6, 5, 4, 3, 3, 2, 1])
RAGGED = [
    X[:1].expand(length, 8) + place
    for place, length in enumerate([10, 9, 7, 8, *[5] * 4, 6, 4, 2, 1])
]


@pytest.mark.parametrize(
    ("made", "batch", "limits"),
    [
        # Parts alone may look like a different kind of loss.
        (bends_each_sample, lambda: (X, Y), {"most": 4}),
        *((decides_nothing, lambda: (X, Y), {"rows": rows}) for rows in (1, 5)),
        *((of_counted, lambda: (X, Y), {"rows": rows}) for rows in (1, 5, 12)),
        (slopes, lambda: (X,), {"most": 4}),
        (of_lists, lambda: RAGGED, {"most": 4}),
        (of_arrays, lambda: (X.numpy().copy(), Y.numpy().copy()), {"most": 4}),
        (copied, inferred, {"most": 4}),
        (packed, lambda: (X, LENGTHS, Y), {"most": 4, "model": lstm}),
        (mixed_by(lambda: np.random.beta(0.4, 0.4)), lambda: (X, Y), {"rows": 3}),
        (mixed_by(lambda: torch.rand(())), lambda: (X, Y), {"rows": 3}),
        *((penalised, lambda: (X, Y), {"rows": rows}) for rows in (1, 3)),
        (of_unsigned, lambda: ((X.abs() * 9).to(torch.uint16), Y), {"rows": 5}),
        (of_unsigned, lambda: ((X.abs() * 9).to(torch.uint32), Y), {"rows": 5}),
        *((writing, lambda: (X.clone(), Y), {"rows": rows}) for rows in (1, 5, 12)),
        (writing_twice, lambda: (X.clone(),) * 2, {"rows": 5}),
        (hooked_activation, lambda: (X, Y), {"rows": 5}),
        *(
            (of_classes, lambda: (X, Y), {"rows": rows, "make": keep_first_rows})
            for rows in (5, 12)
        ),
    ],
)
def test_what_adds_up_trains_in_parts(
    made: LossOf, batch: Callable[[], Any], limits: dict[str, Any]
) -> None:
    trained_as_plain(made, batch, **limits)


def test_a_batch_that_was_written_into_is_not_computed_again() -> None:
    """The loss had not written into a batch before, so it was given no copy."""
    model, step = net(), 0

    def loss(part: Any) -> Tensor:
        if step == 2:
            part[0].neg_()
        value = of_classes(model, part)
        if step == 2 and len(part[0]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. (acted)")
        return value

    elastic = ElasticStep(model, adamw(model), sleep=lambda _: None)
    for step in range(2):  # noqa: B007 - the loss reads `step`
        elastic.step((X.clone(), Y), loss)
    step, before = 2, [each.clone() for each in model.state_dict().values()]
    with pytest.raises(TaskError, match="load the batch again"):
        elastic.step((X.clone(), Y), loss)
    assert all(map(torch.equal, before, model.state_dict().values()))
    elastic.step((X.clone(), Y), loss)
    assert elastic.parts == [4, 4, 4]


class Comparing(torch.optim.Optimizer):
    """Keeps the gradient tensor until the next step, which has another tensor."""

    def __init__(self, parameters: Any, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._keep = keep

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            before = state.get("before", 0)
            parameter.sub_(0.1 * (2 * gradient - (before[-1] if type(before) is list else before)))
            self._keep(state, gradient)


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize(
    "keep",
    [
        lambda state, gradient: state.update(before=gradient),
        lambda state, gradient: state.update(before=gradient.view_as(gradient)),
        lambda state, gradient: state.setdefault("before", []).append(gradient),
    ],
    ids=["itself", "view", "list"],
)
def test_an_optimiser_may_keep_a_gradient(
    most: int | None, keep: Callable[[Any, Tensor], object]
) -> None:
    trained_as_plain(of_classes, most=most, make=lambda model: Comparing(model.parameters(), keep))
