"""The preset `hf-pairs`: a label for a text, or for two, by the model of a folder.

Classes are told apart by their cross-entropy, numbers by their squared distance. Files are JSON
lines, CSV or TSV with a line of names; they are read and tokenised once in each process.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.hf.folder import ModelFolder, blocks_of, heads_of
from workers.hf.folder_files import check_folder
from workers.hf.token_data import lines_of
from workers.training.batches import Samples, on_device
from workers.training.host_memory import HostArray
from workers.training.sequences import NO_TOKEN, filled_up, shortened
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask
from workers.training.text import TextError, TextFiles, evaluated, held_out, json_line

Row: TypeAlias = tuple[list[str], str]
"""One or two texts, and the label."""

Part: TypeAlias = tuple[Tensor, Tensor]
"""Tokens and segments (rows, 2, tokens), and labels (rows)."""

#: Columns where `train.columns` names none; the second one may be missing.
_COLUMNS: Final = ("text", "text_pair", "label")

#: Classes beyond this are taken for a wrong column.
_MOST_CLASSES: Final = 1000


def pairs_task(settings: TrainSettings) -> TrainTask:
    """Return the task of `train.preset: hf-pairs`.

    Raises:
        TaskError: The folder, the data or a key cannot be used.
    """
    files = TextFiles(str(settings.data))
    rows = _rows_of(files, settings.columns)
    classes = _classes_of(settings, [label for _, label in rows])
    numbers = {name: number for number, name in enumerate(classes)}
    folder = ModelFolder(
        settings,
        "AutoModelForSequenceClassification",
        num_labels=len(classes) or 1,
        problem_type="single_label_classification" if classes else "regression",
        **({"id2label": dict(enumerate(classes)), "label2id": numbers} if classes else {}),
    )
    unseen = None
    if settings.validation is not None:
        other = TextFiles(settings.validation)
        unseen = Pairs(_rows_of(other, settings.columns), numbers, folder, other.root)
    data = Pairs(rows, numbers, folder, files.root, holds_out=unseen is None)
    digest = hashlib.blake2b(repr((classes, rows)).encode(), digest_size=8).hexdigest()
    return TrainTask(
        name=f"hf-pairs {folder.config.model_type}",
        model=folder.model,
        dataset=data,
        fingerprint=f"pairs {digest}",
        loss=partial(pair_loss, label_smoothing=settings.label_smoothing),
        evaluate=partial(evaluate, data.held if unseen is None else unseen.all, len(classes)),
        blocks=blocks_of,
        collate=_collated,
        shorten=lambda part: (shortened(part[0]), part[1]),
        largest=lambda: (torch.zeros((1, 2, folder.seq), dtype=torch.int64), data.labels[:1]),
        whole=lambda model: dict.fromkeys(heads_of(model), settings.head != "frozen"),
        notes=folder.notes,
        uses=frozenset({"data", "seq", "dropout", "label_smoothing"}),
        lr=2e-4 if settings.adapter != "none" else 5e-5,
    )


class Pairs(Samples):
    """Samples of tokens with segments (2, up to seq), and a label."""

    def __init__(
        self,
        rows: Sequence[Row],
        numbers: Mapping[str, int],
        folder: ModelFolder,
        root: Path,
        *,
        holds_out: bool = False,
    ) -> None:
        """Turn labels into numbers, those of classes or their own; texts are tokenised when the
        first sample is asked for.

        Raises:
            TextError: There is a label that the training data does not have, or none.
        """
        self._texts = [texts for texts, _ in rows]
        self._folder = folder
        self._root = root
        self._held = held_out(len(rows)) if holds_out else range(len(rows), len(rows))
        self._items = self._held.start
        try:
            labels = [numbers[label] if numbers else _finite(label) for _, label in rows]
        except (KeyError, ValueError) as failure:
            known = ", ".join([*numbers][:5]) or "numbers"
            raise TextError(
                f"train.data: {root} has the label {failure.args[0]!r}, and the training knows "
                f"{known}; correct it, or set train.columns or train.labels"
            ) from failure
        self.labels = torch.tensor(labels, dtype=torch.int64 if numbers else torch.float32)

    def __getitems__(self, indices: Sequence[int]) -> list[Part]:
        """Return several samples."""
        return [self._sample(index) for index in indices]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return how many tokens these samples have."""
        return [int(self._tokens[1][index + 1] - self._tokens[1][index]) for index in indices]

    def held(self) -> Iterator[Part]:
        """Yield the samples that are held out, one by one."""
        return (_collated([self._sample(place)]) for place in evaluated(self._held))

    def all(self) -> Iterator[Part]:
        """Yield all samples, one by one."""
        return (_collated([self._sample(index)]) for index in range(self._items))

    def _sample(self, index: int) -> Part:
        numbers, ends = self._tokens
        own = numbers[int(ends[index]) : int(ends[index + 1])].long()
        second = own < 0
        return torch.stack((torch.where(second, ~own, own), second.long())), self.labels[index]

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """All tokens, those of a second segment inverted (~), and where each sample ends."""
        numbers, ends = HostArray(torch.int32), [0]
        for texts in self._texts:
            made = self._folder.tokenizer(
                *texts, truncation=True, max_length=self._folder.seq, return_token_type_ids=True
            )
            tokens, segments = (torch.tensor(made[key]) for key in ("input_ids", "token_type_ids"))
            if not len(tokens):
                raise TextError(
                    f"train.data: the text of row {len(ends)} of {self._root} is empty; take it out"
                )
            numbers.extend(torch.where(segments > 0, ~tokens, tokens).int())
            ends.append(ends[-1] + len(tokens))
        self._texts = []
        return numbers.whole(), torch.tensor(ends)


