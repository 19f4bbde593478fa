"""The samples of a folder's model in a user's files."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.hf.folders import CHAT as CHAT_TEMPLATE
from tests.hf.folders import NAMES, SPECIAL, make_folder
from workers.hf.folder import transformers
from workers.training.errors import TaskError
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task

ROWS = range(8)


@pytest.mark.parametrize(
    ("name", "content", "keys"),
    [
        ("a.txt", "".join(f"line {row}\n" for row in ROWS), {"documents": "lines"}),
        ("a.txt", "".join(f"line {row}\n" for row in ROWS), {"documents": "files"}),
        ("a.jsonl", "".join(f'{{"text": "line {row}", "label": {row % 2}}}\n' for row in ROWS), {"preset": "hf-pairs"}),
        ("a.csv", '"text",label\r\n' + "".join(f"line {row},{row % 2}\r\n" for row in ROWS), {"preset": "hf-pairs"}),
        ("a.tsv", "text\tlabel\n" + "".join(f"line {row}\t{row % 2}\n" for row in ROWS), {"preset": "hf-pairs"}),
    ],
    ids=["lines", "files", "JSON pairs", "CSV", "TSV"],
)  # fmt: skip
def test_a_byte_order_mark_changes_no_sample(
    tmp_path: Path, name: str, content: str, keys: dict[str, str]
) -> None:
    folder, path = make_folder(tmp_path / "model"), tmp_path / name
    made = []
    for mark in (b"", codecs.BOM_UTF8):
        path.write_bytes(mark + content.encode())
        chosen = {"preset": "hf-causal", "model": str(folder), "data": str(path), "seq": 8} | keys
        task = find_task(TrainSettings.model_validate(chosen), 0)
        samples = [task.dataset[index] for index in range(len(task.dataset))]
        made.append((task.fingerprint, samples))
    (fingerprint, samples), marked = made
    assert marked[0] == fingerprint
    torch.testing.assert_close(marked[1], samples, rtol=0, atol=0)


def samples_of(path: Path, lines: list[dict[str, Any]], folder: Path, seq: int = 24) -> list[Any]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = {"preset": "hf-causal", "model": str(folder), "data": str(path), "seq": seq}
    data = find_task(TrainSettings.model_validate(chosen), 0).dataset
    return [data[index] for index in range(len(data))]


def test_a_text_after_a_prompt_is_cut_as_if_it_stood_alone(tmp_path: Path) -> None:
    """This also holds if the prompt was too long for a sample, or its answer was cut off."""
    folder, path = make_folder(tmp_path / "model"), tmp_path / "a.jsonl"
    text = [{"text": "so it goes on and on, until it ends; " * 6}]
    answered = [{"prompt": "a", "answer": "b" * 40}]
    alone, answer = (samples_of(path, lines, folder) for lines in (text, answered))
    unanswered = [{"prompt": "why" * 40, "answer": "c"}]
    mixed = samples_of(path, [*text, *unanswered, *text, *answered, *text], folder)
    torch.testing.assert_close(mixed, [*alone, *alone, *answer, *alone], rtol=0, atol=0)


CHAT = [
    {"role": role, "content": text}
    for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "dd"))
]


def test_of_a_chat_what_the_assistant_says_is_predicted(tmp_path: Path) -> None:
    folder, path = make_folder(tmp_path / "model"), tmp_path / "a.jsonl"
    (chat,) = samples_of(path, [{"messages": CHAT}], folder, seq=64)
    labels = chat[1]
    tokenizer = transformers().AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(labels[labels >= 0]) == "b</s>dd</s>"
    for index, words in (("[-1:]", "writes earlier messages again"), ("[9].x", "does not suit")):
        template = f"{{% for m in messages{index} %}}{{{{ m['content'] }}}}{{% endfor %}}"
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(TaskError, match=rf"line 1 of .*a\.jsonl.* {words}"):
            samples_of(path, [{"messages": CHAT}], folder)


@pytest.mark.parametrize("marks", ["first", "always", "never"])
def test_the_tokens_of_a_chat_are_those_of_its_text(tmp_path: Path, marks: str) -> None:
    """This also holds for a tokenizer that adds a space before each text, like Llama 2's."""
    folder, library = make_folder(tmp_path / "model"), transformers()
    words = ["<pad>", "<s>", "</s>", "<unk>", "▁", "▁b", *"abcd:", "user", "assistant"]
    made = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=marks)
    own = {f"{name}_token": token for name, token in zip(NAMES, SPECIAL[:4], strict=False)}
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=CHAT_TEMPLATE.replace(": ", ":"), **own
    )
    tokenizer.save_pretrained(folder)
    (chat,) = samples_of(tmp_path / "a.jsonl", [{"messages": CHAT}], folder, seq=64)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [*chat[0].tolist(), int(chat[1][-1])] == whole
    answers = [token for token in chat[1].tolist() if token >= 0]
    assert tokenizer.convert_ids_to_tokens(answers) == ["b", "</s>", "d", "d", "</s>"]
