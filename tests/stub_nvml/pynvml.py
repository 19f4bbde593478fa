"""Stands in for nvidia-ml-py where this folder is on PYTHONPATH; answers from a JSON file.

The file is named by the variable NVML_SCRIPT. Without it there is no driver. A card's keys are
listed in `tests/cards.py`, which writes the file. A file that is written again counts at once, for
all processes. A question that a card has no key for is "not supported", as on a real card.

Constants, exceptions and their texts are nvidia-ml-py's own. What is set on a card stands in a file
beside the script, for all processes. Does not cover MIG, and nothing that needs a handle's address.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def _real() -> Any:
    """Load nvidia-ml-py under another name; it opens the driver's library only when it is asked."""
    here = Path(__file__).resolve()
    files = (Path(folder or ".") / "pynvml.py" for folder in sys.path)
    path = next(each for each in files if each.exists() and each.resolve() != here)
    spec = importlib.util.spec_from_file_location("nvidia_ml_py", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nvidia_ml_py = _real()
globals().update(
    (name, value)
    for name, value in vars(nvidia_ml_py).items()
    if name.startswith(("NVML_", "NVMLError", "nvmlMemory_v"))
)
Error = nvidia_ml_py.NVMLError


def __getattr__(name: str) -> Callable[..., Any]:
    """Of the functions that nvidia-ml-py has and this stub has not, none is supported."""
    if not hasattr(nvidia_ml_py, name):
        raise AttributeError(f"nvidia-ml-py has no {name}")
    return lambda *_: _fail("not_supported")


def _fail(name: str) -> Any:
    raise Error(getattr(nvidia_ml_py, f"NVML_ERROR_{name.upper()}"))


# --- The script.

_opened = 0


def _path() -> Path:
    return Path(os.environ["NVML_SCRIPT"])


def _script(function: str) -> dict[str, Any]:
    """Read the file, for one question."""
    if not _opened:
        _fail("uninitialized")
    script: dict[str, Any] = json.loads(_path().read_text())
    if function in script.get("missing_functions", ()):
        _fail("function_not_found")
    return script


def _cards(function: str) -> list[dict[str, Any]]:
    """Return the cards of the node that this process belongs to, by the label of its raylet."""
    script = _script(function)
    nodes, raylet = script.get("nodes", {}), os.environ.get("RAY_RAYLET_PID")
    command = ""
    if nodes and raylet is not None:
        command = Path(f"/proc/{raylet}/cmdline").read_text().replace(" ", "")
    named = (cards for node, cards in nodes.items() if f'"node":"{node}"' in command)
    return list(next(named, script["cards"]))


def _card(function: str, handle: int) -> dict[str, Any]:
    """Return a card that is not lost, with what was set on it."""
    cards = _cards(function)
    if not 0 <= handle < len(cards):
        _fail("invalid_argument")
    card = cards[handle]
    if card.get("lost"):
        _fail("gpu_is_lost")
    return card | _set_values().get(card["uuid"], {})


def _ask(function: str, handle: int, key: str) -> Any:
    card = _card(function, handle)
    if key in card.get("fails", {}):
        _fail(card["fails"][key])
    if card.get(key) is None:
        _fail("not_supported")
    return card[key]


# --- The library, and the cards of this machine.


def nvmlInit() -> None:
    global _opened
    if "NVML_SCRIPT" not in os.environ:
        _fail("library_not_found")
    _opened += 1


def nvmlShutdown() -> None:
    global _opened
    if not _opened:
        _fail("uninitialized")
    _opened -= 1


def nvmlSystemGetDriverVersion() -> str:
    return str(_script("nvmlSystemGetDriverVersion").get("driver") or _fail("not_supported"))


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    script = _script("nvmlSystemGetCudaDriverVersion_v2")
    return int(script.get("cuda_driver") or _fail("not_supported"))


def nvmlDeviceGetCount() -> int:
    return len(_cards("nvmlDeviceGetCount"))


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _card("nvmlDeviceGetHandleByIndex", index)
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    uuids = [card["uuid"] for card in _cards("nvmlDeviceGetHandleByUUID")]
    return nvmlDeviceGetHandleByIndex(uuids.index(uuid) if uuid in uuids else _fail("not_found"))


# --- Questions with one key and one number for an answer.


def _answers(function: str, key: str, convert: Callable[[Any], Any] = round) -> None:
    globals()[function] = lambda handle, *_: convert(_ask(function, handle, key))


def _milli(watts: float) -> int:
    return round(1000 * watts)


_answers("nvmlDeviceGetName", "name", str)
_answers("nvmlDeviceGetUUID", "uuid", str)
_answers("nvmlDeviceGetCudaComputeCapability", "compute_capability", tuple)
_answers("nvmlDeviceGetTemperature", "temperature_c")
_answers("nvmlDeviceGetTemperatureV", "temperature_c")
_answers("nvmlDeviceGetMarginTemperature", "margin_c")
_answers("nvmlDeviceGetTemperatureThreshold", "slowdown_c")
_answers("nvmlDeviceGetPowerUsage", "power_average_w", _milli)
_answers("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w", _milli)
_answers("nvmlDeviceGetPowerManagementLimit", "power_limit_w", _milli)
_answers("nvmlDeviceGetMemClkVfOffset", "memory_offset_mhz")
_answers("nvmlDeviceGetFanSpeed", "fan_pct")
_answers("nvmlDeviceGetUtilizationRates", "utilisation_pct", lambda pct: SimpleNamespace(gpu=pct))
_answers("nvmlDeviceGetCurrentClocksEventReasons", "throttle")
_answers("nvmlDeviceGetCurrentClocksThrottleReasons", "throttle")


def nvmlDeviceGetClockInfo(handle: int, clock: int) -> int:
    name = "sm" if clock == nvidia_ml_py.NVML_CLOCK_SM else "memory"
    return round(_ask("nvmlDeviceGetClockInfo", handle, f"{name}_clock_mhz"))


_FIELDS = {
    nvidia_ml_py.NVML_FI_DEV_MEMORY_TEMP: ("memory_temperature_c", round),
    nvidia_ml_py.NVML_FI_DEV_POWER_INSTANT: ("power_w", _milli),
    nvidia_ml_py.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT: ("slowdown_tlimit_c", round),
}


def nvmlDeviceGetFieldValues(handle: int, fields: list[int]) -> list[SimpleNamespace]:
    _card("nvmlDeviceGetFieldValues", handle)
    return [_field(handle, field) for field in fields]


def _field(handle: int, field: int) -> SimpleNamespace:
    key, convert = _FIELDS[field]
    status, value = 0, 0
    try:
        value = convert(_ask("nvmlDeviceGetFieldValues", handle, key))
    except Error as error:
        status = error.value
    kind = nvidia_ml_py.NVML_VALUE_TYPE_SIGNED_INT
    told = SimpleNamespace(siVal=value)
    return SimpleNamespace(fieldId=field, nvmlReturn=status, valueType=kind, value=told)


# --- Memory and processes.


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> SimpleNamespace:
    """The first version counts what the driver keeps as used; the second tells it apart."""
    name = "nvmlDeviceGetMemoryInfo" + ("" if version is None else "_v2")
    total, used = (round(_ask(name, handle, key)) for key in ("total_bytes", "used_bytes"))
    kept = round(_card(name, handle).get("reserved_bytes", 0))
    free = total - used - kept
    if version is None:
        return SimpleNamespace(total=total, used=used + kept, free=free)
    return SimpleNamespace(total=total, used=used, free=free, reserved=kept)


def _lists(function: str, kind: str) -> None:
    def listed(handle: int) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=each["pid"] or os.getpid(), usedGpuMemory=each["used_bytes"])
            for each in _ask(function, handle, "processes")
            if each.get("kind", "compute") == kind
        ]

    globals()[function] = listed


