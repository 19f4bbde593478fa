"""Documents of unequal lengths: filled up, in batches of similar length, or several in a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from tests.training.scene import GPT, task
from workers.training.memory_plan import MemoryPlanner, answer
from workers.training.sequences import NO_TOKEN, PackedRows, filled_up
from workers.training.settings import TrainSettings
from workers.training.tasks import MadeText, find_task

SEQ, LEAST, ITEMS = 16, 3, 100


class Documents(MadeText):
    """Made text of unequal lengths, of which short ones are more frequent."""

    key = "made"

    def __init__(self, seq: int, least_seq: int, items: int) -> None:
        super().__init__(seq, 256, 0, items)
        chances = torch.rand(items, generator=torch.Generator().manual_seed(0)).square()
        self._lengths = (chances * (seq - least_seq + 1)).to(torch.int64) + least_seq + 1

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return how many tokens these have."""
        return self._lengths[torch.tensor(indices)].tolist()

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the beginnings of the texts."""
        whole = zip(super().__getitems__(indices), self.lengths(indices), strict=True)
        return [text[:length] for text, length in whole]


def test_each_document_is_in_one_row_and_rows_are_full() -> None:
    made = Documents(256, 8, 5000)
    lengths = [each - 1 for each in made.lengths(list(range(5000)))]
    found = PackedRows(made, 256)
    rows = [found._rows[row].tolist() for row in range(len(found))]
    assert sorted(document for row in rows for document in row) == list(range(5000))
    assert max(max(row) - min(row) for row in rows) < 1024, (
        "those of a row lie near each other in a file"
    )
    filled = [sum(lengths[document] for document in row) for row in rows]
    assert max(filled) <= 256
    assert sum(filled) > 0.98 * 256 * len(rows)


def losses_and_gradient(
    inputs: Tensor, labels: Tensor, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each label, in the order of the documents, and the gradient of their sum."""
    torch.manual_seed(0)
    model = task(GPT, dropout=0.0).model()
    logits = model(inputs, places)
    each = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=NO_TOKEN
    )
    each = each[labels.flatten() != NO_TOKEN]
    gradients = torch.autograd.grad(each.sum(), list(model.parameters()))
    return each.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def test_the_loss_of_each_token_is_that_of_its_document_alone() -> None:
    made = Documents(SEQ, LEAST, ITEMS)
    rows = PackedRows(made, SEQ)
    mine = [document for row in range(len(rows)) for document in rows._rows[row].tolist()]
    assert len(mine) > 1.5 * len(rows)
    tokens = filled_up([made[document] for document in mine])
    inputs, labels, places = torch.stack(rows.__getitems__(range(len(rows)))).unbind(1)
    alone, of_alone = losses_and_gradient(tokens[:, :-1].clamp(min=0), tokens[:, 1:], None)
    together, of_together = losses_and_gradient(inputs, labels, places)
    assert together.shape == alone.shape
    assert float(((together - alone).abs() / alone).max()) <= 1e-6
    assert abs(float(together.sum() / alone.sum()) - 1) <= 1e-6
    assert float((of_together - of_alone).norm() / of_alone.norm()) <= 1e-6
    seeing_all, _ = losses_and_gradient(inputs, labels, None)
    assert float(((seeing_all - alone).abs() / alone).max()) > 1e-3, "a difference would show"


def test_a_preset_plans_for_its_longest_document(tmp_path: Path) -> None:
    plans, kinds = list[int](), list[dict[str, Any]]()
    (tmp_path / "text.txt").write_text("\n".join("a" * (number % 90) for number in range(3000)))
    lines = {"data": str(tmp_path), "documents": "lines"}
    kinds += {}, lines, lines | {"packing": True}
    for keys in kinds:
        chosen = TrainSettings(preset="gpt-nano", batch=4, **keys)
        planner = MemoryPlanner(find_task(chosen, 0), chosen, on_card=False)
        plans.append(planner.plan(4, 0).activations_bytes)
    assert plans[1] == pytest.approx(plans[0], rel=0.02)
    assert plans[2] >= plans[0]


def test_packed_rows_are_planned_where_the_text_is_on_another_pc() -> None:
    train = {"preset": "gpt-nano", "data": "/not/here", "documents": "lines", "packing": True}
    cap = {"cap_bytes": 2**30, "device": "cpu"}
    planned = answer({"settings": train, "seed": 0, "caps": [cap]})
    assert planned["caps"][0]["steps"][-1]["fits"]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"packing": True, "bucketing": True}, "valid: one of them"),
        (
            {"documents": "lines", "data": "here", "r_drop": 1.0, "dropout": 0.1},
            "valid: one of them",
        ),
        ({"packing": True}, "also set train.data and train.documents"),
        ({"documents": "lines"}, "documents: windows, or also set train"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TrainSettings(**keys)
