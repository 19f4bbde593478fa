"""The command line from outside: what it prints, where, and the exit code. No verb here starts a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scene import only_object, orchestrator

ROOT = Path(__file__).parents[2]
SHIPPED = str(ROOT / "cluster.yaml")

VERBS = ("run", "plan", "up", "stop")

#: Runs the command line in this process and says what it loaded.
LOADED = """
import sys
from orchestrator.cli.main import main
sys.argv[0] = "orchestrator"
try:
    main()
finally:
    print(sorted({"ray", "torch", "numpy", "pandas"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start every command in an empty folder, where no cluster of anybody is found."""
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "FORCE_COLOR", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def config_file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_help_names_every_verb_and_loads_neither_ray_nor_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize("arguments", [["plan", "-c", SHIPPED], ["up", "pc2", "-c", SHIPPED], ["run", "--help"]])
def test_verbs_that_need_no_cluster_load_neither_ray_nor_torch(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    done = orchestrator(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")


def test_without_a_verb_the_help_is_shown_as_a_usage_error() -> None:
    done = orchestrator()
    assert done.returncode == 2
    assert "Usage: " in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


USAGE_ERRORS = [
    pytest.param(["nosuch"], "nosuch", id="unknown verb"),
    pytest.param(["run", "--nosuch"], "--nosuch", id="unknown option"),
    pytest.param(["run", "extra"], "extra", id="extra argument"),
    pytest.param(["run", "--scale", "x", "--rehearse"], "--scale", id="no number"),
    pytest.param(["run", "--duration"], "--duration", id="option without value"),
    pytest.param(["run", "-c", SHIPPED, "--duration", "soon"], "--duration soon: 'soon' is not a duration", id="time"),
    pytest.param(["run", "-c", SHIPPED, "--duration", "0"], "--duration 0", id="no time"),
    pytest.param(
        ["run", "-c", SHIPPED, "--local", "--rehearse"], "--local and --rehearse exclude each other", id="both grounds"
    ),
    pytest.param(["run", "-c", SHIPPED, "--scale", "0.5"], "--scale only makes sense with --rehearse", id="scale"),
    pytest.param(["run", "-c", SHIPPED, "--policy", "nosuch"], "memory.policy", id="unknown policy"),
    pytest.param(["run", "-c", SHIPPED, "--set", "workload.sise=1"], "workload.sise", id="override with a typo"),
    pytest.param(["run", "-c", SHIPPED, "--set", "nonsense"], "nonsense", id="override without value"),
    pytest.param(["run", "-c", "missing.yaml"], "missing.yaml", id="missing file"),
    pytest.param(["run", "-c", "."], ".", id="a folder for a file"),
    pytest.param(["plan", "-c", "missing.yaml"], "missing.yaml", id="plan without file"),
    pytest.param(["up"], "Missing argument", id="up without node"),
    pytest.param(["up", "nosuch", "-c", SHIPPED], "no node 'nosuch'; valid: pc1, pc2", id="up of no node"),
    pytest.param(["stop", "-c", "missing.yaml"], "missing.yaml", id="stop without file"),
]


@pytest.mark.parametrize(("arguments", "said"), USAGE_ERRORS)
def test_a_usage_error_is_said_in_words_on_standard_error_and_exits_2(arguments: list[str], said: str) -> None:
    done = orchestrator(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "said"), USAGE_ERRORS)
def test_with_json_any_failure_is_one_object_on_standard_output(arguments: list[str], said: str) -> None:
    if arguments == ["run", "--duration"]:
        arguments = ["run", "--json", "--duration"]
    done = orchestrator(*arguments) if "--json" in arguments else orchestrator(*arguments, "--json")
    found = only_object(done.stdout)
    assert (done.returncode, found["exit_code"], found["outcome"], found["schema"]) == (2, 2, "failed", 1)
    # `up` and `stop` know no --json, which is then what is wrong.
    assert said in found["error"] or "--json" in found["error"]
    assert "Traceback" not in done.stderr


#: The product with one verb more, which has a defect.
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
    command = [sys.executable, "-c", _WITH_A_DEFECT, "fail", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    found = only_object(done.stdout)
    assert (done.returncode, found["exit_code"], found["outcome"]) == (1, 1, "failed")
    assert found["error"] == "internal error, please report it: RuntimeError: a bug of ours"
    assert done.stderr.strip().splitlines()[-1] == "RuntimeError: a bug of ours"


def test_json_without_a_verb_is_one_object_too() -> None:
    done = orchestrator("--json")
    assert done.returncode == 2
    assert only_object(done.stdout)["outcome"] == "failed"


def test_each_problem_of_a_configuration_is_one_line_with_its_place(tmp_path: Path) -> None:
    path = config_file(
        tmp_path,
        "nodes:\n  pc1: {gpu: rtx-3090, workers: 7, vram_per_worker_gib: 3.33, memory_fractoin: 0.99}\n"
        "run:\n  duration: 5\n  slize_s: 1\n",
    )
    for verb in ("run", "plan", "stop"):
        done = orchestrator(verb, "-c", path)
        assert (done.returncode, done.stdout) == (2, "")
        lines = done.stderr.splitlines()
        assert [line.split(": ")[0] for line in lines] == [f"{path}:2", f"{path}:5"]
        assert ["memory_fractoin" in lines[0], "slize_s" in lines[1]] == [True, True]
    found = only_object(orchestrator("plan", "-c", path, "--json").stdout)
    assert found["error"].splitlines() == lines


@pytest.mark.parametrize("text", ["nodes: [", "\x00", "&a [*a]", "- 1", "", "nodes: {}", "{" * 5000])
def test_a_file_that_is_no_configuration_is_refused_without_a_traceback(text: str, tmp_path: Path) -> None:
    done = orchestrator("plan", "-c", config_file(tmp_path, text))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(str(tmp_path))
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:surrogateescape", "ascii"])
@pytest.mark.parametrize(
    "arguments", [["plan", "-c", "\udcff.yaml"], ["\udcff"], ["run", "--\udcff"], ["plan", "-c", "…"], ["up", "ü"]]
)
def test_text_that_a_terminal_cannot_show_breaks_no_object(
    arguments: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    command = [sys.executable, "-m", "orchestrator", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert b"Traceback" not in done.stderr
    assert (done.returncode, only_object(done.stdout.decode("utf-8"))["outcome"]) == (2, "failed")


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_an_interrupted_command_is_one_object_too(verb: str, tmp_path: Path) -> None:
    """Interrupted while it reads a configuration that does not come."""
    endless = tmp_path / "endless.yaml"
    os.mkfifo(endless)
    command = [sys.executable, "-m", "orchestrator", verb, "-c", str(endless), "--json"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        endless.open("w"),  # waits until the other side reads
    ):
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, only_object(stdout)["outcome"]) == (130, "interrupted")
    assert "Traceback" not in stderr


def test_text_that_steers_a_terminal_does_not_reach_it() -> None:
    done = orchestrator("plan", "-c", "\x1b[31mred.yaml")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


def test_plan_is_a_table_for_people_and_an_object_for_programs() -> None:
    text = orchestrator("plan", "-c", SHIPPED)
    assert (text.returncode, text.stderr) == (0, "")
    assert "23.31 GiB" in text.stdout
    done = orchestrator("plan", "-c", SHIPPED, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    slots = [worker["slot"] for node in only_object(done.stdout)["nodes"] for worker in node["workers"]]
    assert slots == [f"pc1/{index}" for index in range(7)] + [f"pc2/{index}" for index in range(3)]


def test_plan_follows_overrides() -> None:
    done = orchestrator("plan", "-c", SHIPPED, "--json", "--set", "nodes.pc1.workers=2", "--set", "workload.size=512")
    nodes = {node["node"]: node for node in only_object(done.stdout)["nodes"]}
    assert (len(nodes["pc1"]["workers"]), nodes["pc2"]["workers"][0]["size"]) == (2, 512)


def test_plan_does_not_mind_a_reader_that_goes_away() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", "plan", "-c", SHIPPED],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_up_prints_a_script_that_a_shell_can_read() -> None:
    for node, start in (("pc1", "ray start --head"), ("pc2", "ray start --address=10.0.0.1:6379")):
        done = orchestrator("up", node, "-c", SHIPPED, "--head-address", "10.0.0.1")
        assert (done.returncode, done.stderr) == (0, "")
        assert start in done.stdout
        read = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
        assert (read.returncode, read.stderr) == (0, "")


def test_stop_without_a_run_says_so() -> None:
    done = orchestrator("stop", "-c", SHIPPED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no run is under way in runs\n", "")


def test_a_run_without_a_cluster_says_how_to_start_one_and_how_to_go_on_without() -> None:
    done = orchestrator("run", "-c", SHIPPED)
    assert (done.returncode, done.stdout) == (3, "")
    for words in ("no Ray cluster runs on this machine", "ray start --head", "--rehearse", "--local"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_a_cluster_is_one_object_and_leaves_its_summary(nowhere: Path) -> None:
    done = orchestrator("run", "-c", SHIPPED, "--json", "--run-dir", "records")
    found = only_object(done.stdout)
    assert (done.returncode, found["exit_code"], found["outcome"]) == (3, 3, "failed")
    assert "no Ray cluster runs on this machine" in found["error"]
    (folder,) = (nowhere / "records").iterdir()
    assert {"events.jsonl", "head.json", "summary.json"} <= {path.name for path in folder.iterdir()}
    assert only_object((folder / "summary.json").read_text())["exit_code"] == 3


def test_a_run_folder_that_cannot_be_made_is_a_usage_error(nowhere: Path) -> None:
    (nowhere / "taken").write_text("a file")
    done = orchestrator("run", "-c", SHIPPED, "--run-dir", "taken")
    assert (done.returncode, done.stdout) == (2, "")
    assert "choose another with --run-dir" in done.stderr
