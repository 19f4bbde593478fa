"""The verb `export` on a run folder, and its page; and `train.from`, which is refused before a run
folder is made if the earlier run cannot be found.
"""

from __future__ import annotations

import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest

from orchestrator.config.load import dump_config
from orchestrator.config.schema import Config
from orchestrator.record.jobs import QUEUE_NAME
from tests.cli.conftest import Command
from tests.export.scene import trained
from tests.factories import begun_run, facts_of, make_job, make_standing, store_queue
from tests.hf.folders import make_folder
from tests.scene import ROOT
from workers.settings import CommandSpec

pytestmark = pytest.mark.torch

RUN = "20260101-000000-abcd"


def make_run(mode: str = "rehearse", **train: object) -> Path:
    """Make a run that trains in one slot, in the default folder; return the run's folder."""
    config = Config.model_validate(
        {
            "nodes": {"pc1": {"gpu": "rtx-3090", "workers": 1, "vram_per_worker_gib": 1}},
            "workload": {"name": "train"},
            "train": train,
            "cluster": {"address": "127.0.0.1:1"},
        }
    )
    folder = Path("runs") / RUN
    store = begun_run(
        folder, facts_of(config, run_id=RUN, mode=mode, config_yaml=dump_config(config))
    )
    store.commit()
    return folder


@pytest.fixture
def run_of_adapters(nowhere: Path, state_dir: Path) -> Path:
    """Train a tiny model with adapters in the folder of a worker; return the run folder."""
    base = make_folder(nowhere / "base", "llama")
    run, _ = trained(base, state_dir / "state" / RUN / "pc1" / "0", adapter="lora")
    return make_run(**run.settings.model_dump())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_the_page_of_export_runs(run_of_adapters: Path, command: Command) -> None:
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(sh|python)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python"] * 2
    assert len(page.splitlines()) <= 60
    for kind, code in blocks:
        if kind == "python":
            exec(code, {})  # noqa: S102 - the project's own page
            continue
        done = command(*shlex.split(code)[3:])
        assert done.returncode == 0, done.stderr
        assert re.search(r"/my-\w+: step 2 of pc1/0, \w+, \d\.\d MiB\n$", done.stdout)
    assert {path.name for path in Path("my-adapter").glob("adapter*")} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip


def test_a_job_is_named_as_a_slot_is(nowhere: Path, command: Command) -> None:
    run, _ = trained(make_folder(nowhere / "base", "gpt2"), nowhere / "state")
    told = run.settings.model_dump(exclude_defaults=True).items()
    overrides = {f"train.{key}": value for key, value in told} | {"workload.seed": 7}
    jobs = make_run() / QUEUE_NAME
    done_on_pc1 = partial(make_standing, state="DONE", last_card="pc1")
    store_queue(
        jobs,
        done_on_pc1(job=make_job("own", command=CommandSpec(argv=("x",)))),
        done_on_pc1(job=make_job("lr-0", overrides=overrides)),
    )
    place = jobs / "files" / "lr-0" / "checkpoint.pt"
    place.parent.mkdir(parents=True)
    shutil.copyfile(nowhere / "state" / "generation-1.pt", place)

    done = command("export", "latest", "lr-0", "--to", "out")
    assert "/out: step 2 of lr-0, full" in done.stdout, done.stderr
    said = command("export", "latest", "own", "--to", "other").stderr
    assert "has no slot 'own'; valid: lr-0" in " ".join(said.split())


@pytest.mark.parametrize(
    ("mode", "slot", "code", "said"),
    [
        ("rehearse", "pc1/7", 2, "has no slot 'pc1/7'; valid: pc1/0"),
        ("rehearse", "pc1/0", 2, "pc1/0 has no generation-?.pt in"),
        ("cluster", "pc1/0", 3, "the checkpoints of pc1/0 are on pc1, and the Ray head"),
    ],
    ids=["no such slot", "nothing saved", "on another PC"],
)
def test_without_checkpoints_the_sentence_says_why(
    nowhere: Path, command: Command, mode: str, slot: str, code: int, said: str
) -> None:
    make_run(mode)
    done = command("export", "latest", slot, "--to", "out")
    assert done.returncode == code
    assert said in " ".join(done.stderr.split())
    assert [path.name for path in nowhere.iterdir()] == ["runs"]


RUNS = ("run", "--local", "--workload", "train", "--set")
EXPORT = ("export", RUN, "pc1/0", "--to", "out")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (EXPORT, "generation-0.pt is not used: "),
        ((*EXPORT, "--best"), "pc1/0 has no best.pt in"),
        ((*RUNS, f"train.from={RUN}/pc1/0"), "generation-0.pt is not used: it has only 2 bytes"),
    ],
    ids=["damaged", "the last is not the best", "damaged start"],
)
def test_what_cannot_be_used_is_a_sentence(
    nowhere: Path, state_dir: Path, command: Command, typed: tuple[str, ...], said: str
) -> None:
    make_run()
    folder = state_dir / "state" / RUN / "pc1" / "0"
    folder.mkdir(parents=True)
    (folder / "generation-0.pt").write_bytes(b"PK")
    done = command(*typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.split())
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("20250101-000000-0000/pc1/0", "there is no run '20250101-000000-0000'"),
        ("0000-abcd/pc1/0", f"write the whole name of the run, {RUN}"),
        (f"{RUN}/pc1/7", "has no slot 'pc1/7'; valid: pc1/0"),
        (f"{RUN}/pc1/0", "pc1/0 has no generation-?.pt in"),
        (f"{RUN}/../0", "valid: RUN_ID/SLOT of an earlier run"),
    ],
    ids=["no run", "an end", "no slot", "nothing saved", "up"],
)
def test_a_start_that_is_not_there_is_refused(
    nowhere: Path, command: Command, start: str, said: str
) -> None:
    make_run()
    done = command(*RUNS, f"train.from={start}")
    assert said in " ".join(done.stderr.split())
    assert done.returncode == 2
    assert [path.name for path in Path("runs").iterdir()] == [RUN]
