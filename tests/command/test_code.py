"""The hash of a folder's code depends on its sources alone; its files are sent unchanged."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.command.scenes import Slot, command_spec
from workers.command import folder as command_folder
from workers.command.code import CODE, code_of, files_to_send, is_same_code
from workers.command.folder import pack, unpack
from workers.messages import Cause


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / "sub" / "model.py").write_text("print(2)")
    (folder / "data.bin").write_bytes(b"\0" * 1000)
    return folder


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True)


def in_git(folder: Path) -> None:
    for words in (("init", "-q"), ("add", "train.py", "sub"), ("commit", "-qm", "first")):
        git(folder, *words)


@pytest.mark.parametrize("has_git", [True, False])
@pytest.mark.parametrize(
    ("name", "is_same"), [("train.py", False), ("sub/model.py", False), ("data.bin", True)]
)
def test_sources_alone_change_it(has_git: bool, name: str, is_same: bool, project: Path) -> None:
    if has_git:
        in_git(project)
    before = code_of(project)
    (project / name).write_text("another")
    assert is_same_code(before, code_of(project)) is is_same


def test_a_commit_of_the_same_files_is_the_same_code(project: Path) -> None:
    in_git(project)
    before = code_of(project)
    git(project, "commit", "-qm", "2", "--allow-empty")
    after = code_of(project)
    assert (before != after, is_same_code(before, after)) == (True, True)


def test_what_git_ignores_does_not_travel(project: Path) -> None:
    in_git(project)
    (project / ".gitignore").write_text("*.bin\n")
    assert files_to_send(project) == [".gitignore", "sub/model.py", "train.py"]


def test_folder_arrives_as_it_was(project: Path, state_dir: Path) -> None:
    arrived = unpack(pack(None, str(project), "pc2"), "run", "job")
    assert arrived.problem is None
    assert code_of(arrived.path) == code_of(project)
    assert (Path(arrived.path) / "data.bin").stat().st_size == 1000


def test_same_code_does_not_travel(project: Path) -> None:
    assert pack(code_of(project), str(project), "pc2").data is None


def test_folder_that_is_too_large_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, state_dir: Path
) -> None:
    monkeypatch.setattr(command_folder, "MOST_BYTES", 500)
    arrived = unpack(pack(None, str(project), "pc2"), "run", "job")
    report = Slot(command_spec("-c", "pass", cwd=arrived.path), problem=arrived.problem).end()
    assert "at most 0 MiB are sent to another PC: name there what" in report.ended.text
    assert report.ended.cause is Cause.NOT_STARTED


def test_changed_code_is_told(project: Path, state_dir: Path) -> None:
    before = code_of(project)
    (project / "train.py").write_text("print(3)")
    slot = Slot(command_spec("train.py", cwd=str(project), env={CODE: before}))
    report = slot.end()
    assert slot.details("code_changed")["submitted"] == before
    assert report.reason.endswith(
        f"its code was changed since it was submitted: {before}, now {code_of(project)}"
    )
