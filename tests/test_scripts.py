"""The benches can be imported, and `run` of each takes the options of its entry in verbs.yaml."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import yaml

from tests.scene import ROOT

BENCHES: dict[str, dict[str, Any]] = yaml.safe_load(
    (ROOT / "scripts" / "benches" / "verbs.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("bench", BENCHES)
def test_bench_takes_the_options_of_its_entry(bench: str) -> None:
    module = importlib.import_module(f"benches.{BENCHES[bench]['module']}")
    options = {name.replace("-", "_") for name in BENCHES[bench]["options"]}
    assert set(inspect.signature(module.run).parameters) == options
