"""What `export` writes is loaded by transformers and peft, and computes what was trained."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.export.scene import adapted, gap, loaded, logits_of, trained
from tests.hf.folders import make_folder
from tests.scene import python
from workers.files import made_whole
from workers.hf.export import Request, export
from workers.training.checkpoints import RefusedError
from workers.training.settings import TrainSettings
from workers.training.trainer import Trainer

Training = tuple[Trainer, Callable[..., Request]]
Trainings = Callable[[str, str], Training]
KINDS = [("gpt2", "none"), ("llama", "lora"), ("gpt2", "lora"), ("bert", "dora")]
ADAPTED = [kind for kind in KINDS if kind[1] != "none"]

#: These are between peft and transformers; that of tied weights is right for GPT-2, whose head has
#: an adapter here, and its embeddings none.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True:UserWarning"),
]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Return the training of a family with an adapter or none; each is done once.

    BERT begins without pooler and classifier, which come fresh and are trained in full.
    """
    done: dict[tuple[str, str], Training] = {}

    def training(family: str, adapter: str) -> Training:
        if (family, adapter) not in done:
            place, pairs = tmp_path_factory.mktemp(family), family == "bert"
            folder = make_folder(place / "base", family, head="" if pairs else "CausalLM")
            keys = {"adapter": adapter, "ema_decay": 0.5}
            keys |= {} if adapter == "none" else {"adapter_alpha": 4.0}
            done[family, adapter] = trained(folder, place / "state", pairs=pairs, **keys)
        return done[family, adapter]

    return training


@pytest.mark.parametrize(("family", "adapter"), KINDS, ids=map("-".join, KINDS))
def test_transformers_loads_what_was_trained(
    trainings: Trainings, family: str, adapter: str, tmp_path: Path
) -> None:
    run, request = trainings(family, adapter)
    told = export(request(tmp_path / "out"))
    assert (told["step"], told["form"]) == (2, "full" if adapter == "none" else "merged")
    assert gap(logits_of(run.model), logits_of(loaded(tmp_path / "out"))) <= 1e-6
    source, out = Path(str(run.settings.model)), tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "generation_config.json").exists() == (family != "bert")


@pytest.mark.parametrize(("family", "adapter"), ADAPTED, ids=map("-".join, ADAPTED))
def test_peft_loads_the_adapter_on_its_base(
    trainings: Trainings, family: str, adapter: str, tmp_path: Path
) -> None:
    """Conv1D lies the other way round, alpha is a key, and a fresh head goes with the adapter."""
    run, request = trainings(family, adapter)
    out = tmp_path / "out"
    assert export(request(out, "adapter"))["told"] == []
    model = adapted(str(run.settings.model), out, pairs=family == "bert")
    assert gap(logits_of(run.model), logits_of(model)) <= 1e-6
    config = json.loads((out / "adapter_config.json").read_bytes())
    assert (config["lora_alpha"], config["fan_in_fan_out"]) == (4.0, family == "gpt2")
    assert not (out / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("family", "keys", "adapter", "average"),
    [
        ("gpt2", {}, "lora", False),
        ("llama", {"tie_word_embeddings": True}, "dora", True),
        ("llama", {"tie_word_embeddings": False}, "lora", True),
        ("bert", {"is_decoder": True}, "lora", False),
    ],
)
def test_a_trained_head_goes_with_its_adapter(
    family: str, keys: dict[str, Any], adapter: str, average: bool, tmp_path: Path
) -> None:
    """Where it shares its weight with the embeddings, too; that of BERT has a bias."""
    folder = make_folder(tmp_path / "base", family, **keys)
    chosen = {"adapter": adapter, "head": "train", "ema_decay": 0.9}
    _, request = trained(folder, tmp_path / "state", **chosen)
    for form in ("merged", "adapter"):
        export(request(tmp_path / form, form, average=average))
    merged = logits_of(loaded(tmp_path / "merged"))
    assert gap(merged, logits_of(adapted(str(folder), tmp_path / "adapter", pairs=False))) <= 1e-5
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert gap(merged, logits_of(base)) > 1e-3


