"""Machines for the doctor's tests: a good one, and what is changed in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.host.facts import CardFacts, MachineFacts, TorchFacts
from workers.units import GIB

CUDA_TORCH = TorchFacts(
    version="2.13.0+cu128",
    cuda="12.8",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    available=True,
)
CPU_TORCH = TorchFacts(version="2.13.0+cpu")


def card(**changes: Any) -> CardFacts:
    """An RTX 3090 with nothing on it."""
    plain = CardFacts(
        index=0,
        name="NVIDIA GeForce RTX 3090",
        uuid="GPU-11111111-2222-3333-4444-555555555555",
        total_bytes=round(23.56 * GIB),
        used_bytes=round(0.3 * GIB),
        compute_capability=(8, 6),
        cores=10496,
        max_sm_clock_mhz=2100,
        max_memory_clock_mhz=9751,
        bus_width_bits=384,
        power_limit_w=350.0,
        persistence=True,
        display=False,
    )
    return replace(plain, **changes)


def laptop(**changes: Any) -> MachineFacts:
    """A PC without a card on which everything is right."""
    plain = MachineFacts(
        hostname="laptop",
        system="linux",
        kernel="6.8.0-52-generic",
        is_wsl=False,
        python="3.11.7",
        ray="2.60.0",
        project="0.1.0",
        cores_logical=16,
        cores_physical=8,
        ram_total_bytes=32 * GIB,
        ram_available_bytes=24 * GIB,
        shm_total_bytes=16 * GIB,
        nvml_error="NVML Shared Library Not Found",
        pci_cards=0,
        torch=CPU_TORCH,
        cpu_governors=("schedutil",),
        cpu_scaling_driver="acpi-cpufreq",
    )
    return replace(plain, **changes)


def workstation(**changes: Any) -> MachineFacts:
    """A PC with an RTX 3090 on which everything is right."""
    with_card = {
        "hostname": "workstation",
        "driver": "580.65.06",
        "driver_cuda": (13, 0),
        "nvml_error": None,
        "cards": (card(),),
        "pci_cards": 1,
        "torch": CUDA_TORCH,
    }
    return laptop(**{**with_card, **changes})


def wsl(**changes: Any) -> MachineFacts:
    """The same PC under WSL2."""
    own = {
        "kernel": "5.15.167.4-microsoft-standard-WSL2",
        "is_wsl": True,
        "pci_cards": None,
        "cpu_governors": (),
    }
    return workstation(**{**own, **changes})
