"""The script that draws a finished run for the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.record.summary import summary_dict, write_summary
from tests.scene import ROOT, python
from tests.watch.scene import make_row, make_snapshot

SCRIPT = str(ROOT / "scripts" / "render_table.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    snapshot = make_snapshot(make_row(reason="<b>&[red]"), elapsed_s=30.0)
    write_summary(
        tmp_path / "summary.json", summary_dict(snapshot, "good", 0, "2026-01-01T00:00:00Z")
    )
    return tmp_path


def test_svg_is_the_same_every_time(folder: Path) -> None:
    assert python(SCRIPT, "summary.json", "one.svg", cwd=folder).returncode == 0
    assert python(SCRIPT, "summary.json", "two.svg", cwd=folder).returncode == 0

    svg = (folder / "one.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert "pc1/0" in svg
    assert svg == (folder / "two.svg").read_text(encoding="utf-8")


def test_text_of_a_width(folder: Path) -> None:
    assert python(SCRIPT, "summary.json", "table.txt", "--width", "60", cwd=folder).returncode == 0

    lines = (folder / "table.txt").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("pc1/0") for line in lines)
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.json", "table.svg"], "missing.json"),
        (["summary.json", "table.png"], "must end in .svg or .txt"),
        (["list.json", "table.svg"], "no run summary"),
        (["summary.json", "table.svg", "--width", "3"], "at least 40"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_line(
    folder: Path, arguments: list[str], said: str
) -> None:
    (folder / "list.json").write_text("[]")

    done = python(SCRIPT, *arguments, cwd=folder)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
