"""The command line from outside: its output, the streams, and the exit code.

No verb here starts a cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Command
from tests.scene import COMMAND, ROOT, ended, only_object, orchestrator, python, wait_for

pytestmark = pytest.mark.usefixtures("nowhere")

SHIPPED = str(ROOT / "cluster.yaml")
RUN = ("run", "-c", SHIPPED, "--duration", "30s")

#: Runs the command line, and prints the loaded modules.
LOADED = """
import sys
from orchestrator.cli.main import main
sys.argv[0] = "orchestrator"
try:
    main()
finally:
    print(sorted({"ray", "torch", "numpy", "pandas"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "-c", SHIPPED], ["up", "pc2", "-c", SHIPPED]]
)
def test_what_needs_no_cluster_loads_neither_ray_nor_torch(arguments: list[str]) -> None:
    done = python("-c", LOADED, *arguments)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    if arguments == ["--help"]:
        assert all(f"\n  {verb} " in done.stdout for verb in ("run", "plan", "up", "stop", "jobs"))
        assert "..." not in done.stdout.partition("Commands:")[2], "a summary is cut"


def test_a_file_that_hides_a_package_is_named(tmp_path: Path) -> None:
    own = tmp_path / "workers.py"
    own.write_text("")
    done = python("-m", "orchestrator", "jobs", "list", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert done.stderr.startswith(f"{own} hides the package `workers` of this program: rename it")
    assert len(done.stderr.splitlines()) == 1


def test_client_mode_of_ray_is_refused_with_a_remedy(tmp_path: Path) -> None:
    typed = ("-m", "orchestrator", "run", "--local")
    done = python(*typed, cwd=tmp_path, PYTHONPATH=str(ROOT), RAY_CLIENT_MODE="1")
    assert done.returncode == 2
    assert "type: unset RAY_CLIENT_MODE" in " ".join(done.stderr.split())


def test_without_a_verb_the_help_is_shown_as_a_usage_error(command: Command) -> None:
    done = command()
    assert done.returncode == 2
    assert "Usage: " in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert only_object(command("--json").stdout)["outcome"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "nosuch"),
        (["run", "--nosuch"], "--nosuch"),
        (["run", "--chaos-seed", "x", "--rehearse"], "--chaos-seed"),
        (["run", "-c", SHIPPED, "--duration", "soon"], "--duration soon: 'soon' is not a duration"),
        (["run", "-c", SHIPPED, "--local", "--rehearse"],
         "--local and --rehearse exclude each other"),
        (["run", "-c", SHIPPED, "--set", "memory.policy=nosuch"], "memory.policy"),
        (["run", "-c", SHIPPED, "--set", "workload.sise=1"], "workload.sise"),
        (["run", "-c", "."], "."),
        (["plan", "-c", "missing.yaml"], "missing.yaml"),
        (["up"], "Missing argument"),
        (["up", "nosuch", "-c", SHIPPED], "no node 'nosuch'; valid: pc1, pc2"),
        (["stop", "-c", "missing.yaml"], "missing.yaml"),
        (["stop", "-c", SHIPPED, "--node", "pc22"], "valid: pc1, pc2"),
        (["plan", "-c", "\x1b[31mred.yaml"], "red.yaml"),
        ([*RUN, "--run-dir", "file"], "choose another with --run-dir"),
        (["report", "-c", SHIPPED], "there is no run in"),
        (["notify", "-c", SHIPPED, "--test"], "set notify.urls_file in"),
        (["tune", "-c", SHIPPED, "--levers", "precison"],
         "--levers names 'precison', which is no lever; valid: micro"),
        (["tune", "-c", SHIPPED, "--workload", "yoga"],
         "--workload yoga has no levers; valid: train, matmul"),
        # Faults that cannot be injected.
        ([*RUN, "--chaos", "kill:every=20s"], "--yes-really"),
        ([*RUN, "--chaos", "node:pc2@3s", "--yes-really"], "only a rehearsal owns the raylets"),
        ([*RUN, "--rehearse", "--chaos", "node:pc3@3s"],
         "--chaos node:pc3 cannot be; valid: pc2"),
        ([*RUN, "--rehearse", "--chaos", "node:pc1@3s"], "--chaos node:pc1 cannot be; valid: pc2"),
    ],
)  # fmt: skip
def test_a_usage_error_is_words_or_one_object_and_exits_2(
    command: Command, nowhere: Path, arguments: list[str], said: str
) -> None:
    (nowhere / "file").touch()
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    verb, *rest = arguments
    done = command(verb, "--json", *rest)
    found = only_object(done.stdout)
    assert done.returncode == 2
    assert found["exit_code"] == 2
    assert found["outcome"] == "failed"
    assert found["schema"] == 1
    # `up` and `stop` have no option --json, so the error names this option.
    assert said in found["error"] or "--json" in found["error"]
    assert "Traceback" not in done.stderr
    assert not (nowhere / "runs").exists()


