"""Hostile configurations by the hundred: refused in words, or a plan that adds up; never a traceback, never a hang.

FUZZ_EXAMPLES=50000 tries so many of each family. What was once found is kept as a file in
`fuzz_seeds`: `NAME.yaml`, and `NAME.set` with an override on each line.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from tests.config.hostile_inputs import FAMILIES, SHIPPED, HostileInput
from tests.config.plan_judge import judge

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))

#: What was found, and the words that refuse it now.
FOUND = {
    "alias-with-a-long-name": ":1: is not YAML: found undefined alias 'nnnn",
    "choice-of-a-4000-digit-number": ":2: memory.policy: a number of more than 18 digits is not one of the choices",
    "escape-far-beyond-unicode": ":2: is not YAML: an escape or a version number in it is too large",
    "escape-just-beyond-unicode": ":2: is not YAML: an escape or a version number in it is too large",
    "fraction-that-leaves-no-byte": "is 0.00 GiB; valid: a larger memory_fraction",
    "head-among-long-names": ":1: cluster.head: there is no node 'nobody'",
    "more-problems-than-a-screen-holds": ": has 203 more problems, not shown",
    "more-workers-than-a-head-can-ask": "1228800 workers on 1200 nodes are too many for one head; valid: at most 10000",
    "number-as-a-long-key": ":1: has the key 1111",
    "override-below-a-long-key": "… holds a single value or a list, no keys",
    "override-of-a-missing-node": "…; valid: pc1",
    "override-with-a-4000-digit-choice": "nodes.pc1.dtype: a number of more than 18 digits is not one of the choices",
    "tag-with-a-long-name": ":1: run: has the tag !tttt",
    "yaml-version-of-5000-digits": ":1: is not YAML: an escape or a version number in it is too large",
}
FOLDER = Path(__file__).parent / "fuzz_seeds"

GOOD = HostileInput(SHIPPED)


def kept(name: str) -> HostileInput:
    path, overrides = FOLDER / f"{name}.yaml", FOLDER / f"{name}.set"
    texts = tuple(overrides.read_text(encoding="utf-8").splitlines()) if overrides.exists() else ()
    return HostileInput(path.read_bytes(), texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_input_is_refused_or_a_plan_that_adds_up(family: str, tmp_path: Path) -> None:
    verdicts: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(FAMILIES[family])
    def hold(hostile: HostileInput) -> None:
        verdicts[judge(hostile, tmp_path)] += 1

    hold()
    # Where all is refused (or nothing), the strategy and not the product is what is tested.
    assert verdicts["refusal"] >= EXAMPLES / 10, verdicts
    assert verdicts["plan"] + verdicts["scaled"] >= EXAMPLES / 30, verdicts


def test_every_kept_file_is_tried() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_refused_in_words(name: str, tmp_path: Path) -> None:
    hostile = kept(name)
    assert judge(hostile, tmp_path) == "refusal"
    with pytest.raises(ConfigError) as caught:
        load_config(str(FOLDER / f"{name}.yaml"), hostile.overrides)
    assert FOUND[name] in str(caught.value)


def test_the_judge_lets_the_shipped_configuration_pass(tmp_path: Path) -> None:
    assert judge(GOOD, tmp_path) == "scaled"
    assert judge(HostileInput(SHIPPED, ("nonsense",)), tmp_path) == "refusal"


@pytest.mark.parametrize(
    "text", ["null", "yes", "1e3", "1234", "a: b #c", "- ", "1:30", "\u00fc '\""]
)
def test_text_like_another_value_is_written_and_read_again(text: str, tmp_path: Path) -> None:
    overrides = (
        f"run.dir={json.dumps(text)}",
        "nodes.pc1.power_limit_w=287.5",
        "memory.size_decay=1.0e-300",
    )
    assert judge(HostileInput(SHIPPED, overrides), tmp_path) == "scaled"
