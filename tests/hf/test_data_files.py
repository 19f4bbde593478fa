"""A byte order mark, with which editors of Windows begin a file, is no part of a folder's data."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
import torch

from tests.hf.folders import make_folder
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
