"""The preset `hf-pairs`: a label for a text, or for two, by the model of a folder.

Classes are told apart by their cross-entropy, numbers by their squared distance; a label that is a
text is written by an encoder-decoder, token by token. Files are JSON lines, CSV or TSV with a line
of names; they are read and tokenised once in each process.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from workers.training.batches import Samples, rows_of
from workers.training.host_memory import HostArray
from workers.training.sequences import NO_TOKEN, cross_entropy, filled_up, shortened
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, Validation
from workers.training.text import TextError, TextFiles, evaluated, held_out, json_line

Row: TypeAlias = tuple[list[str], str]
"""One or two texts, and the label."""

Part: TypeAlias = tuple[Tensor, Tensor]
"""Tokens and segments (rows, 2, tokens), and labels (rows), or the tokens of texts."""

#: Columns where `train.columns` names none; the second one may be missing.
_COLUMNS: Final = ("text", "text_pair", "label")

_TEXTS: Final = ("text", "text_pair")
"""What a tokenizer calls them."""

#: What transformers takes for a label that is not there.
_IGNORED: Final = -100

#: Classes beyond this are taken for a wrong column.
_MOST_CLASSES: Final = 1000


def pairs_task(settings: TrainSettings) -> TrainTask:
    """Return the task of `train.preset: hf-pairs`.

    Raises:
        TaskError: The folder, the data or a key cannot be used.
    """
    files = TextFiles(str(settings.data))
    rows = _rows_of(files, settings.columns)
    writes = settings.labels == "text"
    classes = [] if writes else _classes_of(settings, [label for _, label in rows])
    numbers = {name: number for number, name in enumerate(classes)}
    if writes:
        folder = ModelFolder(settings, "AutoModelForSeq2SeqLM")
    else:
        folder = ModelFolder(
            settings,
            "AutoModelForSequenceClassification",
            num_labels=len(classes) or 1,
            problem_type="single_label_classification" if classes else "regression",
            **({"id2label": dict(enumerate(classes)), "label2id": numbers} if classes else {}),
        )
    unseen = None
    kind = TextPairs if writes else Pairs
    if settings.validation is not None:
        other = TextFiles(settings.validation)
        unseen = kind(_rows_of(other, settings.columns), numbers, folder, other.root)
    data = kind(rows, numbers, folder, files.root, holds_out=unseen is None)
    samples = data.held if unseen is None else unseen.all
    digest = hashlib.blake2b(repr((classes, rows)).encode(), digest_size=8).hexdigest()
    task = TrainTask(
        name=f"hf-pairs {folder.config.model_type}",
        model=folder.model,
        dataset=data,
        fingerprint=f"pairs {digest}",
        loss=partial(pair_loss, label_smoothing=settings.label_smoothing),
        evaluate=PairsValidation(
            samples=samples,
            loss=pair_loss,
            count=rows_of,
            collate=_collated,
            classes=len(classes),
        ),
        blocks=blocks_of,
        collate=_collated,
        shorten=lambda part: (shortened(part[0]), part[1]),
        largest=lambda: (torch.zeros((1, 2, folder.seq), dtype=torch.int64), data.labels[:1]),
        whole=lambda model: dict.fromkeys(heads_of(model), settings.head != "frozen"),
        notes=folder.notes,
        uses=frozenset({"data", "seq", "dropout", "label_smoothing"}),
        lr=2e-4 if settings.adapter != "none" else 5e-5,
    )
    if not writes:
        return task
    return replace(
        task,
        loss=partial(text_loss, label_smoothing=settings.label_smoothing),
        count=_count_targets,
        items="tokens",
        evaluate=Validation(
            samples=samples, loss=text_loss, count=_count_targets, collate=_collated
        ),
        shorten=lambda part: (shortened(part[0]), shortened(part[1])),
        largest=lambda: (
            torch.zeros((1, 2, folder.seq), dtype=torch.int64),
            torch.zeros((1, folder.seq), dtype=torch.int64),
        ),
        whole=lambda model: dict.fromkeys(heads_of(model), settings.head == "train"),
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
        self.labels = self._labels_of([label for _, label in rows], numbers)

    def _labels_of(self, texts: Sequence[str], numbers: Mapping[str, int]) -> Tensor:
        try:
            labels = [numbers[text] if numbers else _finite(text) for text in texts]
        except (KeyError, ValueError) as failure:
            known = ", ".join([*numbers][:5]) or "numbers"
            raise TextError(
                f"train.data: {self._root} has the label {failure.args[0]!r}, and the training "
                f"knows {known}; correct it, or set train.columns or train.labels"
            ) from failure
        return torch.tensor(labels, dtype=torch.int64 if numbers else torch.float32)

    def __getitems__(self, indices: Sequence[int]) -> list[Part]:
        """Return several samples."""
        return [self._sample(index) for index in indices]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return how many tokens these samples have."""
        return [int(self._tokens[1][index + 1] - self._tokens[1][index]) for index in indices]

    def held(self) -> Iterator[Part]:
        """Yield samples that are held out."""
        return map(self._sample, evaluated(self._held))

    def all(self) -> Iterator[Part]:
        """Yield all samples."""
        return map(self._sample, range(self._items))

    def _sample(self, index: int) -> Part:
        own = _nth(*self._tokens, index)
        second = own < 0
        return torch.stack((torch.where(second, ~own, own), second.long())), self._label(index)

    def _label(self, index: int) -> Tensor:
        return self.labels[index]

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """All tokens, those of a second segment inverted (~), and where each sample ends."""
        rows, self._texts = self._texts, []
        named = (dict(zip(_TEXTS, row, strict=False)) for row in rows)
        return self._tokenised("text", named, return_token_type_ids=True)

    def _tokenised(
        self, what: str, rows: Iterable[Mapping[str, str]], **options: object
    ) -> tuple[Tensor, Tensor]:
        numbers, ends = HostArray(torch.int32), [0]
        for row in rows:
            made = self._folder.tokenizer(
                **row, truncation=True, max_length=self._folder.seq, **options
            )
            tokens = torch.tensor(made["input_ids"])
            if not len(tokens):
                raise TextError(
                    f"train.data: the {what} of row {len(ends)} of {self._root} is empty; take it "
                    "out"
                )
            second = torch.tensor(made.get("token_type_ids", [0])) > 0
            numbers.extend(torch.where(second, ~tokens, tokens).int())
            ends.append(ends[-1] + len(tokens))
        return numbers.whole(), torch.tensor(ends)


