"""The table of promises names existing tests."""

from __future__ import annotations

import re

import pytest

from tests.scene import ROOT

CITED = re.findall(
    r"\| `(\S+)` \|$", (ROOT / "tests" / "promises.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("cited", CITED)
def test_promise_names_a_test_that_is_there(cited: str) -> None:
    path, _, name = cited.partition("::")
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")

    assert re.search(rf"^\s*(async )?def {name or 'test_'}", text, re.MULTILINE)


def test_no_promise_is_told_twice() -> None:
    assert len(CITED) > 100
    assert len(set(CITED)) == len(CITED)
