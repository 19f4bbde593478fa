"""The environment, the reports and the end of a user's program, with real programs."""

from __future__ import annotations

import json
import os
import signal
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cluster.command_actor import CommandActor
from tests.command.scenes import Slot, command_spec, told
from tests.scene import ROOT
from workers.command import files
from workers.command.launch import ATTEMPT
from workers.messages import Cause, PrintedOutput, Verdict, WorkerState
from workers.units import GIB, MIB

TELLS = "import json, os, sys; print(json.dumps(dict(os.environ) | {'cwd': os.getcwd(), 'exe': sys.executable}))"


def environment_of(slot: Slot) -> dict[str, str]:
    slot.end()
    return dict(json.loads(slot.printed.splitlines()[-1]))


def test_program_is_told_its_folder_and_its_name(tmp_path: Path, state_dir: Path) -> None:
    found = environment_of(Slot(command_spec("-c", TELLS, cwd=str(tmp_path), env={"OWN": "1"})))
    folder = state_dir / "state" / "run" / "job"
    expected = {
        "ORCHESTRATOR_JOB": "job",
        "ORCHESTRATOR_JOB_DIR": str(folder),
        "ORCHESTRATOR_RESULTS": str(folder / "results.jsonl"),
        "OWN": "1",
        "cwd": str(tmp_path),
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "ORCHESTRATOR_RESUME" not in found


def test_a_worker_leaves_the_settings_of_torch_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for name in ("CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUBLAS_WORKSPACE_CACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    CommandActor(command_spec())
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    # With a value other than its own two, torch refuses to compute deterministically.
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_program_that_ends_at_once_ends_with_its_own_code() -> None:
    for number in range(8):
        slot = Slot(command_spec(slot=f"job{number}", argv=("sh", "-c", "exit 3")))
        assert slot.end().ended.exit_code == 3


def test_second_start_is_told_to_resume() -> None:
    Slot(command_spec("-c", "pass")).end()
    assert environment_of(Slot(command_spec("-c", TELLS)))["ORCHESTRATOR_RESUME"] == "1"


def test_its_python_is_found_first(tmp_path: Path) -> None:
    venv.create(tmp_path / "own", symlinks=True)
    spec = command_spec(cwd=str(tmp_path), python="own", argv=("python", "-c", TELLS))
    found = environment_of(Slot(spec))
    assert (found["exe"], found["VIRTUAL_ENV"]) == (
        str(tmp_path / "own" / "bin" / "python"),
        str(tmp_path / "own"),
    )


SAVES = """
import os, signal, sys, time
def save(*_):
    open(os.environ["ORCHESTRATOR_JOB_DIR"] + "/saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(os.environ["ORCHESTRATOR_JOB_DIR"] + "/ready", "w").write("1")
time.sleep(600)
"""


def test_program_that_rests_saves_first_and_starts_again(state_dir: Path) -> None:
    slot = Slot(command_spec("-c", SAVES, grace_s=120.0))
    slot.begin()
    folder = state_dir / "state" / "run" / "job"
    told(folder / "ready")
    report = slot.rest()
    assert (report.ended.exit_code, report.ended.was_asked) == (75, True)
    assert report.verdict is Verdict.OK
    assert (folder / "saved").is_file()
    slot.poll(holds=False)
    again = slot.begin()
    assert (again.state, slot.details("program_started")["resumes"]) == (WorkerState.RUNNING, True)
    slot.rest()


STAYS = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.environ["ORCHESTRATOR_JOB_DIR"] + "/ready", "w").write("1")
time.sleep(600)
"""


def test_program_that_does_not_end_is_killed(state_dir: Path) -> None:
    slot = Slot(command_spec("-c", STAYS, grace_s=0.2))
    slot.begin()
    told(state_dir / "state" / "run" / "job" / "ready")
    report = slot.rest()
    assert report.ended.signal == signal.SIGKILL


def test_a_silent_program_is_no_failure() -> None:
    slot = Slot(command_spec("-c", "import time; time.sleep(600)"))
    slot.begin()
    reports = [slot.poll(0.1) for _ in range(5)]
    assert [report.counts.steps_error for report in reports] == [0] * 5
    assert all(report.counts.steps_ok > report.wall_s > 0 for report in reports), "one a second"
    slot.rest()


WAYS = [
    ("pass", Cause.DONE),
    ("import sys; sys.exit(75)", Cause.PARKED),
    ("import os; os.kill(os.getpid(), 9)", Cause.KILLED),
    ("import os; os.kill(os.getpid(), 11)", Cause.EXCEPTION),
    ("raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory')", Cause.OUT_OF_MEMORY),
    ("raise ValueError('bad')", Cause.EXCEPTION),
    ("import no_such_module", Cause.BAD_CONFIG),
    ("open('/dev/full', 'w').write('x' * 100_000)", Cause.DISK_FULL),
    (
        "import os, sys; print('{\"loss\": NaN}', file=open(os.environ['ORCHESTRATOR_RESULTS'], 'a')); sys.exit(1)",
        Cause.NAN_LOSS,
    ),
]


@pytest.mark.parametrize(("code", "cause"), WAYS, ids=[str(cause) for _, cause in WAYS])
def test_ways_of_real_programs_to_end(code: str, cause: Cause) -> None:
    report = Slot(command_spec("-c", code)).end()
    assert (report.ended.cause, report.verdict) == (cause, Verdict.DONE)
    assert ("after a loss that is no number" in report.reason) is (cause is Cause.NAN_LOSS)


def test_time_limit_ends_it() -> None:
    report = Slot(command_spec("-c", "import time; time.sleep(600)", time_limit_s=0.3)).end()
    assert report.ended.cause is Cause.TIME_LIMIT
    assert report.reason == "ended by SIGTERM after its time limit"


def test_outputs_are_copied_into_its_folder(tmp_path: Path, state_dir: Path) -> None:
    """This includes the outputs of a failed program."""
    (tmp_path / "before.json").touch()
    os.utime(tmp_path / "before.json", (1e9, 1e9))
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "run.sqlite").touch()
    (tmp_path / "runs" / "one" / "other.json").touch()
    code = "import os; os.mkdir('out'); [open(f, 'w') for f in ('out/a.json', 'b.txt')]; 1 / 0"
    Slot(command_spec("-c", code, cwd=str(tmp_path), outputs=("**/*.json",))).end()
    folder = state_dir / "state" / "run" / "job"
    own = {"job.json", "keeper.lock", "output.log"}
    assert {path.name for path in folder.rglob("*.*")} == {"a.json", *own}
    assert (folder / "out" / "a.json").is_file()


def test_a_script_of_windows_is_named(tmp_path: Path) -> None:
    line = "#!/usr/bin/env sh"
    script = tmp_path / "run.sh"
    script.write_bytes(f"{line}\r\necho\r\n".encode())
    script.chmod(0o700)
    report = Slot(command_spec(cwd=str(tmp_path), argv=("./run.sh",))).end()
    assert f"the line {line} of {tmp_path}/run.sh ends with a carriage return" in report.reason


@pytest.mark.parametrize("what", ["program", "folder"])
def test_what_is_not_there_is_named(what: str, tmp_path: Path) -> None:
    cwd = str(tmp_path / "none") if what == "folder" else str(tmp_path)
    report = Slot(command_spec(cwd=cwd, argv=("no-such-program",))).end()
    missing = {"program": "no-such-program", "folder": str(tmp_path / "none")}[what]
    assert report.reason == f"cannot be started: No such file or directory: {missing}"
    assert report.ended.cause is Cause.NOT_STARTED


def test_its_results_are_reported() -> None:
    lines = [
        '{"step": 3, "steps": 9, "loss": 2.5, "eta": 60, "auc": 0.75}',
        "no json",
        '{"step": 4',
    ]
    code = (
        f"import os; open(os.environ['ORCHESTRATOR_RESULTS'], 'a').write({chr(10).join(lines)!r})"
    )
    report = Slot(command_spec("-c", code)).end()
    progress = report.progress
    assert (progress.train_step, progress.train_steps) == (3, 9)
    assert (progress.loss, progress.eta_s) == (2.5, 60)
    assert report.metrics["auc"] == 0.75


RECORDS = {
    "garbage": "{\n{'accuracy': 1}\nepoch 3\n[0.1]\n" + '{"accuracy": 0.5, "parts": []}\n{',
    "begun": '{"accuracy": 0.5}\n{"accuracy": 0.',
    "window": f'{{"accuracy": 0.1, "x": "{2**20 * "x"}"}}\n{{"accuracy": 0.5}}',
}


@pytest.mark.parametrize("what", RECORDS)
def test_all_records_are_read_once_it_has_ended(tmp_path: Path, what: str) -> None:
    results, text, pieces = files.Results(tmp_path / "results.jsonl"), RECORDS[what], 7
    results.begin()
    with results.path.open("a") as file:
        for piece in range(pieces):
            file.write(text[piece * len(text) // pieces : (piece + 1) * len(text) // pieces])
            file.flush()
            results.read()
    results.read(is_over=True)
    assert results.metrics == {"accuracy": 0.5}


def test_its_peak_is_that_of_all_its_processes() -> None:
    code = (
        "import os, time; x = bytearray(60 << 20) if os.fork() else bytearray(40 << 20);"
        "time.sleep(1.0)"
    )
    report = Slot(command_spec("-c", code)).end()
    assert 100 * MIB < report.ended.peak_bytes < 200 * MIB


def test_processes_that_it_leaves_are_ended_and_told() -> None:
    slot = Slot(command_spec("-c", "import os, time; os.fork() or time.sleep(600)"))
    report = slot.end()
    assert (report.ended.exit_code, slot.details("program_left_processes")["count"]) == (0, 1)


def test_an_attempt_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); raise SystemExit(3)"
    spec = command_spec("-c", code, env={ATTEMPT: "1"})
    Slot(spec).end()
    again = Slot(spec, incarnation=1).end()  # the worker was killed before its report arrived
    assert (again.ended.exit_code, (tmp_path / "runs").read_text()) == (3, "x")


def test_words_of_the_attempt_before_do_not_count() -> None:
    Slot(command_spec("-c", "raise MemoryError")).end()
    report = Slot(command_spec("-c", "raise SystemExit(1)")).end()
    assert report.ended.cause is Cause.EXCEPTION


def test_log_keeps_its_newest_part(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cluster.command_actor.LOG_BYTES", 100_000)
    code = "for number in range(30_000): print('line', number)"
    slot = Slot(command_spec("-c", code, cwd=str(tmp_path)))
    report = slot.end()
    assert report.ended.exit_code == 0, report
    assert report.ended.text.splitlines()[-1] == "line 29999"
    assert slot.printed.splitlines()[-1] == "line 29999"
    folder = state_dir / "state" / "run" / "job"
    newest = (folder / "output.log").read_text().splitlines()
    before = (folder / "output.log.1").read_text().splitlines()
    assert 0 < (folder / "output.log").stat().st_size <= 100_000
    assert (newest[-1], len(before) > 1_000) == ("line 29999", True)


def test_what_is_cut_of_the_output_is_counted_in_bytes() -> None:
    before = PrintedOutput(text="é" * 2**16, dropped_bytes=1)
    both = before.followed_by(PrintedOutput(text="end", dropped_bytes=0))
    assert (both.text[-4:], both.dropped_bytes) == ("éend", 1 + 3 * len("é".encode()))


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-X", "dev", "-q", "t.py", "-m"],
        ["python", "-qm", "t", "-m"],
        ["python", "--check-hash-based-pycs", "never", "-q", "t.py", "-m"],
        ["./t.py", "-m"],
    ],
)
def test_words_of_the_interpreter_and_of_the_program_stay_apart(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text("import sys; print(sys.argv[1:], sys.flags.quiet)")
    slot = Slot(command_spec(cwd=str(tmp_path), cap=True, argv=tuple(words)))
    slot.end()
    assert slot.printed == f"['-m'] {int(words[0] == 'python')}\n"
    assert "uncapped" not in slot.details("program_started")


TORCH = """
import sys, torch
assert "ORCHESTRATOR_CAPPED_PATH" not in __import__("os").environ
print("argv", sys.argv[1:], flush=True)
torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8).fill_(1)
print("fits")
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("mib", "cause"), [(64, Cause.DONE), (2048, Cause.OUT_OF_MEMORY)], ids=["fits", "does not"]
)
def test_cap_holds_for_a_script_as_it_is(mib: int, cause: Cause, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TORCH)
    (tmp_path / "workers").mkdir()  # a user's folder with this name must change nothing
    (tmp_path / "workers" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    spec = command_spec("t.py", str(mib), cap=True, cwd=str(tmp_path), budget_bytes=2 * GIB)
    slot = Slot(spec)
    report = slot.end()
    assert (report.ended.cause, report.memory and report.memory.peak_bytes < 2 * GIB) == (
        cause,
        True,
    ), slot.printed
    assert f"argv ['{mib}']" in slot.printed


def test_a_cap_of_its_ram_beside_a_card_is_its_own_too() -> None:
    spec = command_spec("-c", "bytearray(3 << 30)", cap=True)
    report = Slot(replace(spec, device="cuda")).end()
    assert report.ended.cause is Cause.OUT_OF_MEMORY, "it is not tried again with the same cap"


#: The message of `workers.capped` for people.
LINE = "workers.capped: process 7 ran out of memory; its cap is 2 GiB of private memory"

ENDS = {
    "prints its words": (f"print({LINE!r}); raise ValueError", 2, Cause.EXCEPTION),
    "survives it": (
        "try:\n    bytearray(3 << 30)\nexcept MemoryError as error:\n    del error\nraise SystemExit(1)",
        2,
        Cause.EXCEPTION,
    ),
    "talks on": (
        "import atexit; atexit.register(print, 'x' * 20_000); bytearray(3 << 30)",
        2,
        Cause.OUT_OF_MEMORY,
    ),
    "cannot load torch": ("pass", 0.05, Cause.OUT_OF_MEMORY),
}


@pytest.mark.torch
@pytest.mark.parametrize("how", ENDS)
def test_memory_is_the_cause_where_the_capped_program_notes_it(how: str, state_dir: Path) -> None:
    code, gib, cause = ENDS[how]
    report = Slot(command_spec("-c", code, cap=True, budget_bytes=int(gib * GIB))).end()
    assert report.ended.cause is cause, report.ended.text
    assert not (state_dir / "state" / "run" / "job" / "out-of-memory").exists()


def test_a_python_that_cannot_be_capped_runs_and_says_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "own", symlinks=True)
    (tmp_path / "own" / "lib" / "python3.11" / "site-packages" / "sitecustomize.py").write_text(
        "import sys; sys.modules['psutil'] = None"
    )
    code = "import sys; print(sys.argv, sys.flags.dont_write_bytecode)"
    argv = ("python", "-B", "-c", code, "a b")
    slot = Slot(command_spec(cwd=str(tmp_path), python="own", cap=True, argv=argv))
    assert slot.end().state is WorkerState.DONE, slot.printed
    first, second = slot.printed.splitlines()
    assert "cannot run workers.capped, so nothing caps" in first
    assert second == "['-c', 'a b'] 1"


def test_what_cannot_be_capped_is_said() -> None:
    slot = Slot(command_spec(cap=True, argv=("true",)))
    slot.end()
    assert slot.details("program_started")["uncapped"] == (
        "true is no Python program: nothing caps its memory"
    )


def test_cap_holds_in_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "own", symlinks=True)  # without any package that this product needs
    (tmp_path / "t.py").write_text("import sys; print(sys.path); bytearray(3 << 30)")
    how = {"cwd": str(tmp_path), "python": "own", "cap": True}
    slot = Slot(command_spec(argv=("python", "t.py"), **how))
    report = slot.end()
    assert slot.details("program_started").get("uncapped") is None
    assert report.ended.cause is Cause.OUT_OF_MEMORY
    assert str(ROOT) not in slot.printed.splitlines()[0]
