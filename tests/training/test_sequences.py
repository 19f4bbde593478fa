"""Documents of unequal lengths: padded, in batches of similar length, or several in a row."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.training.scene import GPT, task
from workers.training.memory_plan import MemoryPlanner, answer
from workers.training.sequences import NO_TOKEN, PackedRows, padded
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.text import TextBytes

SEQ = 16


def written(folder: Path, seq: int, least_seq: int, items: int) -> TextBytes:
    """Write documents of unequal lengths; short ones are more frequent."""
    draw = random.Random(0)  # noqa: S311 - repeatable
    lengths = [
        least_seq + 1 + int(draw.random() ** 2 * (seq - least_seq + 1)) for _ in range(items)
    ]
    lines = ["".join(draw.choices("abcd efgh", k=length)) + "\n" for length in lengths]
    (folder / "lines.txt").write_text("".join(lines))
    return TextBytes(folder, seq, "lines")


def test_each_document_is_in_one_row_and_rows_are_full(tmp_path: Path) -> None:
    made = written(tmp_path, 256, 8, 5000)
    lengths = [each - 1 for each in made.lengths(range(len(made)))]
    found = PackedRows(made, 256)
    rows = [found._rows[row].tolist() for row in range(len(found))]
    assert sorted(document for row in rows for document in row) == list(range(len(made)))
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


def test_the_loss_of_each_token_is_that_of_its_document_alone(tmp_path: Path) -> None:
    made = written(tmp_path, SEQ, 3, 100)
    rows = PackedRows(made, SEQ)
    mine = [document for row in range(len(rows)) for document in rows._rows[row].tolist()]
    assert len(mine) > 1.5 * len(rows)
    tokens = padded([made[document] for document in mine])
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
    (tmp_path / "text.txt").write_text("\n".join("a" * (number % 90) for number in range(3000)))
    lines = {"data": str(tmp_path), "documents": "lines"}
    plans = list[int]()
    for keys in ({}, lines, lines | {"packing": True}):
        chosen = TrainSettings.model_validate({"preset": "gpt-nano", "batch": 4} | keys)
        planner = MemoryPlanner(find_task(chosen, 0), chosen, on_card=False)
        plans.append(planner.plan(4, 0).activations_bytes)
    assert plans[1] == pytest.approx(plans[0], rel=0.02)
    assert plans[2] >= plans[0]


def test_packed_rows_are_planned_where_the_text_is_on_another_pc() -> None:
    train = {"preset": "gpt-nano", "data": "/not/here", "documents": "lines", "packing": True}
    cap = {"cap_bytes": 2**30, "device": "cpu"}
    planned = answer({"settings": train, "seed": 0, "caps": [cap]})
    assert planned["caps"][0]["steps"][-1]["fits"]
