"""`workers.capped`: real processes that run out of memory for real, under the kernel's limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.capped.ways import WAYS, differences
from tests.fork_server import ForkServer
from tests.scene import ROOT, python, ran

Run = Callable[..., "subprocess.CompletedProcess[str]"]

TOLD = r"workers\.capped: process \d+ ran out of memory; its cap is {} GiB of private memory\n"

IN_A_CHILD = """
import multiprocessing, sys
def work():
    bytearray(2**33)
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    child.start()
    child.join()
    sys.exit(child.exitcode + 40)
"""

IN_A_LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Large(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.ones(2**31)
list(DataLoader(Large(), num_workers=1))
"""

TRAIN = """
import hashlib, torch
torch.manual_seed(1)
layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)]
model = torch.nn.Sequential(*layers)
for _ in range(20):
    batch = torch.randn(128, 64)
    (model(batch) - batch).square().mean().backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
            weight.grad = None
weights = [weight.detach().flatten().tolist() for weight in model.parameters()]
print(hashlib.sha256(repr(weights).encode()).hexdigest())
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a program under a cap, in a folder of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run_(gib: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(text)
        return python("-m", "workers.capped", "--gib", gib, "program.py", *arguments, cwd=tmp_path)

    return run_


@pytest.mark.parametrize("name", WAYS)
def test_a_program_starts_and_ends_as_without_a_cap(name: str, tmp_path: Path) -> None:
    assert differences(WAYS[name], tmp_path / "work") == []


@pytest.mark.torch
def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    """A script of torch among it, that fails beyond the cap by torch's own error."""
    page = (ROOT / "docs" / "capped.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "console", "sh"]
    (tmp_path / "train.py").write_text(blocks[0][1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def shown(command: str) -> str:
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        done = ran(["sh", "-c", f"{command} 2>&1"], cwd=tmp_path, env=environment)
        return re.sub(
            r"process \d+", "process 4711", done.stdout.replace(str(tmp_path), "/home/me")
        )

    for command, text in re.findall(r"^\$ (.*)\n([^$]*)", blocks[1][1], re.MULTILINE):
        assert shown(command) == text
    assert [shown(line) for line in blocks[2][1].splitlines()] == [
        "500 rows\n",
        "1\n",
        "1000 rows\n",
    ]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_child_has_the_same_cap_and_tells_of_itself(run: Run, start: str) -> None:
    done = run("2", IN_A_CHILD, start)
    assert done.returncode == 41
    assert "\nMemoryError\n" in done.stderr
    assert len(re.findall(TOLD.format("2"), done.stderr)) == 1


@pytest.mark.torch
def test_a_worker_of_a_data_loader_is_told_of_once(run: Run) -> None:
    done = run("2", IN_A_LOADER)
    assert done.returncode == 1
    assert "in DataLoader worker process 0" in done.stderr
    assert len(re.findall(TOLD.format("2"), done.stderr)) == 1


def test_a_program_that_goes_on_is_not_told_of(run: Run) -> None:
    text = "try:\n    bytearray(2**33)\nexcept MemoryError:\n    print('smaller')\nbytearray(2**29)"
    done = run("2", text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "smaller\n", "")


def test_trained_weights_have_the_same_hash(run: Run, fork_server: ForkServer) -> None:
    plain, capped = fork_server.run(TRAIN), run("2", TRAIN)
    assert len(plain.stdout.strip()) == 64, plain.stderr
    assert capped.stdout == plain.stdout


@pytest.mark.torch
def test_a_cap_too_small_for_torch_names_one_that_is_enough(run: Run) -> None:
    done = run("0.05", "import torch\nprint(1)")
    assert (done.returncode, done.stdout) == (2, "")
    found = re.search(
        r"torch imported a process here holds \d+ MiB; give --gib ([\d.]+) or more", done.stderr
    )
    assert found is not None, done.stderr
    assert run(found[1], "import torch\nprint(1)").stdout == "1\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["program.py", "--gib", "6"], "--gib NUMBER is missing; it stands before the program"),
        (["--gib", "6"], "no program; name a script, -m MODULE, -c CODE, or -"),
        (["--gib", "0", "x.py"], "'0' is not a number of GiB above 0"),
        (["--gib=abc", "x.py"], "'abc' is not a number of GiB above 0"),
        (["--gib", "1e30", "x.py"], "'1e30' is not a number of GiB above 0"),
        (["--gb", "6", "x.py"], "no such option: --gb"),
    ],
)
def test_a_mistake_is_refused_in_one_sentence(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    done = python("-m", "workers.capped", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr.splitlines()[-1]


def test_a_cap_within_a_cap_is_not_larger(run: Run) -> None:
    inner = "import os, sys\nos.execv(sys.executable, [sys.executable, '-m', 'workers.capped', '--gib', {}, '-c', '1'])"
    done = run("2", inner.format("'3'"))
    assert (done.returncode, "data is already limited to 2 GiB" in done.stderr) == (2, True)
    assert run("3", inner.format("'2'")).returncode == 0
