"""The preset `hf-causal`: next-token prediction on the user's own text with the model of a folder.
The text is windows, documents, or answers to prompts and in chats.

A sample is two rows of token ids: inputs, and labels for each position. So an answer alone can be
trained on, and padding never counts. The text is tokenised once per PC, when the first sample is
read, into a file of 4 bytes per token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from workers.hf.folder import ModelFolder, blocks_of, heads_of
from workers.hf.folder_files import TOKENIZER
from workers.training.errors import TaskError
from workers.training.sequences import NO_TOKEN, cross_entropy, packed_tokens, padded, shortened
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, Validation
from workers.training.text import HeldOut, TextFiles, objects_of, texts_of
from workers.training.token_files import SampleWriter, TokenSamples
from workers.units import MIB

#: Characters that are read and tokenised at once.
_CHUNK_CHARACTERS: Final = MIB

#: Keys of the answer in a line with a "prompt".
_ANSWERS: Final = ("answer", "completion", "response")

_VALID: Final = 'valid: {"text": …}, {"prompt": …, "answer": …} or {"messages": […]}'


def causal_task(settings: TrainSettings) -> TrainTask:
    """Return the task of `train.preset: hf-causal`.

    Raises:
        TaskError: The folder or a key cannot be used.
    """
    folder = ModelFolder(settings, "AutoModelForCausalLM")
    text = CausalSamples(str(settings.data), settings, folder)
    validation_samples = text.validation_samples
    if settings.validation is not None:
        validation_samples = CausalSamples(settings.validation, settings, folder).all
    return TrainTask(
        name=f"hf-causal {folder.config.model_type}",
        model=folder.model,
        dataset=text,
        fingerprint=text.fingerprint,
        loss=partial(token_loss, label_smoothing=settings.label_smoothing),
        count=packed_tokens,
        blocks=blocks_of,
        evaluate=Validation(
            samples=validation_samples, loss=token_loss, count=packed_tokens, collate=padded
        ),
        collate=padded,
        shorten=shortened,
        largest=lambda: torch.zeros((1, 2, folder.seq), dtype=torch.int64),
        whole=lambda model: dict.fromkeys(heads_of(model), settings.head == "train"),
        notes=folder.notes,
        uses=frozenset({"data", "documents", "seq", "dropout", "label_smoothing"}),
        lr=2e-4 if settings.adapter != "none" else 5e-5,
        items="tokens",
    )


def token_loss(model: nn.Module, part: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum the cross-entropy of all labels."""
    tokens, labels = part.unbind(dim=1)
    # Padding comes last, so no other token attends to it.
    logits = model(input_ids=tokens.clamp(min=0), use_cache=False).logits
    return cross_entropy(logits, labels, label_smoothing)


class Document(NamedTuple):
    """A text in parts, each with whether it is predicted."""

    parts: list[tuple[str, bool]]
    begins: bool = True
    """Whether the tokenizer's first token (BOS) is put before it."""
    ends: bool = True
    """Whether the end token (EOS) is put after it."""
    whole: bool = False
    """Whether it is one sample of its own, truncated to `seq` + 1 tokens."""


