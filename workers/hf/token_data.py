"""Your own text as the tokens of a folder's tokenizer: windows, documents, or answers to prompts
and in chats.

The text is tokenised once in each process, when the first sample is asked for, and kept as 4 bytes
a token in memory that no cap counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from workers.hf.folder import ModelFolder
from workers.hf.folder_files import TOKENIZER
from workers.training.batches import Samples
from workers.training.host_memory import HostArray
from workers.training.sequences import NO_TOKEN
from workers.training.settings import TrainSettings
from workers.training.text import (
    TextError,
    TextFiles,
    evaluated,
    held_out,
    json_line,
    piece_of,
    pieces_of,
)
from workers.units import MIB

#: Text that is read and tokenised at once, and the longest line.
_TOGETHER_BYTES: Final = MIB
LONGEST_LINE_BYTES: Final = 64 * MIB

#: Names of the answer in a line with a "prompt".
_ANSWERS: Final = ("answer", "completion", "response")

_VALID: Final = 'valid: {"text": …}, {"prompt": …, "answer": …} or {"messages": […]}'


class Document(NamedTuple):
    """A text, in parts that are to be predicted or not."""

    parts: list[tuple[str, bool]]
    begins: bool = True
    """Whether the tokenizer's first token comes before it."""
    ends: bool = True
    """Whether the token for the end comes after it."""
    whole: bool = False
    """Whether it is one sample, cut off where it is too long, wherever others end."""


class TokenSamples(Samples):
    """Samples (2, up to seq): tokens that go in, and the labels of each place."""

    def __init__(self, settings: TrainSettings, folder: ModelFolder) -> None:
        """Look at the files.

        Raises:
            TextError: There is no text.
        """
        self._unit = settings.documents
        self._folder = folder
        self._files = TextFiles(str(settings.data))
        self._other = None if settings.validation is None else TextFiles(settings.validation)
        tokenizer = (folder.path / TOKENIZER).read_bytes()
        digest = hashlib.blake2b(tokenizer, digest_size=8).hexdigest()
        self.fingerprint = f"{self._unit} {self._files.fingerprint()} tokenizer {digest}"
        """What changes when a file is added, removed or changes its length, or tokens change."""

    @cached_property
    def _text(self) -> tuple[Tensor, Tensor]:
        """All tokens one after the other, those that are not to be predicted inverted (~); and the
        samples in them.
        """
        return self._tokenised(self._files)

    @cached_property
    def _other_text(self) -> tuple[Tensor, Tensor] | None:
        """The same of the file that is never trained on."""
        return None if self._other is None else self._tokenised(self._other)

    @property
    def _items(self) -> int:  # type: ignore[override]  # not known before the text is read
        samples = len(self._text[1])
        return held_out(samples).start if self._other is None else samples

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return several samples."""
        return [_sample(*self._text, index) for index in indices]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return how many tokens these samples have."""
        return [piece_of(self._text[1], index)[1] - 1 for index in indices]

    def unseen(self) -> Iterator[Tensor]:
        """Yield samples that are never trained on: of the file for that, or some held out."""
        if self._other_text is not None:
            text = self._other_text
            return (_sample(*text, place) for place in range(len(text[1])))
        held = held_out(len(self._text[1]))
        return (_sample(*self._text, place) for place in evaluated(held))

    def _tokenised(self, files: TextFiles) -> tuple[Tensor, Tensor]:
        """Return the tokens of files, and the samples in them.

        Raises:
            TextError: There is nothing to predict.
        """
        seq = self._folder.seq
        tokens, starts, lengths, used = HostArray(torch.int32), list[int](), list[int](), 0
        for documents in _together(self._read(files)):
            for document, numbers in zip(documents, self._numbers(documents), strict=True):
                tokens.extend(torch.tensor(numbers, dtype=torch.int32))
                if document.whole and not any(number >= 0 for number in numbers[1 : seq + 1]):
                    pass  # of a prompt without its answer nothing can be learned
                elif document.whole or self._unit != "windows" or not lengths:
                    starts.append(used)
                    lengths.append(min(len(numbers), seq + 1) if document.whole else len(numbers))
                else:
                    lengths[-1] += len(numbers)
                used += len(numbers)
        pieces = HostArray(torch.int64)
        spans = (torch.tensor(numbers, dtype=torch.int64) for numbers in (starts, lengths))
        for some in pieces_of(next(spans), next(spans), seq, step=seq):
            pieces.extend(some)
        if not len(samples := pieces.whole()):
            raise TextError(
                f"train.data: {files.root} has nothing to predict within train.seq, {seq} tokens; "
                "give more text, or raise train.seq"
            )
        return tokens.whole(), samples

    def _numbers(self, documents: Sequence[Document]) -> Iterator[list[int]]:
        """Yield the tokens of each document; those that are not to be predicted inverted."""
        tokenizer = self._folder.tokenizer
        first = [
            token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id
        ]
        last = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        texts = [text for document in documents for text, _ in document.parts]
        # Of no text, as of a chat without an answer, it cannot make tokens.
        encoded = tokenizer(texts or [""], add_special_tokens=False, verbose=False)
        made = iter(encoded["input_ids"])
        for document in documents:
            numbers = [~token for token in first] if document.begins else []
            for _, predicted in document.parts:
                numbers += [token if predicted else ~token for token in next(made)]
            yield numbers + (last if document.ends else [])

    def _read(self, files: TextFiles) -> Iterator[Document]:
        for path in files.paths:
            if path.suffix in {".jsonl", ".json"}:
                for number, line in enumerate(lines_of(path), 1):
                    if line.strip():
                        yield self._document_of(line, f"line {number} of {path}")
            elif self._unit == "lines":
                for line in lines_of(path):
                    if line.strip():
                        yield Document([(line.rstrip("\r\n"), True)])
            elif self._unit == "files":
                yield Document([("".join(lines_of(path)), True)])
            else:
                yield from _of_stream(path)

    def _document_of(self, line: str, where: str) -> Document:
        """Return what a line of JSON holds.

        Raises:
            TextError: It holds no text, prompt or chat.
        """
        content = json_line(line, where, _VALID)
        content = content if isinstance(content, dict) else {}
        text, prompt, messages = (content.get(key) for key in ("text", "prompt", "messages"))
        answer = next((content[key] for key in _ANSWERS if key in content), None)
        if isinstance(text, str):
            return Document([(text, True)])
        if isinstance(prompt, str) and isinstance(answer, str):
            if not self._folder.tokenizer.chat_template:
                return Document([(prompt, False), (answer, True)], whole=True)
            roles = (("user", prompt), ("assistant", answer))
            messages = [{"role": role, "content": text} for role, text in roles]
        if isinstance(messages, list) and messages:
            return self._chat(messages, where)
        keys = ", ".join(map(repr, content))[:200]
        raise TextError(f"train.data: {where} has the keys {keys or 'of no object'}; {_VALID}")

    def _chat(self, messages: list[Any], where: str) -> Document:
        """Return a chat by the folder's template, of which the answers are to be predicted."""
        tokenizer = self._folder.tokenizer
        if not tokenizer.chat_template:
            raise TextError(
                f'train.data: {where} has "messages", and {self._folder.path} has no chat '
                'template; add chat_template.jinja, or give lines with "prompt" and "answer"'
            )
        parts, text = list[tuple[str, bool]](), ""
        try:
            for place, message in enumerate(messages):
                if (message["role"], bool(message["content"]))[0] != "assistant":
                    continue  # a template writes nothing for content that is not there
                asked, answered = (
                    tokenizer.apply_chat_template(
                        messages[:end], tokenize=False, add_generation_prompt=end == place
                    )
                    for end in (place, place + 1)
                )
                if not (asked.startswith(text) and answered.startswith(asked)):
                    raise TextError(  # noqa: TRY301 - told apart from what a template raises
                        f"train.data: {where}: the chat template of {self._folder.path} writes "
                        "earlier messages anew for each answer; divide the chat at its answers"
                    )
                parts += [(asked[len(text) :], False), (answered[len(asked) :], True)]
                text = answered
        except TextError:
            raise
        except Exception as failure:
            raise TextError(
                f"train.data: {where} does not suit the chat template of {self._folder.path}: "
                f"{type(failure).__name__}: {failure}; a message is "
                '{"role": "user", "content": "a text"}'
            ) from failure
        # The template writes first and last tokens itself.
        return Document(parts, begins=False, ends=False, whole=True)


