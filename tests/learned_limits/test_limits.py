"""Which limits fit which worker, and what tells versions of a workload apart."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.learned_limits import StoredLimit, workload_fingerprint
from workers.settings import Learned

CAPS = st.integers(min_value=1, max_value=2**50)


@given(learned_bytes=CAPS, wanted_bytes=CAPS)
@example(learned_bytes=1000, wanted_bytes=990)
@example(learned_bytes=1000, wanted_bytes=989)
@example(learned_bytes=1000, wanted_bytes=1010)
@example(learned_bytes=1000, wanted_bytes=1011)
def test_a_limit_is_offered_within_one_percent_of_its_cap(
    learned_bytes: int, wanted_bytes: int
) -> None:
    is_near = 99 * learned_bytes <= 100 * wanted_bytes <= 101 * learned_bytes
    limit = StoredLimit(learned=Learned(size=1), cap_bytes=learned_bytes, learned_at_unix_s=0.0)
    assert limit.holds_under(wanted_bytes) == is_near


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
