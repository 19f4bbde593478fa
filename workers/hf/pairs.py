"""The preset `hf-pairs`: a label for a text, or for two, by the model of a folder.

Classes are told apart by their cross-entropy, numbers by their squared distance; a label that is a
text is written by an encoder-decoder, token by token. Files are JSON lines, CSV or TSV with a line
of names. Each process reads them for their labels; they are tokenised once on a PC.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.hf.folder import ModelFolder, blocks_of, heads_of
from workers.hf.folder_files import CONFIG, check_folder, refused
from workers.training.batches import rows_of
from workers.training.errors import TaskError
from workers.training.sequences import NO_TOKEN, cross_entropy, filled_up, shortened
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, Validation
from workers.training.text import HeldOut, TextFiles, finite, objects_of, texts_of
from workers.training.token_files import SampleWriter, TokenSamples, TokenType

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
    rows = Rows(str(settings.data), settings.columns)
    writes = settings.labels == "text"
    classes = [] if writes else _classes_of(settings, rows.labels)
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
    known = None if writes else numbers
    data = Pairs(rows, known, folder, settings)
    samples = data.unseen
    if settings.validation is not None:
        samples = Pairs(Rows(settings.validation, settings.columns), known, folder, settings).all
    loss, count = (text_loss, _count_targets) if writes else (pair_loss, rows_of)
    validation = Validation if writes else partial(PairsValidation, classes=len(classes))
    tokens = torch.zeros((1, 2, folder.seq), dtype=torch.int64)
    return TrainTask(
        name=f"hf-pairs {folder.config.model_type}",
        model=folder.model,
        dataset=data,
        fingerprint=f"pairs {rows.digest(classes)}",
        loss=partial(loss, label_smoothing=settings.label_smoothing),
        count=count,
        items="tokens" if writes else "samples",
        evaluate=validation(samples=samples, loss=loss, count=count, collate=_collated),
        blocks=blocks_of,
        collate=_collated,
        shorten=lambda part: (shortened(part[0]), shortened(part[1]) if writes else part[1]),
        largest=lambda: (tokens, tokens[:, 0] if writes else data.labels[:1]),
        whole=lambda model: dict.fromkeys(
            heads_of(model), settings.head == "train" or (settings.head == "auto" and not writes)
        ),
        notes=folder.notes,
        uses=frozenset({"data", "seq", "dropout", "label_smoothing"}),
        lr=2e-4 if settings.adapter != "none" else 5e-5,
    )


class Rows:
    """Rows of one or two texts and a label, in files that are read anew each time.

    Raises:
        TaskError: A file has other columns, or a row lacks one.
    """

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.files = TextFiles(path)
        self.columns = columns

    @cached_property
    def labels(self) -> list[str]:
        """The labels of all rows.

        Raises:
            TaskError: As above, or there is no row.
        """
        if labels := [label for _, label in self]:
            return labels
        raise TaskError(f"train.data: {self.files.root} has no row; give text and labels")

    def __iter__(self) -> Iterator[tuple[list[str], str]]:
        for where, content in (row for path in self.files.paths for row in _table(path)):
            *texts, label = self.columns or [
                name for name in _COLUMNS if name != "text_pair" or name in content
            ]
            for name in (*texts, label):
                value = content.get(name)
                if value == "" or not isinstance(value, str | int | float):
                    raise TaskError(
                        f"train.data: {where} has no text or number {name!r} (it has "
                        f"{', '.join(map(repr, content))[:200]}); set train.columns to the texts "
                        "and the label, such as [text, label]"
                    )
            yield [str(content[name]) for name in texts], str(content[label])

    def digest(self, classes: Sequence[str]) -> str:
        """Return what changes with any row, and with the order of the classes."""
        digest, between = hashlib.blake2b(f"({classes!r}, [".encode(), digest_size=8), ""
        for row in self:
            digest.update(f"{between}{row!r}".encode())
            between = ", "
        digest.update(b"])")
        return digest.hexdigest()


def _table(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix not in {".csv", ".tsv"}:
        yield from objects_of(path, "files of hf-pairs are .jsonl, .csv or .tsv")
        return
    lines = (line for _, line in texts_of(path))
    table = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
    try:
        for row in table:
            where = f"line {table.line_num} of {path}"
            if any(row.get(None) or ()):  # what a row has beyond the names of the first line
                raise TaskError(
                    f"train.data: {where} has more cells than the first line has names; put quotes "
                    f"around a text with {table.reader.dialect.delimiter!r} in it"
                )
            yield where, row
    except csv.Error as failure:
        raise TaskError(
            f"train.data: line {table.reader.line_num} of {path} is no CSV ({failure}); correct it, or "
            "give JSON lines"
        ) from failure


class Pairs(HeldOut):
    """Samples of tokens with segments (2, up to seq), and a label: a class, a number or tokens."""

    def __init__(
        self,
        rows: Rows,
        numbers: Mapping[str, int] | None,
        folder: ModelFolder,
        settings: TrainSettings,
    ) -> None:
        """Texts are tokenised when the first sample is asked for.

        Args:
            rows: Where they are.
            numbers: Of the classes; empty: a label is a number; `None`: it is tokenised, too.
            folder: Has the tokenizer.
            settings: Those of the training.

        Raises:
            TaskError: There is a label that the training data does not have, or none.
        """
        self.holds_out = settings.validation is None
        self._rows = rows
        self._folder = folder
        self.labels = torch.empty(0)
        self._columns = ["text", "label"] if numbers is None else ["text"]
        if numbers is None:
            return
        try:
            found = [numbers[text] if numbers else finite(text) for text in rows.labels]
        except (KeyError, ValueError) as failure:
            known = ", ".join([*numbers][:5]) or "numbers"
            raise TaskError(
                f"train.data: {rows.files.root} has the label {failure.args[0]!r}, and the "
                f"training knows {known}; correct it, or set train.columns or train.labels"
            ) from failure
        self.labels = torch.tensor(found, dtype=torch.int64 if numbers else torch.float32)

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return how many tokens these samples have."""
        return self._tokens["text"].lengths(indices)

    def _count(self) -> int:
        return len(self._rows.labels)

    def _sample(self, index: int) -> Part:
        own = self._tokens["text"][index].long()
        second = own < 0
        tokens = torch.stack((torch.where(second, ~own, own), second.long()))
        written = self._tokens.get("label")
        return tokens, self.labels[index] if written is None else written[index].long()

    @cached_property
    def _tokens(self) -> dict[str, TokenSamples]:
        """By the name of their column; those of a second segment are inverted (~)."""
        folder = self._folder
        key = ("pairs", self._columns, self._rows.columns, folder.seq, folder.tokenizer_version)
        columns: dict[str, TokenType] = dict.fromkeys(self._columns, "int32")
        return self._rows.files.written(key, columns, self._write)

    def _write(self, *writers: SampleWriter) -> None:
        for number, (texts, label) in enumerate(self._rows, 1):
            given = {
                "text": dict(zip(_TEXTS, texts, strict=False)),
                "label": {"text_target": label},
            }
            for name, writer in zip(self._columns, writers, strict=True):
                if not (tokens := self._tokens_of(given[name])):
                    raise TaskError(
                        f"train.data: the {name} of row {number} of {self._rows.files.root} is "
                        "empty; take it out"
                    )
                writer.add(tokens)
                writer.end()

    def _tokens_of(self, texts: Mapping[str, str]) -> list[int]:
        made = self._folder.tokenizer(
            **texts, truncation=True, max_length=self._folder.seq, return_token_type_ids=True
        )
        pairs = zip(made["input_ids"], made["token_type_ids"], strict=True)
        return [~token if second else token for token, second in pairs]


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
    if settings.labels == "numbers" or (
        settings.labels == "auto" and any(map(_is_fraction, labels))
    ):
        return []
    found = set(labels)
    if len(found) < 2 or len(found) > _MOST_CLASSES:
        raise TaskError(
            f"train.data: the label column of {settings.data} has {len(found)} different values; "
            f"classes are 2 to {_MOST_CLASSES}: name its column last in train.columns, or set "
            "train.labels to numbers, or to text for an encoder-decoder"
        )
    known = check_folder(str(settings.model))[0].get("label2id") or {}
    if found <= known.keys():
        try:
            return sorted(known, key=lambda name: int(known[name]))
        except (ValueError, TypeError) as failure:
            raise refused(
                Path(str(settings.model)).expanduser() / CONFIG,
                f'has a "label2id" with a value that is no integer ({failure}); give each label '
                "its number, from 0",
            ) from failure
    return sorted(found, key=lambda name: (int(name), "") if name.isdecimal() else (0, name))


def _is_fraction(label: str) -> bool:
    with suppress(ValueError):
        return not finite(label).is_integer()
    return False