def _sample(tokens: Tensor, samples: Tensor, index: int) -> Tensor:
    start, length = piece_of(samples, index)
    numbers = tokens[start : start + length].long()
    inputs = torch.where(numbers < 0, ~numbers, numbers)[:-1]
    return torch.stack((inputs, numbers[1:].clamp(min=NO_TOKEN)))


def _together(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents that are tokenised at once."""
    some, characters = list[Document](), 0
    for document in documents:
        some.append(document)
        characters += sum(len(text) for text, _ in document.parts) + 1
        if characters > _TOGETHER_BYTES:
            yield some
            some, characters = [], 0
    if some:
        yield some


def _of_stream(path: Path) -> Iterator[Document]:
    """Yield a file in parts that end with lines."""
    part, characters, begins = list[str](), 0, True
    for line in lines_of(path):
        part.append(line)
        characters += len(line)
        if characters > _TOGETHER_BYTES:
            yield Document([("".join(part), True)], begins=begins, ends=False)
            part, characters, begins = [], 0, False
    yield Document([("".join(part), True)], begins=begins)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file.

    Raises:
        TextError: It cannot be read, or a line is too long or no UTF-8.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(
                iter(lambda: file.readline(LONGEST_LINE_BYTES + 1), b""), 1
            ):
                if len(line) > LONGEST_LINE_BYTES:
                    raise TextError(
                        f"train.data: line {number} of {path} is longer than "
                        f"{LONGEST_LINE_BYTES // MIB} MiB; divide it"
                    )
                # Editors of Windows begin a file with a byte order mark.
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as failure:
        raise TextError(
            f"train.data: {path} cannot be read: {failure.strerror or failure}"
        ) from failure
    except UnicodeDecodeError as failure:
        raise TextError(
            f"train.data: {path} is not in UTF-8 (line {number}: {failure.reason}); convert it"
        ) from failure
