"""The cards of a machine, and what the fake NVML answers beyond sensors, through the real nvidia-ml-py."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from workers.host.machine import is_visible
from workers.units import GIB, MIB

Scene = Callable[..., tuple[str, Any]]
Look = Callable[..., list[Any]]


def card(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "name": "NVIDIA GeForce RTX 3070",
        "uuid": f"GPU-{number}aaaaaaa-0000-0000-0000-000000000000",
        "total_bytes": 8 * GIB,
        "used_bytes": GIB,
        "power_limit_default_w": 220,
        **changes,
    }


def test_which_cards_there_are_a_lost_one_among_them(scene: Scene, look: Look) -> None:
    first, bare, lost = (
        card(1, compute_capability="9.0", compute_mode=3),
        card(2),
        card(3, lost_after_calls=0),
    )
    (cards,) = look(scene(first, bare, lost), ("cards", None))
    same = {"name": first["name"], "total_bytes": 8 * GIB, "lost": False}
    assert cards == [
        {"index": 0, "uuid": first["uuid"], "compute_capability": [9, 0], "compute_mode": 3} | same,
        {"index": 1, "uuid": bare["uuid"], "compute_capability": None, "compute_mode": None} | same,
        {"index": 2, **dict.fromkeys(("uuid", "name", "total_bytes", "compute_capability", "compute_mode")),
         "lost": True},
    ]  # fmt: skip


def test_what_a_card_says_and_who_holds_it(scene: Scene, look: Look) -> None:
    strangers = [{"pid": os.getpid(), "used_bytes": GIB}, {"pid": 2**22 + 5, "used_bytes": None}]
    held = card(processes=strangers, compute_capability="8.6")
    script = scene(held, driver="580.65.06", cuda_driver="13.0")
    (found,) = look(script, ("facts", None), CUDA_VISIBLE_DEVICES="0")
    assert found["driver"] == "580.65.06"
    assert found["driver_cuda"] == [13, 0]
    assert found["nvml_error"] is None
    assert (found["card_errors"], len(found["cards"])) == ([], 1)
    expected = {
        "name": held["name"],
        "total_bytes": 8 * GIB,
        "used_bytes": GIB,
        "compute_capability": [8, 6],
    }
    # What this card does not tell is unknown, not nothing.
    expected |= {
        "visible": True,
        "cores": None,
        "persistence": None,
        "bus_width_bits": None,
        "power_limit_w": 220.0,
    }
    assert found["cards"][0] | expected == found["cards"][0]
    assert found["cards"][0]["holders"] == [
        {"pid": os.getpid(), "name": psutil.Process().name(), "used_bytes": GIB},
        {"pid": 2**22 + 5, "name": None, "used_bytes": None},
    ]


def test_a_lost_card_is_named_and_a_hidden_one_marked(scene: Scene, look: Look) -> None:
    script = scene(card(1, lost_after_calls=0), card(2), card(3))
    (found,) = look(script, ("facts", None), CUDA_VISIBLE_DEVICES="2")
    assert found["card_errors"] == ["card 0 is lost"]
    assert [(each["index"], each["visible"]) for each in found["cards"]] == [(1, False), (2, True)]


@pytest.mark.parametrize(
    ("setting", "visible"),
    [
        (None, True),
        ("0", True),
        ("1", False),
        ("", False),
        ("1, 0", True),
        ("GPU-1aaa", True),
        ("GPU-2", False),
    ],
)
def test_which_cards_are_visible(setting: str | None, visible: bool) -> None:
    assert is_visible(0, "GPU-1aaaaaaa-0000", setting) is visible


def test_the_reserve_of_the_driver_belongs_to_no_budget(scene: Scene, look: Look) -> None:
    """What CUDA shows is less than what newer drivers call the total.

    An older one leaves the reserve out by itself.
    """
    size = {"total_bytes": 12288 * MIB, "used_bytes": MIB}
    older = scene(card(**size), missing_functions=["nvmlDeviceGetMemoryInfo_v2"])
    scripts = [scene(card(**size, reserved_bytes=380 * MIB)), scene(card(**size)), older]
    told = look(
        *(step for script in scripts for step in (script, ("shown", None))),
        CUDA_VISIBLE_DEVICES="0",
    )
    assert told == [
        [shown_mib * MIB, shown_mib * MIB, MIB, (shown_mib - 1) * MIB]
        for shown_mib in (12288 - 380, 12288, 12288)
    ]


LIMITS = {"power_limit_w": 350, "power_limit_min_w": 100, "power_limit_max_w": 366}


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            {**LIMITS, "persistence_mode": True, "compute_mode": 3, "cuda_driver": "13.1"},
            [13010, 13010, 1, 3, "Invalid Argument", "Invalid Argument", None, 100_000],
        ),
        ({}, ["Not Supported"] * 8),
    ],
)
def test_the_fake_answers_what_its_script_says_and_nothing_else(
    scene: Scene, look: Look, says: dict[str, Any], told: list[Any]
) -> None:
    driver = {"cuda_driver": says["cuda_driver"]} if "cuda_driver" in says else {}
    script = scene(
        card(**{key: value for key, value in says.items() if key not in driver}), **driver
    )
    questions: list[list[Any]] = [
        ["nvmlSystemGetCudaDriverVersion_v2"],
        ["nvmlSystemGetCudaDriverVersion"],
        ["nvmlDeviceGetPersistenceMode", "card"],
        ["nvmlDeviceGetComputeMode", "card"],
        *(
            ["nvmlDeviceSetPowerManagementLimit", "card", limit_mw]
            for limit_mw in (99_999, 366_001, 100_000)
        ),
        ["nvmlDeviceGetPowerManagementLimit", "card"],
    ]
    assert look(script, ("ask", questions)) == [told]