for _version in ("v2", "v3"):
    _lists(f"nvmlDeviceGetComputeRunningProcesses_{_version}", "compute")
    _lists(f"nvmlDeviceGetMPSComputeRunningProcesses_{_version}", "mps")
    _lists(f"nvmlDeviceGetGraphicsRunningProcesses_{_version}", "graphics")


# --- What is set on a card.


def _set_values() -> dict[str, dict[str, float]]:
    path = _path().with_suffix(".set")
    return json.loads(path.read_text()) if path.exists() else {}


def _set(function: str, handle: int, key: str, value: float) -> None:
    card = _card(function, handle)
    if f"set_{key}" in card.get("fails", {}):
        _fail(card["fails"][f"set_{key}"])
    least, most = card[f"{key}_range"]
    if not least <= value <= most:
        _fail("invalid_argument")
    values = _set_values()
    values[card["uuid"]] = values.get(card["uuid"], {}) | {key: value}
    path = _path().with_suffix(".set")
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(values))
    fresh.replace(path)


def nvmlDeviceGetPowerManagementLimitConstraints(handle: int) -> tuple[int, ...]:
    name = "nvmlDeviceGetPowerManagementLimitConstraints"
    return tuple(map(_milli, _ask(name, handle, "power_limit_w_range")))


def nvmlDeviceSetPowerManagementLimit(handle: int, limit_mw: int) -> None:
    _set("nvmlDeviceSetPowerManagementLimit", handle, "power_limit_w", limit_mw / 1000)


def nvmlDeviceGetMemClkMinMaxVfOffset(handle: int) -> tuple[int, ...]:
    return tuple(_ask("nvmlDeviceGetMemClkMinMaxVfOffset", handle, "memory_offset_mhz_range"))


def nvmlDeviceSetMemClkVfOffset(handle: int, offset_mhz: int) -> None:
    _set("nvmlDeviceSetMemClkVfOffset", handle, "memory_offset_mhz", offset_mhz)
