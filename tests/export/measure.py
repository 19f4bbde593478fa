"""Measures once what `docs/results` says of `export`: `python -m tests.export.measure gaps | kills`.

Trains the presets `hf-causal` and `hf-pairs` on tiny folders, exports every form, loads it with
transformers or peft, and compares logits; and kills exports at random moments.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel

from tests.cli.test_export import RUN, make_run
from tests.scene import ROOT
from workers.hf.export import Request, export
from workers.training.checkpoints import Checkpoints
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

INPUTS = 100
#: Name, family, what the class makes, keys of its configuration.
MODELS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("GPT-2, tied", "gpt2", "CausalLM", {}),
    ("GPT-2, untied", "gpt2", "CausalLM", {"tie_word_embeddings": False}),
    ("Llama, tied", "llama", "CausalLM", {"tie_word_embeddings": True}),
    ("Llama, untied", "llama", "CausalLM", {"tie_word_embeddings": False}),
    ("BERT, three classes", "bert", "", {}),
]


def trained(folder: Path, state: Path, head: str, /, **keys: Any) -> tuple[Trainer, dict[str, Any]]:
    """Train a folder, and return the trainer and what a request needs."""
    data = folder.parent / "data.jsonl"
    words = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split()
    lines = [
        {"text": " ".join(words[at : at + 12]), "label": f"class {at % 3}"}
        for at in range(0, 1200, 4)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    own = {"preset": "hf-causal", "documents": "lines"} if head else {"preset": "hf-pairs"}
    settings = TrainSettings.model_validate(
        {"model": str(folder), "data": str(data), "steps": 20, "batch": 8, "precision": "fp32"}
        | {"lr": 0.002, "warmup_steps": 2, "ema_decay": 0.9, "seq": 32}
        | own
        | keys
    )
    run = Trainer(find_task(settings, 7), settings, torch.device("cpu"), 7)
    checkpoints = Checkpoints(state, run.identity)
    checkpoints.load()
    while not run.finished:
        run.micro_batch(8)
    assert checkpoints.save(run.state(), run.step)
    assert checkpoints.wait(600)
    files = [str(path) for path in state.glob("generation-?.pt")]
    asked = {"checkpoints": files, "settings": settings.model_dump(), "seed": 7, "run_id": "r"}
    return run, {**asked, "slot": "pc1/0"}


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of inputs that were drawn."""
    draw = torch.Generator().manual_seed(99)
    tokens = torch.randint(5, 384, (INPUTS, 24), generator=draw)
    logits: torch.Tensor = model.eval()(input_ids=tokens).logits
    return logits


def loaded(out: Path, form: str, base: str, classes: int) -> tuple[Any, int]:
    """Load as a user does, and return the model and how often anything was said about keys."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if form == "adapter":
            kind = "SequenceClassification" if classes else "CausalLM"
            auto = getattr(transformers, f"AutoModelFor{kind}")
            more = {"num_labels": classes} if classes else {}
            model: Any = PeftModel.from_pretrained(auto.from_pretrained(base, **more), out)
            return model, sum("key" in str(each.message) for each in told)
        kind = json.loads((out / "config.json").read_bytes())["architectures"][0]
        auto = getattr(transformers, kind)
        model, report = auto.from_pretrained(out, output_loading_info=True)
    return model, sum(len(keys) for keys in report.values())


def gaps() -> None:
    """Print a line for each model, adapter and form."""
    from tests.hf import folders

    for name, family, head, keys in MODELS:
        for adapter in ("none", "lora", "dora"):
            with tempfile.TemporaryDirectory() as place:
                folder = folders.make_folder(Path(place) / "base", family, head=head, **keys)
                run, asked = trained(folder, Path(place) / "state", head, adapter=adapter)
                forms = ["full", "average"] if adapter == "none" else ["merged", "adapter"]
                for form in forms:
                    out = Path(place) / form
                    option = form if adapter != "none" else None
                    average = form == "average"
                    export(Request(**asked, to=str(out), form=option, average=average))
                    model, words = loaded(out, form, str(folder), 0 if head else 3)
                    if average:
                        assert run._average is not None
                        with run._average.in_place_of_weights():
                            own = logits_of(run.model)
                    else:
                        own = logits_of(run.model)
                    gap = float((own - logits_of(model)).abs().max() / own.abs().max())
                    print(f"| {name} | {adapter} | {form} | {words} | {gap:.1e} |", flush=True)  # noqa: T201


def kills(times: int = 20) -> None:
    """Kill exports of 25 million parameters: at any moment, and while the folder is written."""
    from tests.hf import folders

    place = Path(tempfile.mkdtemp())
    os.chdir(place)
    os.environ["ORCHESTRATOR_STATE_DIR"] = str(place / "state")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    folder = folders.make_folder(place / "base", "llama", **shape)
    state = place / "state" / "state" / RUN / "pc1" / "0"
    _, asked = trained(folder, state, "CausalLM", steps=1)
    make_run(**asked["settings"])
    command = [sys.executable, "-m", "orchestrator", "export", RUN, "pc1/0", "--to", "out"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    draw, counts = random.Random(0), Counter[str]()  # noqa: S311 - moments

    def hidden() -> list[Path]:
        return list(place.glob(".out.*.new"))

    began_s = time.monotonic()
    subprocess.run(command, check=True, **quiet)
    took_s = time.monotonic() - began_s
    shutil.rmtree("out")
    while counts["killed"] < times:
        process = subprocess.Popen(command, start_new_session=True, **quiet)
        if counts["killed"] < times // 2:
            time.sleep(draw.uniform(0, took_s))
        else:
            before = set(hidden())
            while process.poll() is None and not set(hidden()) - before:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.3))
        if process.poll() is not None:  # it was faster
            shutil.rmtree("out")
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        counts["killed"] += 1
        if not Path("out").exists():
            counts["none, but a hidden one" if hidden() else "none"] += 1
            continue
        counts["whole"] += loaded(Path("out"), "full", "", 0)[1] == 0
        shutil.rmtree("out")
    subprocess.run(command, check=True, **quiet)
    print(dict(counts), f"hidden after the next: {len(hidden())}; one took {took_s:.1f} s")  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    {"gaps": gaps, "kills": kills}[sys.argv[1]]()
