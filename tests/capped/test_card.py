"""What `workers.capped` sets for a card, without a card: scripted cards, and a torch that records.

The torch of these tests reads the variables as 2.13's headers say and queues calls as its
`_lazy_call`. That a real allocator refuses past the cap is for `gpu/test_own_programs.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cards import script_cards, scripted_card
from tests.scene import python
from workers.units import GIB

TORCH = {
    "__init__.py": "from torch import cuda, version",
    "version.py": "from typing import Optional\ncuda: Optional[str] = '13.0'\n",
    "cuda.py": """
import os, re
totals, queued, fractions, made_context = [8 * 2**30, 24 * 2**30], [], {}, False
current = 0
_lazy_call = queued.append
def init():
    global made_context
    made_context = True
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    text = next((os.environ[name] for name in names if name in os.environ), "")
    found = re.findall(r"per_process_memory_fraction:([\\d.]+)", text)
    fractions.update(dict.fromkeys(range(len(totals)), float(found[-1]) if found else 1.0))
    for call in queued:
        call()
def device_count(): return len(totals)
class get_device_properties:
    def __init__(self, card): self.total_memory = totals[card]
def current_device(): return current
def set_device(card):
    global current
    current = card
if "OLD_TORCH" not in os.environ:
    def get_per_process_memory_fraction(card): return fractions[card]
def set_per_process_memory_fraction(fraction, card):
    fractions[card] = fraction
    set_device(card)  # as torch did before 2.10
""",
}

PROGRAM = """
import importlib.util, json, os, resource, sys
importlib.util.find_spec("torch")
{own}
import torch
before = torch.cuda.made_context
torch.cuda.init()
gib = [torch.cuda.fractions[card] * total / 2**30 for card, total in enumerate(torch.cuda.totals)]
names = ("WORKERS_CAPPED", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
print(json.dumps([before, gib, [os.environ.get(name) for name in names],
                  resource.getrlimit(resource.RLIMIT_DATA)[0], len(torch.cuda.queued),
                  torch.cuda.current]))
"""

Look = Callable[..., Any]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Run the program with 4 GiB on a card of 8 and one of 24; return what it found."""
    for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cards = [scripted_card(number, total_bytes=number * 8 * GIB, used_bytes=0) for number in (1, 3)]
    variables = script_cards(tmp_path / "cards.json", *cards)
    header = tmp_path / "torch" / "include" / "c10" / "cuda" / "CUDAAllocatorConfig.h"
    header.parent.mkdir(parents=True)
    for name, text in TORCH.items():
        (tmp_path / "torch" / name).write_text(text)

    def look_(own: str = "", *, knows_key: bool = True, **environment: str) -> Any:
        header.write_text('"per_process_memory_fraction",' if knows_key else "")
        (tmp_path / "program.py").write_text(PROGRAM.format(own=own))
        done = python("-m", "workers.capped", "--gib", "4", "program.py", cwd=tmp_path,
                      PYTHONPATH=f"{tmp_path}:{variables['PYTHONPATH']}",
                      NVML_SCRIPT=variables["NVML_SCRIPT"], **environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return look_


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None), (None, "per_process_memory_fraction:0.500000000")),
        ((None, "expandable_segments:True,"),
         (None, "expandable_segments:True,per_process_memory_fraction:0.500000000")),
        (("max_split_size_mb:64", "a:b"),
         ("max_split_size_mb:64,per_process_memory_fraction:0.500000000", "a:b")),
        (("per_process_memory_fraction:0.25", None),
         ("per_process_memory_fraction:0.25,per_process_memory_fraction:0.250000000", None)),
    ],
)  # fmt: skip
def test_the_share_goes_into_the_variable_that_wins(
    look: Look, given: tuple[str | None, ...], expected: tuple[str | None, ...]
) -> None:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    set_ones = {name: text for name, text in zip(names, given, strict=True) if text is not None}
    before, gib, variables, *_ = look(**set_ones)
    assert variables == ["cuda:4", *expected]
    assert before is False
    assert gib == ([2, 4] if "0.25" in str(given) else [4, 4])


def test_what_the_variable_did_not_do_is_done_when_cuda_begins(look: Look) -> None:
    own = "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'"
    before, gib, _, _, calls, _ = look(own)
    assert (before, gib, calls) == (False, [4, 4], 1)


def test_a_torch_before_2_7_is_capped_on_the_card_that_it_uses(look: Look) -> None:
    _, gib, *_, current = look(knows_key=False, OLD_TORCH="1")
    assert (gib, current) == ([4, 4], 0)


@pytest.mark.parametrize("visible", ["", "7"])
def test_without_a_visible_card_the_kernel_keeps_the_cap(look: Look, visible: str) -> None:
    _, _, variables, limit, *_ = look(CUDA_VISIBLE_DEVICES=visible)
    assert (variables, limit) == (["cpu:4", None, None], 4 * GIB)


def test_torch_without_its_allocator_is_refused(look: Look, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="torch keeps no cap; unset it"):
        look(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