def test_json_of_another_program_asks_us_for_none(command: Command) -> None:
    done = command("jobs", "submit", "--run-dir", "none", "--", "program", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no queue of jobs" in done.stderr


#: The product with an additional, defective verb.
_WITH_A_DEFECT = """
import sys
from orchestrator.cli.app import app
from orchestrator.cli.main import main

@app.command()
def fail(json: bool = False) -> None:
    raise RuntimeError("a bug of ours")

sys.argv[0] = "orchestrator"
main()
"""


def test_a_defect_is_told_with_its_traceback_and_in_one_sentence() -> None:
    done = python("-c", _WITH_A_DEFECT, "fail", "--json", cwd=ROOT)
    found = only_object(done.stdout)
    assert (done.returncode, found["exit_code"], found["outcome"]) == (1, 1, "failed")
    assert found["error"] == "internal error, please report it: RuntimeError: a bug of ours"
    assert done.stderr.strip().splitlines()[-1] == "RuntimeError: a bug of ours"


def test_each_problem_of_a_file_is_a_line_with_its_place(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "nodes:\n  pc1: {gpu: rtx-3090, workers: 7, vram_per_worker_gib: 3.3, memory_fractoin: 0.99}\n"
        "run:\n  duration: 5\n  slize_s: 1\n"
    )
    done = command("run", "-c", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:2", f"{path}:5"]
    assert ["memory_fractoin" in lines[0], "slize_s" in lines[1]] == [True, True]
    found = only_object(command("plan", "-c", str(path), "--json").stdout)
    assert found["error"].splitlines() == lines


@pytest.mark.parametrize(
    ("encoding", "arguments"),
    [
        ("utf-8", ["plan", "-c", "\udcff.yaml"]),
        ("ascii", ["\udcff"]),
        ("ascii", ["plan", "-c", "ü"]),
    ],
)
def test_text_that_a_terminal_cannot_show_breaks_no_object(
    arguments: list[str], encoding: str
) -> None:
    done = orchestrator(*arguments, "--json", PYTHONIOENCODING=encoding)
    assert "Traceback" not in done.stderr
    assert (done.returncode, only_object(done.stdout)["outcome"]) == (2, "failed")


def test_an_interrupted_command_is_one_object_too(tmp_path: Path) -> None:
    """The command is interrupted while it waits for its configuration."""
    endless = tmp_path / "endless.yaml"
    os.mkfifo(endless)
    command = [*COMMAND, "plan", "-c", str(endless), "--json"]
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
        endless.open("w"),  # waits until the command has opened the pipe
    ):
        wait_for(
            lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING,
            "command that reads",
        )
        process.send_signal(signal.SIGINT)
        stdout, stderr = ended(process)
    assert (process.returncode, only_object(stdout)["outcome"]) == (130, "interrupted")
    assert "Traceback" not in stderr


def test_a_run_without_a_cluster_is_an_object_and_a_summary(nowhere: Path) -> None:
    done = orchestrator("run", "-c", SHIPPED, "--json", "--run-dir", "records")
    found = only_object(done.stdout)
    assert (done.returncode, found["exit_code"], found["outcome"]) == (3, 3, "failed")
    for words in (
        "no Ray cluster runs on this machine",
        "orchestrator up pc1 --exec",
        "--rehearse",
        "--local",
    ):
        assert words in found["error"]
    (folder,) = (nowhere / "records").iterdir()
    assert {"events.jsonl", "head.json", "summary.json"} <= {path.name for path in folder.iterdir()}
    assert only_object((folder / "summary.json").read_text())["exit_code"] == 3
