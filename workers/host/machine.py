"""Collects the facts about this machine once: `MachineFacts`.

Covers the processor, memory, the platform, the driver and its cards, torch, and the environment.
Judges and changes nothing. torch is queried in a separate process, because it may be broken and
need not be loaded here. A card that does not answer becomes a sentence, and never hides the others.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import psutil
import pynvml

from workers.host.facts import CardFacts, DriverFacts, Holder, MachineFacts, TorchFacts
from workers.nvml import queries


def look_at_cards() -> DriverFacts:
    """Query the driver and all cards by NVML; never raises for what a machine has or lacks."""
    try:
        with queries.opened():
            found = [_card(index) for index in range(pynvml.nvmlDeviceGetCount())]
            cuda: int | None = None
            with suppress(pynvml.NVMLError):
                cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            return DriverFacts(
                driver=queries.driver_version(),
                # 12080 is 12.8.
                driver_cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
                card_errors=tuple(card for card in found if isinstance(card, str)),
                cards=tuple(card for card in found if isinstance(card, CardFacts)),
            )
    except pynvml.NVMLError as error:
        return DriverFacts(nvml_error=str(error))


def visible_cards() -> tuple[CardFacts, ...]:
    """Return the cards of this machine that CUDA_VISIBLE_DEVICES does not hide.

    Empty if there is no driver.
    """
    return tuple(card for card in look_at_cards().cards if card.visible)


def _card(index: int) -> CardFacts | str:
    """Query one card; a sentence if it does not answer with its name and memory."""
    try:
        card = queries.find_card(str(index))
        ask, uuid = card.ask, str(pynvml.nvmlDeviceGetUUID(card.handle))
        name, total_bytes = ask("nvmlDeviceGetName"), card.total_bytes()
        if name is None or total_bytes is None:
            return f"card {index} does not answer"
        persistence = ask("nvmlDeviceGetPersistenceMode")
        display = ask("nvmlDeviceGetDisplayActive")
        return CardFacts(
            index=index,
            name=name,
            uuid=uuid,
            total_bytes=total_bytes,
            used_bytes=card.used_bytes(),
            compute_capability=ask("nvmlDeviceGetCudaComputeCapability"),
            persistence=None if persistence is None else bool(persistence),
            display=None if display is None else bool(display),
            visible=is_visible(index, uuid, os.environ.get("CUDA_VISIBLE_DEVICES")),
            holders=tuple(
                Holder(pid=pid, name=_name_of(pid), used_bytes=used_bytes)
                for pid, used_bytes in sorted(card.processes(drawing=True).items())
            ),
        )
    except pynvml.NVMLError as error:
        return f"card {index} {'is lost' if error.value in queries.GONE else 'does not answer'}"


def is_visible(index: int, uuid: str, setting: str | None) -> bool:
    """Return whether a value of CUDA_VISIBLE_DEVICES leaves a card visible, by its index or by the
    beginning of its UUID.
    """
    if setting is None:
        return True
    names = [name.strip() for name in setting.split(",") if name.strip()]
    return str(index) in names or any(uuid.startswith(name) for name in names)


def _name_of(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, ValueError):
        return None


#: Importing torch from a cold disk takes long.
_TORCH_TIMEOUT_S = 120.0

_QUERY_TORCH = """
import json, warnings
said = []
warnings.showwarning = lambda message, *_, **__: said.append(str(message))
import torch
available = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "available": available,
    "architectures": torch.cuda.get_arch_list(),
    "error": next((text for text in said if "CUDA" in text), None),
}))
"""

_NVIDIA = "0x10de"
#: PCI classes of devices that may compute: display controllers, with and without a screen.
_DISPLAY_CLASSES = ("0x0300", "0x0302")


def look_around(*, with_torch: bool = True) -> MachineFacts:
    """Collect the facts about this machine; takes some seconds with torch."""
    is_wsl = "microsoft" in platform.release().lower()
    driver = look_at_cards()
    return MachineFacts(
        hostname=socket.gethostname(),
        is_wsl=is_wsl,
        python=platform.python_version(),
        ray=_version("ray"),
        project=_version("oom-orchestrator"),
        cores_logical=os.cpu_count() or 1,
        cores_physical=psutil.cpu_count(logical=False),
        ram_available_bytes=psutil.virtual_memory().available,
        pci_cards=None if is_wsl else _pci_cards(),
        torch=query_torch() if with_torch else TorchFacts(),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cpu_governors=_cpu_governors(),
        cpu_scaling_driver=_read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"))
        or None,
        **{field.name: getattr(driver, field.name) for field in fields(driver)},
    )


def query_torch() -> TorchFacts:
    """Query the torch of this Python: which CUDA it was built for, and whether it sees a card."""
    try:
        done = subprocess.run(  # noqa: S603 - this Python, and our own words
            [sys.executable, "-P", "-c", _QUERY_TORCH],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        error = f"`import torch` took longer than {_TORCH_TIMEOUT_S:.0f} s"
        return TorchFacts(is_late=True, error=error)
    except OSError as error:
        return TorchFacts(error=str(error))
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return TorchFacts(**{**answer, "architectures": tuple(answer["architectures"])})
    except (ValueError, IndexError, TypeError, KeyError):
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return TorchFacts(
            error=last[0].strip()[:300] if last else f"it ended with status {done.returncode}"
        )


def _version(distribution: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def free_bytes(path: str) -> int | None:
    """Return the free bytes of the disk that holds `path`, or would hold it.

    `None` if they are unknown.
    """
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def _pci_cards() -> int | None:
    root = Path("/sys/bus/pci/devices")
    if not root.is_dir():
        return None
    return sum(
        _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY_CLASSES)
        for device in root.iterdir()
    )


def _cpu_governors() -> tuple[str, ...]:
    found = {
        _read(path)
        for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    }
    return tuple(sorted(found - {""}))


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""