class TextPairs(Pairs):
    """The same with labels that are the tokens of a text."""

    def _labels_of(self, texts: Sequence[str], _: Mapping[str, int]) -> Tensor:
        self._written = texts
        return torch.empty(0)

    def _label(self, index: int) -> Tensor:
        return _nth(*self._targets, index)

    @cached_property
    def _targets(self) -> tuple[Tensor, Tensor]:
        texts, self._written = self._written, []
        return self._tokenised("label", ({"text_target": text} for text in texts))


def _nth(numbers: Tensor, ends: Tensor, index: int) -> Tensor:
    return numbers[int(ends[index]) : int(ends[index + 1])].long()


def pair_loss(model: nn.Module, part: Part, label_smoothing: float = 0.0) -> Tensor:
    """Sum the cross-entropy, or the squared distance, over samples."""
    return _loss_of(_logits(model, part), part[1], label_smoothing)


def _loss_of(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    if labels.is_floating_point():
        return (logits[:, 0] - labels).square().sum()
    return functional.cross_entropy(
        logits, labels, reduction="sum", label_smoothing=label_smoothing
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsValidation(Validation):
    """Gives also, of classes, the accuracy and the mean of their F1, and of numbers the mean
    distance.
    """

    classes: int

    def __call__(self, model: nn.Module, rows: int = 1) -> Mapping[str, float]:
        """Return the figures; see `Validation`."""
        losses, guesses, labels = list[float](), list[float](), list[float]()
        for part in self.parts(model, rows):
            logits = _logits(model, part)
            guesses += (logits.argmax(dim=1) if self.classes else logits[:, 0]).tolist()
            labels += part[1].tolist()
            losses.append(float(_loss_of(logits, part[1])))
        if not labels:
            return {}
        both = list(zip(guesses, labels, strict=True))
        loss = {"validation_loss": sum(losses) / len(labels)}
        if not self.classes:
            distances = [abs(one - other) for one, other in both]
            return {**loss, "mean_distance": sum(distances) / len(both)}
        f1 = [
            2 * both.count((name, name)) / (guesses.count(name) + labels.count(name))
            for name in sorted({*guesses, *labels})
        ]
        right = sum(one == other for one, other in both)
        return {**loss, "accuracy": right / len(both), "f1": sum(f1) / len(f1)}


def text_loss(model: nn.Module, part: Part, label_smoothing: float = 0.0) -> Tensor:
    """Sum the cross-entropy of all tokens of the labels."""
    labels = part[1]
    # A label is shifted to the right by the model itself, which knows the first token.
    shift: Any = model.prepare_decoder_input_ids_from_labels
    given = shift(labels=labels.where(labels != NO_TOKEN, _IGNORED))
    logits = _logits(model, part, decoder_input_ids=given, use_cache=False)
    return cross_entropy(logits, labels, label_smoothing)


def _count_targets(part: Part) -> int:
    return int((part[1] != NO_TOKEN).sum())


def _logits(model: nn.Module, part: Part, **more: object) -> Tensor:
    tokens, segments = part[0].unbind(dim=1)
    there = tokens != NO_TOKEN
    config: Any = model.config
    inputs = {"input_ids": tokens.where(there, config.pad_token_id), "attention_mask": there.long()}
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = segments.clamp(min=0)
    logits: Tensor = model(**inputs, **more).logits
    return logits.float()


def _collated(samples: Sequence[Part]) -> Part:
    labels = [label for _, label in samples]
    together = filled_up(labels) if labels[0].dim() else torch.stack(labels)
    return filled_up([tokens for tokens, _ in samples]), together


def _classes_of(settings: TrainSettings, labels: Sequence[str]) -> list[str]:
    """Return the names of the classes in their order; none: labels are numbers."""
    if settings.labels == "numbers" or (settings.labels == "auto" and _are_fractions(labels)):
        return []
    found = set(labels)
    if len(found) < 2 or len(found) > _MOST_CLASSES:
        raise TextError(
            f"train.data: the label column of {settings.data} has {len(found)} different values; "
            f"classes are 2 to {_MOST_CLASSES}: name its column last in train.columns, or set "
            "train.labels to numbers, or to text for an encoder-decoder"
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
