"""The report on the screen: verdicts as words, unbroken commands, no control characters for a
terminal.
"""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from orchestrator.cli.printing import text_lines
from orchestrator.doctor.report import Diagnosis, Finding, fail, ok, skip, warn

LONG = "ORCHESTRATOR_NODE=pc2 RAY_AUTH_MODE=token ray start --address=192.168.1.10:6379 --labels=node=pc2 --num-cpus=12"
WORDS = " ".join(["word"] * 60)


def diagnosis(*findings: Finding, **changes: bool) -> Diagnosis:
    facts = {"is_cluster": False, "has_card": True, "has_config": True, **changes}
    return Diagnosis(where="this machine (laptop)", findings=findings, **facts)


def lines_of(found: Diagnosis, width: int | None = 80) -> list[str]:
    return [line.plain for line in text_lines(found.parts(), width)]


def test_the_worst_comes_first_and_each_verdict_is_a_word() -> None:
    found = [
        make("x", check=name) for name, make in zip("abcd", (ok, skip, warn, fail), strict=True)
    ]
    assert [line.split()[:2] for line in lines_of(diagnosis(*found))[3:7]] == [
        ["FAIL", "d"],
        ["WARN", "c"],
        ["OK", "a"],
        ["–", "b"],  # noqa: RUF001
    ]


def test_words_are_broken_at_the_width_and_commands_never() -> None:
    found = diagnosis(fail(WORDS, hint="on pc2", fix=LONG, node="pc1", check="ray"))
    lines = lines_of(found)
    at = lines.index(f"type: {LONG}")
    assert lines[at - 1].endswith("word; on pc2")
    assert any(line.startswith("pc1 ray: word word") for line in lines)
    assert all(cell_len(line) <= 80 for line in lines if LONG not in line)
    assert f"pc1 ray: {WORDS}; on pc2" in lines_of(found, None), "without a terminal"


def test_hostile_words_cannot_steer_the_terminal() -> None:
    text = "\n".join(lines_of(diagnosis(warn("by \x1b[2J\r\nevil", hint="\x07", fix="a\x1bb"))))
    assert not any(ord(char) < 32 for char in text.replace("\n", ""))


@pytest.mark.parametrize(
    ("findings", "changes", "words"),
    [
        ([fail("x"), warn("x")], {}, "1 failure to put right first, 1 warning."),
        ([ok("x")], {"is_cluster": True}, "Ready for `python -m orchestrator run`; 0 warnings."),
        ([warn("x")], {}, "run --local"),
        ([warn("x")], {"has_card": False}, "run --rehearse"),
        ([warn("x")], {"has_config": False}, "python -m orchestrator init"),
    ],
)
def test_the_last_line_says_what_to_do_next(
    findings: list[Finding], changes: dict[str, bool], words: str
) -> None:
    assert words in lines_of(diagnosis(*findings, **changes), None)[-1]


def test_the_json_is_flat_and_complete() -> None:
    found = diagnosis(ok("x", check="a"), fail("y", hint="h", fix="f", check="b"))
    assert found.to_json() == {
        "where": "this machine (laptop)",
        "is_cluster": False,
        "exit_code": 1,
        "ok_count": 1,
        "skip_count": 0,
        "warn_count": 0,
        "fail_count": 1,
        "findings": [
            {"node": None, "check": "a", "verdict": "ok", "found": "x", "hint": None, "fix": None},
            {"node": None, "check": "b", "verdict": "fail", "found": "y", "hint": "h", "fix": "f"},
        ],
    }
