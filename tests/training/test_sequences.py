"""Documents of unequal lengths: filled up, in batches of similar length, or several in a row."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from tests.training.scene import CPU, GPT, replay, settings, task
from workers.training import sequences
from workers.training.errors import TaskError
from workers.training.made_data import MadeText
from workers.training.memory_plan import MemoryPlanner
from workers.training.order import by_length, packed_rows, pool_samples, samples
from workers.training.sequences import NO_TOKEN, PackedRows, filled_up, packed_row
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task, next_token_loss, next_tokens
from workers.training.trainer import Trainer

SEQ, LEAST, ITEMS = 16, 3, 100


def documents() -> MadeText:
    return MadeText(SEQ, 256, 0, items=ITEMS, least_seq=LEAST)


def unequal(packing: bool = False) -> TrainTask:
    """Return the small GPT on documents of unequal lengths."""
    if packing:
        rows = PackedRows(documents(), SEQ)
        return replace(
            task(GPT), dataset=rows, loss=sequences.packed_loss, count=sequences.packed_tokens
        )
    return replace(
        task(GPT),
        dataset=documents(),
        loss=next_token_loss,
        count=next_tokens,
        collate=filled_up,
        shorten=sequences.shortened,
        largest=lambda: sequences.longest_part(SEQ),
    )


def trained(what: TrainTask, splits: list[list[int]], **keys: Any) -> Trainer:
    run = Trainer(what, settings(steps=20, **keys), CPU, 7)
    replay(run, splits)
    return run


def gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def test_made_documents_have_the_lengths_that_are_told() -> None:
    made, whole = documents(), MadeText(SEQ, 256, 0, items=ITEMS)
    lengths = made.lengths(range(ITEMS))
    assert [len(made[index]) for index in range(ITEMS)] == lengths
    assert (min(lengths), max(lengths)) == (LEAST + 1, SEQ + 1)
    assert all(made[index].equal(whole[index][: lengths[index]]) for index in range(ITEMS))


def test_batches_of_similar_length_use_each_sample_once() -> None:
    size = pool_samples(10_000, 8)
    assert size == 8 * 64
    assert pool_samples(100, 12) == 24, (
        "of a small data set at most a quarter, or an item came twice in a batch"
    )
    pool = samples(1, 10_000, size, size)
    lengths = MadeText(256, 256, 0, least_seq=8).lengths([each.index for each in pool])
    found = by_length(pool, lengths, 8, seed=1)
    assert sorted(each.number for each in found) == [each.number for each in pool]
    length_of = dict(zip((each.number for each in pool), lengths, strict=True))
    batches = [
        [length_of[each.number] for each in found[first : first + 8]] for first in range(0, size, 8)
    ]
    assert max(max(each) - min(each) for each in batches) < 32
    longest = [max(each) for each in batches]
    assert longest not in (sorted(longest), sorted(longest, reverse=True)), "their order is drawn"
    assert by_length(pool, lengths, 8, seed=2) != found


def test_each_document_is_in_one_row_and_rows_are_full() -> None:
    made = MadeText(256, 256, 0, items=5000, least_seq=8)
    lengths = [each - 1 for each in made.lengths(range(5000))]
    found = PackedRows(made, 256)
    rows = [found.documents_of(row) for row in range(len(found))]
    assert sorted(document for row in rows for document in row) == list(range(5000))
    assert max(max(row) - min(row) for row in rows) < 1024, (
        "those of a row lie near each other in a file"
    )
    filled = [sum(lengths[document] for document in row) for row in rows]
    assert max(filled) <= 256
    assert sum(filled) > 0.98 * 256 * len(rows)
    with pytest.raises(ValueError, match="document 1 has 9 tokens, and a row 8"):
        packed_rows([8, 9], 8)


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
    made = documents()
    rows = PackedRows(made, SEQ)
    mine = [document for row in range(len(rows)) for document in rows.documents_of(row)]
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


def test_what_is_left_of_a_row_has_no_label() -> None:
    row = packed_row([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], 6)
    assert row.tolist() == [[5, 6, 8, 0, 0, 0], [6, 7, 9, -1, -1, -1], [0, 1, 0, 0, 1, 2]]
    assert sequences.packed_tokens(row[None]) == 3


@pytest.mark.parametrize("lever", ["none", "bucketing", "packing"])
def test_another_micro_batch_changes_the_loss_by_rounding_only(lever: str) -> None:
    what, keys = unequal(packing=lever == "packing"), {"bucketing": lever == "bucketing"}
    alone = trained(what, [[12, 0, 20]], **keys)
    parts = trained(what, [[12, 0, 3], [5, 1, 3 * 12], [3, 0, 4 * 5]], **keys)
    assert (alone.step, parts.step) == (20, 20)
    assert gap(parts.course.losses, alone.course.losses) <= 1e-6
    first = trained(what, [[12, 0, 7]], **keys)
    second = Trainer(what, settings(steps=20, **keys), CPU, 7)
    second.load(copy.deepcopy(first.state()))
    replay(second, [[12, 0, 13]])
    assert second.weights_sha256() == alone.weights_sha256()


def test_bucketing_and_packing_fill_up_less() -> None:
    text = MadeText(64, 256, 0, items=2000, least_seq=4)
    tasks = [replace(unequal(), dataset=text)] * 2 + [
        replace(unequal(packing=True), dataset=PackedRows(text, 64))
    ]
    wasted = []
    for what, bucketing in zip(tasks, (False, True, False), strict=True):
        run = Trainer(what, settings(batch=12, bucketing=bucketing), CPU, 7)
        computed = useful = 0
        for _ in range(40):
            run._feed.take()
            batch = run._feed.batch
            computed += batch[:, 0].numel() if what.shorten is None else batch[:, 1:].numel()
            useful += run._feed.count
        wasted.append(1 - useful / computed)
    assert wasted[0] > 0.4
    assert wasted[1] < 0.1
    assert wasted[2] < 0.03


def test_a_preset_plans_for_its_longest_document(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some words\n" * 20)
    plans, own = list[int](), {"data": str(tmp_path), "documents": "lines"}
    kinds: list[dict[str, Any]] = [
        {},
        {"min_seq": 4},
        {"min_seq": 4, "packing": True},
        own,
        own | {"packing": True},
    ]
    for keys in kinds:
        chosen = TrainSettings(preset="gpt-nano", batch=4, **keys)
        plans.append(
            MemoryPlanner(find_task(chosen, 0), chosen, on_card=False).plan(4, 0).activations_bytes
        )
    assert plans[1] == pytest.approx(plans[0], rel=0.02)
    assert plans[2] >= plans[0]
    assert plans[3:] == plans[1:3], "whatever lengths the text has"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"packing": True},
            r"set train.documents \(your own text\) or train.min_seq \(made text\)",
        ),
        (
            {"packing": True, "preset": "cnn-small"},
            "train.packing is for the GPT presets, and cnn-small is none",
        ),
        (
            {"bucketing": True},
            "those of gpt-nano have one length, or do not tell it; set train.documents ",
        ),
        ({"min_seq": 64}, "train.min_seq is 64, and a text has at most 64 tokens"),
    ],
)
def test_what_has_no_unequal_lengths_is_refused_in_one_sentence(
    keys: dict[str, object], sentence: str
) -> None:
    chosen = TrainSettings(**keys)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=sentence):
        Trainer(find_task(chosen, 0), chosen, CPU, 0)


@pytest.mark.parametrize(
    "keys",
    [
        {"packing": True, "bucketing": True},
        {"min_seq": 4, "data": "here"},
        {"min_seq": 4, "r_drop": 1.0, "dropout": 0.1},
        {"documents": "lines", "data": "here", "r_drop": 1.0, "dropout": 0.1},
    ],
)
def test_keys_that_exclude_each_other_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="valid: one of them"):
        TrainSettings(**keys)


def test_documents_without_a_text_of_ones_own_are_refused() -> None:
    with pytest.raises(ValidationError, match="documents: windows, or also set train"):
        TrainSettings(documents="lines")


def test_operations_go_by_tokens_and_not_by_what_fills_up() -> None:
    run = Trainer(unequal(), settings(bucketing=True), CPU, 7)
    lengths, rates = [], []
    for _ in range(6):
        rates.append(run.flop_per_sample() / run.items_per_sample)
        lengths.append(run.items_per_sample)
        replay(run, [[12, 0, 1]])
    assert max(lengths) > 1.5 * min(lengths)
    assert max(rates) < 1.05 * min(rates)