class CausalSamples(HeldOut):
    """Samples (2, up to seq): input tokens, and the label of each position."""

    def __init__(self, path: str, settings: TrainSettings, folder: ModelFolder) -> None:
        """Check the files.

        Raises:
            TaskError: There is no text.
        """
        self.holds_out = settings.validation is None
        self._unit = settings.documents
        self._folder = folder
        self._files = TextFiles(path)
        digest = hashlib.blake2b((folder.path / TOKENIZER).read_bytes(), digest_size=8).hexdigest()
        self.fingerprint = f"{self._unit} {self._files.fingerprint()} tokenizer {digest}"
        """Changes with the list of files, the length of a file, and the tokenizer."""

    @cached_property
    def _tokens(self) -> TokenSamples:
        """The samples; tokens that are not predicted are stored inverted (~)."""
        folder = self._folder
        key = ("causal", self._unit, folder.seq, folder.tokenizer_version, self._adds_spaces)
        written = self._files.written(key, {"text": "int32"}, self._write, seq=folder.seq)
        samples = written["text"]
        if not len(samples):
            raise TaskError(
                f"train.data: {self._files.root} has nothing to predict within train.seq, "
                f"{self._folder.seq} tokens; give more text, or raise train.seq"
            )
        return samples

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return the lengths of samples in tokens."""
        return [length - 1 for length in self._tokens.lengths(indices)]

    def _count(self) -> int:
        return len(self._tokens)

    def _sample(self, index: int) -> Tensor:
        numbers = self._tokens[index].long()
        inputs = torch.where(numbers < 0, ~numbers, numbers)[:-1]
        return torch.stack((inputs, numbers[1:].clamp(min=NO_TOKEN)))

    def _write(self, writer: SampleWriter) -> None:
        seq = self._folder.seq
        for documents in _in_chunks(self._read()):
            for document, numbers in zip(documents, self._numbers(documents), strict=True):
                if document.whole:
                    writer.end()  # end the windows before it
                    if not any(number >= 0 for number in numbers[1 : seq + 1]):
                        continue  # a prompt without its answer teaches nothing
                writer.add(numbers[: seq + 1] if document.whole else numbers)
                if document.whole or self._unit != "windows":
                    writer.end()
        writer.end()

    def _numbers(self, documents: Sequence[Document]) -> Iterator[list[int]]:
        """Yield the tokens of each document; those that are not predicted are inverted (~)."""
        tokenizer = self._folder.tokenizer
        first = [
            token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id
        ]
        last = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        parts = [text for document in documents for text, _ in document.parts]
        part_tokens = iter(self._encoded(parts))
        if self._adds_spaces:
            part_tokens = iter(self._encoded_in_context(documents, list(part_tokens)))
        for document in documents:
            numbers = [~token for token in first] if document.begins else []
            for _, predicted in document.parts:
                numbers += [token if predicted else ~token for token in next(part_tokens)]
            yield numbers + (last if document.ends else [])

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        # The tokenizer fails on an empty list, as of a chat without an answer.
        encoded = self._folder.tokenizer(texts or [""], add_special_tokens=False, verbose=False)
        tokens: list[list[int]] = encoded["input_ids"]
        return tokens

    @cached_property
    def _adds_spaces(self) -> bool:
        """Whether the tokenizer writes a space before every text, as those of Llama 2 do: then a
        text that continues another one would get an extra space.
        """
        whole, one, other = self._encoded(["a\na", "a\n", "a"])
        return whole != one + other

    def _encoded_in_context(
        self, documents: Sequence[Document], alone: list[list[int]]
    ) -> Iterator[list[int]]:
        """Yield the tokens of each part within the text of its document. A part is tokenised alone
        if a token would span its border to the part before.
        """
        texts = [[*accumulate(text for text, _ in each.parts)] for each in documents]
        prefixes, tokens_alone = iter(self._encoded([*chain.from_iterable(texts)])), iter(alone)
        for parts in texts:
            before = list[int]()
            for prefix in (next(prefixes) for _ in parts):
                tokens = next(tokens_alone)
                yield prefix[len(before) :] if prefix[: len(before)] == before else tokens
                before = prefix

    def _read(self) -> Iterator[Document]:
        for path in self._files.paths:
            if path.suffix in {".jsonl", ".json"}:
                for where, content in objects_of(path, _VALID):
                    yield self._document_of(content, where)
                continue
            lines = (line for _, line in texts_of(path))
            if self._unit == "lines":
                for line in lines:
                    if line.strip():
                        yield Document([(line.rstrip("\r\n"), True)])
            elif self._unit == "files":
                yield Document([("".join(lines), True)])
            else:
                yield from _stream_parts(lines)

    def _document_of(self, content: dict[str, Any], where: str) -> Document:
        """Return the document in an object of a JSON line.

        Raises:
            TaskError: It holds no text, prompt or chat.
        """
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
        raise TaskError(f"train.data: {where} has the keys {keys}; {_VALID}")

    def _chat(self, messages: list[Any], where: str) -> Document:
        """Return a chat in the folder's template; only the answers are predicted."""
        tokenizer = self._folder.tokenizer
        if not tokenizer.chat_template:
            raise TaskError(
                f'train.data: {where} has "messages", and {self._folder.path} has no chat '
                'template; add chat_template.jinja, or give lines with "prompt" and "answer"'
            )
        try:
            # Access fails here if a key is missing: a template would write nothing for it.
            roles = [(message["role"], bool(message["content"]))[0] for message in messages]
            written = [
                tokenizer.apply_chat_template(
                    messages[:end], tokenize=False, add_generation_prompt=end == place
                )
                for place, role in enumerate(roles)
                if role == "assistant"
                for end in (place, place + 1)
            ]
        except Exception as failure:
            raise TaskError(
                f"train.data: {where} does not suit the chat template of {self._folder.path}: "
                f"{type(failure).__name__}: {failure}; a message is "
                '{"role": "user", "content": "a text"}'
            ) from failure
        parts, text = list[tuple[str, bool]](), ""
        for place, longer in enumerate(written):
            if not longer.startswith(text):
                raise TaskError(
                    f"train.data: {where}: the chat template of {self._folder.path} writes "
                    "earlier messages again for each answer; divide the chat at its answers"
                )
            parts.append((longer[len(text) :], place % 2 == 1))
            text = longer
        # The template writes the first and last tokens itself.
        return Document(parts, begins=False, ends=False, whole=True)


def _in_chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield lists of documents that are tokenised at once."""
    some, characters = list[Document](), 0
    for document in documents:
        some.append(document)
        characters += sum(len(text) for text, _ in document.parts) + 1
        if characters > _CHUNK_CHARACTERS:
            yield some
            some, characters = [], 0
    if some:
        yield some


def _stream_parts(lines: Iterable[str]) -> Iterator[Document]:
    """Yield a file in parts that end at line ends."""
    part, characters, begins = list[str](), 0, True
    for line in lines:
        part.append(line)
        characters += len(line)
        if characters > _CHUNK_CHARACTERS:
            yield Document([("".join(part), True)], begins=begins, ends=False)
            part, characters, begins = [], 0, False
    yield Document([("".join(part), True)], begins=begins)
