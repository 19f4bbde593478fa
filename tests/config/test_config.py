"""Loading, overriding and writing back cluster.yaml; and the table of cards."""

import json
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.config.gpu_specs import PROFILES, GpuProfile, match_profile
from orchestrator.config.load import config_from_data, config_from_text, dump_config, load_config
from orchestrator.config.schema import Config, NodeConfig
from tests.scene import ROOT
from workers.units import GIB

SHIPPED = str(ROOT / "cluster.yaml")

SMALL = {"nodes": {"pc1": {"gpu": "rtx-3090", "workers": 1, "vram_per_worker_gib": 1}}}


def sections(
    model: type[BaseModel], data: dict[str, Any]
) -> list[tuple[type[BaseModel], dict[str, Any]]]:
    """Return each section model with each of its mappings in `data`, the root included."""
    found = [(model, data)]
    for name, field in model.model_fields.items():
        inner = field.annotation
        if get_origin(inner) is dict:
            entry = get_args(inner)[1]
            found += [pair for value in data[name].values() for pair in sections(entry, value)]
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            found += sections(inner, data[name])
    return found


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section, keyed by their names in the file; `from` cannot be a name in
    Python.
    """
    return {field.alias or name: field for name, field in model.model_fields.items()}


def test_the_shipped_file_has_every_key_at_its_default() -> None:
    data = yaml.safe_load(Path(SHIPPED).read_text(encoding="utf-8"))
    for model, mapping in sections(Config, data):
        assert list(mapping) == list(keys_of(model)), model.__name__
        if model is NodeConfig:
            continue
        for name, field in keys_of(model).items():
            if field.default is not PydanticUndefined and not isinstance(field.default, BaseModel):
                assert mapping[name] == field.default, f"{model.__name__}.{name}"


def test_every_shipped_key_has_a_comment_above_it() -> None:
    lines = Path(SHIPPED).read_text(encoding="utf-8").splitlines()
    for model, _ in sections(Config, yaml.safe_load("\n".join(lines))):
        for name, field in keys_of(model).items():
            is_section = isinstance(field.default, BaseModel)
            if model is NodeConfig:  # a comment above all nodes explains its keys
                assert any(line.startswith(f"#   {name}: ") for line in lines), name
                continue
            starts = (f"{name}:", f"  {name}:")
            first = next(n for n, line in enumerate(lines) if line.startswith(starts))
            assert is_section or lines[first - 1].strip().startswith("#"), name


def test_node_keys_left_out_take_their_defaults() -> None:
    node = config_from_data(SMALL).nodes["pc1"]
    numbers = {"gpus": 1, "cpus_per_worker": 1, "gpu_share": 1.0, "memory_fraction": 0.9}
    unset = dict.fromkeys(
        ("size", "dtype", "vram_gib", "host", "team_listen", "power_limit_w", "memory_offset_mhz")
    )
    assert node.model_dump() == {**SMALL["nodes"]["pc1"], **numbers, **unset}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("workload.size=4096", ("workload", "size"), 4096),
        ("workload.size=", ("workload", "size"), None),
        ("workload={size: 64, batch: 2}", ("workload", "batch"), 2),
        ("run.duration=30s", ("run", "duration"), "30s"),
        ("thermal.hot_c=off", ("thermal", "hot_c"), None),
        ("thermal.hot_c='off'", ("thermal", "hot_c"), None),
        ("nodes.pc1.host=192.168.1.10", ("nodes", "pc1", "host"), "192.168.1.10"),
        (" run . dir = a=b ", ("run", "dir"), "a=b"),
        ("cluster.address=pc1:65535", ("cluster", "address"), "pc1:65535"),
        ("cluster.address='[fe80::1]:6379'", ("cluster", "address"), "[fe80::1]:6379"),
    ],
)
def test_an_override_changes_one_key(override: str, path: tuple[str, ...], value: object) -> None:
    data: Any = load_config(SHIPPED, [override]).model_dump()
    for key in path:
        data = data[key]
    assert data == value
    assert type(data) is type(value)


def test_of_two_overrides_the_later_wins() -> None:
    assert load_config(SHIPPED, ["workload.size=64", "workload.size=128"]).workload.size == 128
    assert load_config(SHIPPED, ["workload.size=64", "workload={batch: 1}"]).workload.size is None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def test_an_override_reaches_sections_left_out_and_names_with_dots(file: Path) -> None:
    nodes = {"pc1.lan.home": SMALL["nodes"]["pc1"]}
    file.write_text(yaml.safe_dump({"nodes": nodes}) + "run:\n", encoding="utf-8")
    overrides = ["run.duration=1", "memory.cleanup_every=0", "nodes.pc1.lan.home.workers=2"]
    config = load_config(str(file), overrides)
    assert (config.run.duration_s, config.memory.cleanup_every) == (60.0, 0)
    assert config.nodes["pc1.lan.home"].workers == 2


def test_a_byte_order_mark_and_windows_line_ends_are_no_trouble(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + yaml.safe_dump(SMALL).replace("\n", "\r\n").encode())
    assert load_config(str(file)) == config_from_data(SMALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": "cpu", "gpus": 0},
        {"gpu": "rtx-3090", "gpus": 0, "vram_per_worker_gib": 100},
        {"gpu": "RTX A6000", "vram_gib": 47.4},
        {"gpu": "rtx-3090", "vram_gib": 1.2},
        {"vram_per_worker_gib": 2**-10},
    ],
)
def test_nodes_that_are_allowed(changes: dict[str, object]) -> None:
    config_from_data({"nodes": {"pc1": {**SMALL["nodes"]["pc1"], **changes}}})


@pytest.mark.parametrize("name", ["a", "0", "no", "1.5", "pc-1", "pc_1.lan", "a" * 63])
def test_node_names_that_are_allowed(name: str) -> None:
    """Also without quotes, because every key is text."""
    config = config_from_text(f"nodes:\n  {name}: {SMALL['nodes']['pc1']}\n", "typed")
    assert list(config.nodes) == [name]


@pytest.mark.parametrize(
    "text", ["null", "yes", "1e3", "1234", "a: b #c", "- ", "1:30", "\u00fc '\""]
)
def test_text_like_another_value_is_read_again(text: str) -> None:
    config = load_config(SHIPPED, [f"run.dir={json.dumps(text)}", "memory.size_decay=1.0e-300"])
    assert config.run.dir == text
    assert config_from_text(dump_config(config), "again") == config


@pytest.mark.parametrize(
    ("name", "total_gib", "key"),
    [
        ("NVIDIA GeForce RTX 3070", None, "rtx-3070"),
        ("GeForce RTX 3070", None, "rtx-3070"),
        ("nvidia geforce rtx 3090", 24, "rtx-3090"),
        ("NVIDIA H100 80GB HBM3", None, "h100"),
        ("NVIDIA GeForce RTX 3060", 12, "rtx-3060"),
        ("NVIDIA GeForce RTX 3060", 8, None),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 3070 Ti", None, None),
        ("NVIDIA H100 PCIe", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("My RTX 3070", None, None),
        ("", None, None),
    ],
)
def test_a_live_name_finds_its_profile_and_no_other(
    name: str, total_gib: int | None, key: str | None
) -> None:
    found = match_profile(name, None if total_gib is None else total_gib * GIB)
    assert (found.key if found else None) == key


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.key)
def test_the_advice_fits_the_card_and_uses_it(profile: GpuProfile) -> None:
    for advice in filter(None, (profile.alone, profile.desktop)):
        node = NodeConfig(
            gpu=profile.key,
            workers=advice.workers,
            vram_per_worker_gib=advice.vram_per_worker_gib,
            memory_fraction=advice.memory_fraction,
        )
        assert node.overbooked is None
        # With a desktop, the 3070 guide leaves more memory free than a worker needs.
        if profile.key != "rtx-3070" or advice is profile.alone:
            assert node.model_copy(update={"workers": advice.workers + 1}).overbooked is not None
    if profile.desktop is not None:
        alone, desktop = profile.alone, profile.desktop
        assert desktop.memory_fraction < alone.memory_fraction
        held_gib = [each.workers * each.vram_per_worker_gib for each in (desktop, alone)]
        assert held_gib[0] < held_gib[1], "a desktop takes some, too"
