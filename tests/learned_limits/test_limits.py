"""Which limits fit which worker, and what tells versions of a workload apart."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.learned_limits.keys import KEY
from workers.learned_limits import workload_fingerprint

GIB = 2**30

CAPS = st.integers(min_value=1, max_value=2**50)


@pytest.mark.parametrize(
    "changed",
    [
        {"card": "NVIDIA GeForce RTX 3070"},
        {"driver": "580.65.07"},
        {"driver": None},
        {"torch": "2.13.0+cpu"},
        {"dtype": "bf16"},
        {"workload": "matmul@0.1.1"},
        {"total_bytes": 12 * GIB},
        {"total_bytes": None},
        {"cap_bytes": 4 * GIB},
        {"cap_bytes": 2 * GIB},
    ],
)
def test_other_circumstances_never_match(changed: dict[str, Any]) -> None:
    other = dataclasses.replace(KEY, **changed)
    assert KEY.serves(KEY)
    assert not KEY.serves(other)
    assert not other.serves(KEY)


def test_untold_facts_match_and_a_total_may_differ_slightly() -> None:
    on_cpu = dataclasses.replace(KEY, total_bytes=None, driver=None)
    assert on_cpu.serves(dataclasses.replace(on_cpu))
    assert KEY.serves(dataclasses.replace(KEY, total_bytes=24 * GIB - 64 * 2**20))


@given(learned_bytes=CAPS, wanted_bytes=CAPS)
@example(learned_bytes=1000, wanted_bytes=990)
@example(learned_bytes=1000, wanted_bytes=989)
@example(learned_bytes=1000, wanted_bytes=1010)
@example(learned_bytes=1000, wanted_bytes=1011)
def test_a_limit_is_offered_within_one_percent_of_its_cap(
    learned_bytes: int, wanted_bytes: int
) -> None:
    is_near = 99 * learned_bytes <= 100 * wanted_bytes <= 101 * learned_bytes
    learned, wanted = (
        dataclasses.replace(KEY, cap_bytes=each) for each in (learned_bytes, wanted_bytes)
    )
    assert learned.serves(wanted) == is_near


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a module of the user's, by its dotted name, where this process finds it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def write(name: str, source: str) -> None:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_a_changed_step_has_another_fingerprint(module: Callable[[str, str], None]) -> None:
    module("burn_pack.steps", "class Mlp: pass\ndef step(batch_size): pass\n")
    assert workload_fingerprint("burn_pack.steps:Mlp") == "burn_pack.steps:Mlp", "not loaded"
    loaded = importlib.import_module("burn_pack.steps")
    first = workload_fingerprint("burn_pack.steps:Mlp")
    assert first.startswith("burn_pack.steps:Mlp@")
    assert workload_fingerprint(loaded.Mlp) == first
    assert workload_fingerprint(loaded.step) == first.replace(":Mlp@", ":step@")
    module("burn_pack.steps", "class Mlp: size = 2\n")
    assert workload_fingerprint("burn_pack.steps:Mlp") not in {first, "burn_pack.steps:Mlp"}
    assert workload_fingerprint(functools.partial(print)).startswith("functools:partial@")


@pytest.mark.torch
def test_matmul_has_one_fingerprint_under_each_name() -> None:
    importlib.import_module("workers.workloads.matmul")
    plain = workload_fingerprint("matmul")
    assert plain.startswith("matmul@")
    assert workload_fingerprint("workers.workloads.matmul:Matmul") == plain
    assert workload_fingerprint("matmul", size=2, batch=128) == f"{plain} batch=128 size=2"