def test_the_average_is_written_on_request(trainings: Trainings, tmp_path: Path) -> None:
    run, request = trainings("gpt2", "none")
    export(request(tmp_path / "out", average=True))
    with run._average.in_place_of_weights():
        averaged = logits_of(run.model)
    assert gap(averaged, logits_of(loaded(tmp_path / "out"))) <= 1e-6
    assert gap(averaged, logits_of(run.model)) > 1e-3


def test_what_was_not_kept_or_not_trained_is_refused(tmp_path: Path) -> None:
    _, request = trained(make_folder(tmp_path / "base"), tmp_path / "state", steps=1)
    with pytest.raises(RefusedError, match=r"leave out --average, or set train\.ema_decay"):
        export(request(tmp_path / "out", average=True))
    with pytest.raises(RefusedError, match="leave out --adapter"):
        export(request(tmp_path / "out", "adapter"))
    other = replace(
        request(tmp_path / "out"), settings=TrainSettings(preset="gpt-nano").model_dump()
    )
    with pytest.raises(RefusedError, match=r"gpt-nano trains a Gpt, .* in .*generation-\d\.pt"):
        export(other)
    assert not (tmp_path / "out").exists()


def test_a_module_with_adapters_that_is_trained_in_full_is_refused(tmp_path: Path) -> None:
    """As the embeddings of a task of one's own, whose weight is that of a head with an adapter."""
    folder = make_folder(tmp_path / "base", "llama", tie_word_embeddings=True)
    keys = {"preset": "tests.export.scene:with_embeddings", "data": str(folder), "model": None}
    keys |= {"documents": "windows", "seq": None, "adapter": "lora"}
    _, request = trained(folder, tmp_path / "state", steps=1, **keys)
    with pytest.raises(RefusedError, match=r"adapter of lm_head .* leave out --adapter"):
        export(request(tmp_path / "out", "adapter"))
    assert export(request(tmp_path / "out"))["form"] == "merged"


def test_a_configuration_is_as_before_the_training(trainings: Trainings, tmp_path: Path) -> None:
    """A training sets dropout and the cache for itself."""
    run, request = trainings("llama", "lora")
    export(request(tmp_path / "out"))
    before, after = (
        json.loads((folder / "config.json").read_bytes())
        for folder in (Path(str(run.settings.model)), tmp_path / "out")
    )
    assert not run.model.config.use_cache
    assert after == before


def test_a_damaged_checkpoint_is_told_and_the_other_one_is_used(tmp_path: Path) -> None:
    _, request = trained(make_folder(tmp_path / "base"), tmp_path / "state", steps=3)
    files = sorted((tmp_path / "state").glob("generation-?.pt"))
    newest = files[0]  # the third one is where the first one was
    newest.write_bytes(newest.read_bytes()[:-100])
    told = export(request(tmp_path / "out"))
    assert told["step"] == 2
    assert told["told"] == [
        f"the checkpoint {newest} is not used: it is no checkpoint, or its end is damaged or cut off"
    ]
    content = bytearray(files[1].read_bytes())
    content[5000] ^= 1
    files[1].write_bytes(content)
    with pytest.raises(RefusedError, match="hash differs") as refusal:
        export(request(tmp_path / "again"))
    assert all(str(file) in str(refusal.value) for file in files)
    assert not (tmp_path / "again").exists()


#: Fills a folder, and is killed in the middle of it.
KILLED = """
import os, signal, sys
from pathlib import Path
from workers.files import made_whole

with made_whole(Path(sys.argv[1])) as folder:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def fill(to: Path, name: str) -> None:
    with made_whole(to) as folder:
        folder.mkdir()
        (folder / name).write_text("12")


def test_what_a_killed_export_leaves_goes_with_the_next(tmp_path: Path) -> None:
    to = tmp_path / "out"
    assert python("-c", KILLED, str(to)).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".new")
    fill(to, "a")
    assert list(tmp_path.iterdir()) == [to]


def test_only_a_new_or_empty_folder_is_written(tmp_path: Path) -> None:
    tmp_path.joinpath("empty").mkdir()
    fill(tmp_path / "empty", "a")
    with pytest.raises(OSError, match="not empty"):
        fill(tmp_path / "empty", "b")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty", "a"]
