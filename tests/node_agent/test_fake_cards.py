"""The fake NVML where it is asked for more than sensors: through the real nvidia-ml-py, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.node_agent.conftest import Node, card
from workers.nvml.fake.prepare import prepare

_ASK = """
import json, sys
import pynvml
from workers.nvml.fake.library import load
from workers.settings import FakeSensors
load(FakeSensors(**json.loads(sys.argv[1])))
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)

def ask(name, *arguments):
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as error:
        return str(error)

told = [ask("nvmlSystemGetCudaDriverVersion_v2"), ask("nvmlSystemGetCudaDriverVersion")]
told += [ask("nvmlDeviceGetPersistenceMode", handle), ask("nvmlDeviceGetComputeMode", handle)]
memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
told += [memory.total, memory.reserved, memory.free, memory.used]
told += [ask("nvmlDeviceSetPowerManagementLimit", handle, limit) for limit in (99_999, 366_001, 100_000)]
told += [ask("nvmlDeviceGetPowerManagementLimit", handle)]
print(json.dumps(told))
"""


def asked(library_folder: Path, folder: Path, script: dict[str, Any]) -> list[Any]:
    path = folder / "card.json"
    path.write_text(json.dumps(script))
    fake = json.dumps(asdict(prepare(path, library_folder)))
    done = subprocess.run([sys.executable, "-c", _ASK, fake], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_what_the_script_says_is_told(library_folder: Path, tmp_path: Path) -> None:
    told = card(used_bytes=5 * 2**30, reserved_bytes=2**30, persistence_mode=True, compute_mode=3)
    assert asked(library_folder, tmp_path, {"cuda_driver": "13.1", "cards": [told]}) == [
        *(13010, 13010, 1, 3),
        *(24 * 2**30, 2**30, 18 * 2**30, 5 * 2**30),
        *("Invalid Argument", "Invalid Argument", None, 100_000),
    ]


def test_what_it_does_not_say_is_not_supported(library_folder: Path, tmp_path: Path) -> None:
    told = card(power_limit_w=None)
    assert asked(library_folder, tmp_path, {"cards": [told]}) == [
        *["Not Supported"] * 4,
        *(24 * 2**30, 0, 24 * 2**30, 0),
        *["Not Supported"] * 4,
    ]


def test_a_limit_belongs_to_its_card_and_outlives_every_process(node: Callable[..., Node]) -> None:
    pc = node(card(1), card(2))
    first = pc.agent(power_limit_w=123.456, cards=(card(2)["uuid"],))
    first.outcome()
    assert pc.limits_w() == [350.0, 123.456]
    first.end()
