"""Scripted cards for processes in which `tests/stub_nvml/pynvml.py` stands in for nvidia-ml-py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.scene import ROOT

STUB = ROOT / "tests" / "stub_nvml"


def scripted_card(number: int = 1, **changes: Any) -> dict[str, Any]:
    """Return a cool, busy RTX 3090 with all values that such a card reports.

    Its memory is full, so that a rehearsal stays on the CPU. Other keys: `lost`, `fails` (maps a
    key to NVML's error, such as no_permission; `set_power_limit_w` for setting), `throttle` (a sum
    of `Throttle`), `margin_c` and `slowdown_tlimit_c` (as on Ada cards), `reserved_bytes`.
    """
    return {
        "name": "NVIDIA GeForce RTX 3090",
        "uuid": f"GPU-{number}aaaaaaa-0000-0000-0000-000000000000",
        "total_bytes": 24 * 2**30,
        "used_bytes": 24 * 2**30,
        "compute_capability": [8, 6],
        "temperature_c": 61,
        "slowdown_c": 95,
        "memory_temperature_c": 0,  # as GeForce cards report it
        "power_w": 341,
        "power_average_w": 320,
        "power_limit_w": 350,
        "power_limit_w_range": [100, 366],
        "memory_offset_mhz": 0,
        "memory_offset_mhz_range": [-2000, 6000],
        "sm_clock_mhz": 1740,
        "memory_clock_mhz": 9751,
        "utilisation_pct": 97,
        "throttle": 0x4,  # at its power limit, as a busy card is
        "fan_pct": 60,
        "processes": [{"pid": None, "used_bytes": 2**30}],
        **changes,
    }


def script_cards(path: Path, *cards: dict[str, Any], **script: Any) -> dict[str, str]:
    """Write a script; return the environment variables that give a process these cards.

    `script` may have `driver`, `cuda_driver`, `missing_functions`, and `nodes`: the cards of the
    nodes of a rehearsal, keyed by node; other nodes have `cards`.
    """
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps({"cards": cards, **script}))
    fresh.replace(path)
    folders = [str(STUB), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    return {"PYTHONPATH": os.pathsep.join(folders), "NVML_SCRIPT": str(path)}
