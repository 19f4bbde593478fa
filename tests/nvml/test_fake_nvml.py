"""The fake NVML itself: what it refuses of a script, how it is built, and into which process it may be loaded."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scene import python
from workers.nvml.fake import FakeSensorsError
from workers.nvml.fake.script import build, prepare, read_script
from workers.settings import FakeSensors

CARD: dict[str, Any] = {
    "name": "NVIDIA GeForce RTX 3070",
    "uuid": "GPU-1",
    "total_bytes": 8_232_108_032,
}

LOAD = """
import ctypes, json, sys
from workers.nvml.fake import load
from workers.settings import FakeSensors
*libraries, fake = json.loads(sys.argv[1])
for library in libraries:
    ctypes.CDLL(library)
load(FakeSensors(**fake))
import pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetCount())
"""


def loaded(tmp_path: Path, fake: FakeSensors, *before: Path) -> subprocess.CompletedProcess[str]:
    """Load a fake NVML into a fresh interpreter that has loaded other libraries before."""
    fields = {"library_path": fake.library_path, "script_path": fake.script_path}
    return python("-c", LOAD, json.dumps([*map(str, before), fields]), cwd=tmp_path)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ({"cards": [], "speed": 2}, "speed: no such key; valid: about, driver, cuda_driver,"),
        ({}, "cards: field required"),
        ({"cards": 2}, "cards: input should be a valid list"),
        ({"cards": [CARD, {**CARD, "uuid": "1"}]}, "cards[1].uuid: string should match"),
        ({"cards": [CARD, CARD]}, "cards: two of them have the uuid GPU-1"),
        ({"cards": [CARD] * 17}, "cards: list should have at most 16 items"),
        *(({"cards": [{**CARD, **changes}]}, f"cards[0]{complaint}") for changes, complaint in (
            ({"fan": 40}, ".fan: no such key; did you mean fan_pct?"),
            ({"processes": [{"used_bytes": 1, "name": "x"}]},
             ".processes[0].name: no such key; valid: pid, used_bytes, under_mps"),
            ({"temperature_c": "60"}, ".temperature_c: a number or points [["),
            ({"temperature_c": True}, ".temperature_c: a number or points [["),
            ({"temperature_c": [[0, "60"]]}, ".temperature_c[0][1]: input should be a valid"),
            ({"temperature_c": -1}, ".temperature_c[0][1]: input should be greater than or"),
            ({"temperature_c": []}, ".temperature_c: list should have at least 1 item"),
            ({"temperature_c": [[0, 60], [9, 70], [9, 80]]},
             ".temperature_c: the point at 9 s does not come after the one at 9 s"),
            ({"throttle": [[0, ["HOT"]]]}, ".throttle[0][1]: 'HOT' is no reason to throttle; valid: IDLE,"),
            ({"throttle": [[0, [["HOT"]]]]}, ".throttle[0][1]: ['HOT'] is no reason to throttle"),
            ({"throttle": [[0, 4]]}, ".throttle[0][1]: a list of reasons is wanted"),
            ({"total_bytes": 10**400}, ".total_bytes: input should be less than or equal"),
            ({"fails": {"fan": "unknown"}}, ": fails: 'fan' is nothing that is asked for"),
            ({"fails": {"fan_pct": "broken"}}, ".fails.fan_pct: input should be 'not_supp"),
            ({"lost_after_calls": -1}, ".lost_after_calls: input should be greater than or"),
            ({"a": 1, "b": 2, "c": 3}, ".a: no such key"),
        )),
        ({"cards": [{**CARD, "a": 1, "b": 2, "c": 3}]}, "(and 2 more)"),
    ],
)  # fmt: skip
def test_a_bad_script_is_refused_in_one_line(
    tmp_path: Path, script: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "heat.json"
    path.write_text(json.dumps(script))
    with pytest.raises(FakeSensorsError) as refusal:
        read_script(path)
    assert complaint in str(refusal.value)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)
    assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)  # noqa: S301 - our own


def test_what_is_no_script_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    with pytest.raises(FakeSensorsError, match=r"heat.json cannot be read: No such file"):
        read_script(path)
    path.write_text('{\n  "cards": [,]\n}')
    with pytest.raises(FakeSensorsError, match=r"heat.json, line 2, column 13: Expecting value"):
        read_script(path)
    path.write_bytes(b'{"driver": "\xff"}')
    with pytest.raises(FakeSensorsError, match="no text in UTF-8"):
        read_script(path)
    path.write_text('{"cards": [{"name": "x", "uuid": "GPU-1", "total_bytes": 1, "fan_pct": NaN}]}')
    with pytest.raises(FakeSensorsError, match="fan_pct"):
        read_script(path)


def test_the_largest_script_is_understood_by_the_library(
    library_folder: Path, tmp_path: Path
) -> None:
    """The tables of the library are as large as the model allows, and its lines long enough."""
    points = [[at_s + 0.123456789, 1e16 / 3] for at_s in range(256)]
    curves = {
        "temperature_c": points,
        "power_w": points,
        "xids": [[at_s, 79] for at_s, _ in points],
    }
    processes = [{"pid": 2**31, "used_bytes": None} for _ in range(64)]
    cards = [
        {**CARD, "name": "x" * 95, "uuid": f"GPU-{i:080x}", **curves, "processes": processes}
        for i in range(16)
    ]
    missing = [f"nvml{'x' * 80}{i}" for i in range(64)]
    path = tmp_path / "large.json"
    path.write_text(json.dumps({"cards": cards, "missing_functions": missing, "driver": "9" * 80}))
    done = loaded(tmp_path, prepare(path, library_folder))
    assert (done.returncode, done.stdout) == (0, "16\n"), done.stderr


def test_the_source_has_nothing_a_compiler_would_warn_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -Wpedantic -Werror")
    assert build(tmp_path).exists()


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path)
    monkeypatch.setenv("CC", "false")  # would fail
    assert build(tmp_path) == first
    assert first.name == "libnvidia-ml.so.1"
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    with pytest.raises(FakeSensorsError, match=r"^false .*failed with exit code 1"):
        build(tmp_path / "elsewhere")


def test_without_a_compiler_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        FakeSensorsError,
        match=r"no C compiler: there is no cc, gcc, clang; install one .*apt install",
    ):
        build(tmp_path)
    monkeypatch.setenv("CC", "tcc -O")
    with pytest.raises(FakeSensorsError, match="CC names 'tcc', which is not there"):
        build(tmp_path)


def test_fake_sensors_travel_and_load_twice(heat: FakeSensors, tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(heat)) == heat  # noqa: S301 - our own
    done = loaded(tmp_path, heat, Path(heat.library_path))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_another_nvml_in_the_process_is_refused(heat: FakeSensors, tmp_path: Path) -> None:
    other = build(tmp_path / "other")
    done = loaded(tmp_path, heat, other)
    assert (
        "has loaded another libnvidia-ml.so.1 before the fake one" in done.stderr.splitlines()[-1]
    )


def test_what_was_prepared_and_is_gone_or_changed_is_refused(
    heat: FakeSensors, tmp_path: Path
) -> None:
    done = loaded(tmp_path, replace(heat, library_path=str(tmp_path / "nothing.so")))
    assert "the fake NVML cannot be loaded" in done.stderr.splitlines()[-1]
    done = loaded(tmp_path, replace(heat, script_path=str(tmp_path / "nothing")))
    assert done.stderr.splitlines()[-1].endswith("nothing cannot be opened; prepare it again")
    bad = tmp_path / "bad"
    bad.write_text("start_s 1.0\ncard GPU-1 x\ncurve noise_db lines 0.0 1.0\n")
    done = loaded(tmp_path, replace(heat, script_path=str(bad)))
    assert "bad is not understood in line 3" in done.stderr.splitlines()[-1]