def pair_loss(model: nn.Module, part: Part, label_smoothing: float = 0.0) -> Tensor:
    """Sum the cross-entropy, or the squared distance, over samples."""
    logits, labels = _logits(model, part), part[1]
    if labels.is_floating_point():
        return (logits[:, 0] - labels).square().sum()
    return functional.cross_entropy(
        logits, labels, reduction="sum", label_smoothing=label_smoothing
    )


def evaluate(
    samples: Callable[[], Iterable[Part]], classes: int, model: nn.Module
) -> Mapping[str, float]:
    """Return the mean loss; and of classes the accuracy and the mean of their F1, of numbers the
    mean distance.
    """
    device = next(model.parameters()).device
    losses, guesses, labels = list[float](), list[float](), list[float]()
    for sample in samples():
        part = on_device(sample, device)
        logits = _logits(model, part)
        guesses.append(float(logits.argmax() if classes else logits[0, 0]))
        labels.append(float(part[1]))
        losses.append(float(pair_loss(model, part)))
    if not losses:
        return {}
    both = list(zip(guesses, labels, strict=True))
    loss = {"validation_loss": sum(losses) / len(losses)}
    if not classes:
        return {**loss, "mean_distance": sum(abs(one - other) for one, other in both) / len(both)}
    f1 = [
        2 * both.count((name, name)) / (guesses.count(name) + labels.count(name))
        for name in sorted({*guesses, *labels})
    ]
    right = sum(one == other for one, other in both)
    return {**loss, "accuracy": right / len(both), "f1": sum(f1) / len(f1)}


def _logits(model: nn.Module, part: Part) -> Tensor:
    tokens, segments = part[0].unbind(dim=1)
    there = tokens != NO_TOKEN
    config: Any = model.config
    inputs = {"input_ids": tokens.where(there, config.pad_token_id), "attention_mask": there.long()}
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = segments.clamp(min=0)
    logits: Tensor = model(**inputs).logits
    return logits.float()


def _collated(samples: Sequence[Part]) -> Part:
    return filled_up([tokens for tokens, _ in samples]), torch.stack(
        [label for _, label in samples]
    )


def _classes_of(settings: TrainSettings, labels: Sequence[str]) -> list[str]:
    """Return the names of the classes in their order; none: labels are numbers."""
    if settings.labels == "numbers" or (settings.labels == "auto" and _are_fractions(labels)):
        return []
    found = set(labels)
    if len(found) < 2 or len(found) > _MOST_CLASSES:
        raise TextError(
            f"train.data: the label column of {settings.data} has {len(found)} different values; "
            f"classes are 2 to {_MOST_CLASSES}: name its column last in train.columns, or set "
            "train.labels to numbers"
        )
    known = check_folder(str(settings.model)).get("label2id") or {}
    if found <= known.keys():
        return sorted(known, key=lambda name: int(known[name]))
    return sorted(found, key=lambda name: (int(name), "") if name.isdecimal() else (0, name))


def _finite(label: str) -> float:
    with suppress(ValueError):
        if isfinite(number := float(label)):
            return number
    raise ValueError(label)


def _are_fractions(labels: Sequence[str]) -> bool:
    with suppress(ValueError):
        return any(not _finite(label).is_integer() for label in labels)
    return False


def _rows_of(files: TextFiles, columns: Sequence[str] | None) -> list[Row]:
    """Return the rows of all files.

    Raises:
        TextError: A file has other columns, or a row lacks one.
    """
    rows = list[Row]()
    for path in files.paths:
        for where, content in _table(path):
            *texts, label = columns or [
                name for name in _COLUMNS if name != "text_pair" or name in content
            ]
            if missing := [name for name in (*texts, label) if content.get(name) in {None, ""}]:
                raise TextError(
                    f"train.data: {where} has no {missing[0]!r} (it has "
                    f"{', '.join(map(repr, content))[:200]}); set train.columns to the texts and "
                    "the label, such as [text, label]"
                )
            rows.append(([str(content[name]) for name in texts], str(content[label])))
    if not rows:
        raise TextError(f"train.data: {files.root} has no row; give text and labels")
    return rows


def _table(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    lines = lines_of(path)
    if path.suffix in {".csv", ".tsv"}:
        table = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
        for row in table:
            yield f"line {table.line_num} of {path}", row
        return
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {path}"
        content = json_line(line, where, "files of hf-pairs are .jsonl, .csv or .tsv")
        if not isinstance(content, dict):
            raise TextError(f"train.data: {where} holds no JSON object")
        yield where, content
