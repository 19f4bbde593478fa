"""The head's errors: their sentences, exit codes and survival of pickling."""

import pickle

import pytest

from orchestrator.errors import (
    ConfigError,
    NoClusterError,
    OrchestratorError,
    PreflightError,
    Problem,
    UsageError,
)

PROBLEM = Problem("cluster.yaml", 7, "nodes.pc1.workers", "0 is too small", "at least 1")


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (PROBLEM, "cluster.yaml:7: nodes.pc1.workers: 0 is too small; valid: at least 1"),
        (Problem("cluster.yaml", None, None, "is empty", None), "cluster.yaml: is empty"),
        (Problem("--set a.b=c", None, "a.b", "bad", None), "--set a.b=c: a.b: bad"),
        (Problem("c.yaml", 3, None, "is not YAML", "YAML"), "c.yaml:3: is not YAML; valid: YAML"),
    ],
)
def test_a_problem_is_one_line_without_its_absent_parts(problem: Problem, expected: str) -> None:
    assert expected == str(problem)


def test_a_problem_stays_one_printable_line_whatever_is_in_it() -> None:
    shown = str(Problem("a\nb", 1, "k\x1b[2J", "t\r\u2028\ud800x", "v\0"))
    assert shown.isprintable()
    assert shown == "a\\nb:1: k\\x1b[2J: t\\r\\u2028\\ud800x; valid: v\\x00"


def test_a_long_key_or_override_is_not_repeated_in_full() -> None:
    shown = str(Problem("--set " + "a" * 5000, None, "b" * 5000, "is too long", None))
    assert len(shown) < 400
    assert shown.endswith("b: is too long")


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (UsageError("no such verb"), 2, "no such verb"),
        (ConfigError([PROBLEM, PROBLEM]), 2, f"{PROBLEM}\n{PROBLEM}"),
        (NoClusterError("no cluster at auto"), 3, "no cluster at auto"),
        (PreflightError(["pc2 is missing", "pc1 has 0 GPUs"]), 3, "pc2 is missing\npc1 has 0 GPUs"),
    ],
)
def test_errors_say_how_to_exit_and_survive_pickling(
    error: OrchestratorError, exit_code: int, text: str
) -> None:
    for same in (error, pickle.loads(pickle.dumps(error))):  # noqa: S301  # our own bytes
        assert type(same) is type(error)
        assert (same.exit_code, str(same)) == (exit_code, text)
        assert getattr(same, "problems", None) == getattr(error, "problems", None)
        assert isinstance(same, OrchestratorError)


def test_problems_given_as_a_generator_are_kept_as_a_tuple() -> None:
    assert ConfigError(p for p in [PROBLEM]).problems == (PROBLEM,)
    assert PreflightError(text for text in ["a"]).problems == ("a",)
