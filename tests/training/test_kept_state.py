"""State that a pass changes in the model and reads, such as a count of samples or the rows of a
table: the result of the plain loop, or one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.plain_loop import net, of_classes, trained_as_plain
from workers.training.elastic import ElasticStep
from workers.training.parts import PartsError


class Counting(nn.Module):
    """Reads the number of earlier samples in total and in each class, and then counts the samples
    of this pass, but none in its first passes.
    """

    of_class: Tensor

    def __init__(self, begins: int = 0) -> None:
        super().__init__()
        self.inner, self.samples, self.passes, self._begins = net(), 0, 0, begins
        self.register_buffer("of_class", torch.ones(3, dtype=torch.float64))

    def forward(self, part: Any) -> Tensor:
        warm = 1.0 if self.samples < 20 else 0.5
        made = self.inner(part[0]) / (1 + self.samples / 20) + self.of_class.log()
        if self.passes >= self._begins:
            self.samples += len(part[0])
            self.of_class += torch.bincount(part[1], minlength=3)
        self.passes += 1
        return warm * functional.cross_entropy(made, part[1])


def itself(model: nn.Module, part: Any) -> Any:
    return model(part)


@pytest.mark.parametrize("begins", [0, 2])
@pytest.mark.parametrize("most", [4, 1])
def test_a_count_is_read_as_it_was_before_the_batch(most: int, begins: int) -> None:
    """Each part reads the count that the whole batch would read, without the parts before it; also
    if the count begins in a batch that is like the ones before.
    """
    one, other = trained_as_plain(itself, model=partial(Counting, begins), most=most)
    assert one.samples == other.samples == (4 - begins) * 12
    assert torch.equal(one.of_class, other.of_class)


def test_a_buffer_that_was_expanded_stays() -> None:
    """Torch refuses to write into an expanded buffer."""

    def made() -> nn.Module:
        model = net()
        model.register_buffer("ones", torch.ones(1, dtype=torch.float64).expand(3))
        return model

    def weighted(model: nn.Module, part: Any) -> Any:
        ones: Any = model.ones
        return functional.cross_entropy(model(part[0]) * ones, part[1])

    one, other = trained_as_plain(weighted, model=made, most=4)
    assert one.ones.stride() == other.ones.stride() == (0,)


class Counter(nn.Module):
    """Counts passes in a buffer."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x


class Reader(nn.Module):
    """Has the same buffer under another name."""

    seen: Tensor

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.register_buffer("seen", counter.passes)

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + self.seen.clone())


def counted() -> nn.Sequential:
    counter = Counter()
    return nn.Sequential(net(), counter, Reader(counter))


@pytest.mark.parametrize("rows", [12, 5, 2])
def test_a_buffer_that_two_modules_share_stays_one(rows: int) -> None:
    model, _ = trained_as_plain(of_classes, model=counted, rows=rows)
    assert model[1].passes is model[2].seen
    assert float(model[1].passes) == 4


TOKENS = torch.randint(0, 40, (12, 5), generator=torch.Generator().manual_seed(3))


class Shortened(nn.Module):
    """Shortens each row of a table before it reads it."""

    def __init__(self, kind: Callable[..., nn.Module], dtype: torch.dtype, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        table: Any = kind(40, 8, max_norm=1.0)
        self.table, self.head = table.to(dtype), nn.Linear(8, 40, bias=False).to(dtype)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        read = self.table(tokens)
        return self.head(read.mean(1) if read.dim() == 3 else read)  # type: ignore[no-any-return]


def predicted(model: nn.Module, part: Any) -> Tensor:
    return functional.cross_entropy(model(part[0]), part[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 3.0)  # so that norms of rows exceed 1 again


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("rows", [5, 2])
def test_an_embedding_with_a_largest_norm_trains_in_parts(
    kind: Callable[..., nn.Module], rows: int
) -> None:
    trained_as_plain(
        predicted,
        lambda: (TOKENS, TOKENS[:, 0]),
        rows=rows,
        make=sgd,
        model=lambda: Shortened(kind, torch.float64, tied=False),
    )


def test_one_in_single_precision_is_shortened_by_rounding_and_not_refused() -> None:
    model = Shortened(nn.Embedding, torch.float32, tied=False)
    elastic = ElasticStep(model, sgd(model))
    elastic.most_rows = 5
    for _ in range(4):
        elastic.step((TOKENS, TOKENS[:, 0]), lambda part: predicted(model, part))
    assert elastic.parts == [4, 4, 4]


def test_one_whose_table_is_read_elsewhere_is_refused() -> None:
    """A part would read rows that only other parts have shortened."""
    model = Shortened(nn.Embedding, torch.float64, tied=True)
    elastic = ElasticStep(model, sgd(model))
    with pytest.raises(PartsError, match=r"^weight \(Embedding\) is changed by each pass"):
        elastic.step((TOKENS, TOKENS[:, 0]), lambda part: predicted(model, part))
