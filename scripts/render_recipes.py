"""Writes what `plan` says into each file of recipes/, and the comparison of cards into
docs/recipes.md.

    python scripts/render_recipes.py [--measured RUN_FOLDER ...] [--check]

`--measured` also takes the tokens a second of finished runs of a recipe into recipes/measured.json.
`--check` changes nothing, and exits with 1 if something is old. Does not measure: what no run has
told is computed from the card's data.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final

# The script stands beside the packages, not in them, and they need not be installed.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402 - found since now

from orchestrator.config.gpu_specs import PROFILES, match_profile, peak_tflops  # noqa: E402 - found since now
from workers.settings import ASSUMED_CONTEXT_BYTES  # noqa: E402 - found since now
from workers.training.settings import TrainSettings  # noqa: E402 - found since now
from workers.units import GIB  # noqa: E402 - found since now

FOLDER: Final = ROOT / "recipes"
PAGE: Final = ROOT / "docs" / "recipes.md"
MEASURED: Final = FOLDER / "measured.json"

#: What the guide of the RTX 3060 compares (its table "RTX 3060 vs Other GPUs"), in the order of
#: `CARDS`.
CARDS: Final = ("rtx-3060", "rtx-3090", "rtx-4090")
GUIDE: Final = {
    "batch x accumulation": ("3 x 4", "8 x 2", "12 x 1"),
    "states on the host": ("50 %", "optional", "none"),
    "20 epochs of its data": ("8 to 10 h", "4 to 5 h", "2 to 3 h"),
}
#: Its model and its effective batch; the share of a card that a training gets alone, as for the
#: 3060 and others.
_PRESET: Final = "gpt2-medium"
_BATCH: Final = 12
_SHARE: Final = 0.95

#: 24 layers of width 1024, 1024 tokens: each token is compared with half of them, forwards once and
#: backwards twice.
_ATTENTION_FLOP: Final = 6 * 24 * 1024 * 1024

#: Of the folders that recipes name, what transformers needs beside its own defaults: those of GPT-2
#: medium (Radford et al., 2019) and of Llama 3.2 1B.
MODELS: Final[Mapping[str, Mapping[str, object]]] = {
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "llama-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128_256, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
}  # fmt: skip

_PARTS: Final = ("weights", "gradients", "optimizer", "average", "activations", "workspace")
_BEGIN, _END = "<!-- made by scripts/render_recipes.py -->", "<!-- until here -->"


def plans_of(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the key `training` of `plan --json` for each recipe; two at once.

    Raises CalledProcessError.
    """

    def plan(path: Path) -> dict[str, Any]:
        keys = yaml.safe_load(path.read_text(encoding="utf-8")).get("train", {})
        instead = [
            f"--set=train.{key}={Path(folder, Path(keys[key]).name)}"
            for key in ("model", "data")
            if key in keys
        ]
        told = _python("-m", "orchestrator", "plan", "-c", str(path), "--json", *instead)
        training: dict[str, Any] = json.loads(told)["training"]
        return training

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        _stand_in(Path(folder))
        return list(pool.map(plan, paths))


def _stand_in(folder: Path) -> None:
    """Make what recipes name: models by config and tokenizer alone, as a plan reads no weights, a
    text, and a picture with 68 points.
    """
    import torch
    from PIL import Image
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    for name, config in MODELS.items():
        model = folder / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        Tokenizer(BPE({"<s>": 0}, [])).save(str(model / "tokenizer.json"))
        save_file({"none": torch.zeros(1)}, model / "model.safetensors")
    (folder / "text").mkdir()
    (folder / "text" / "some.txt").write_text("<s>" * 10_000, encoding="utf-8")
    faces = folder / "faces"
    faces.mkdir()
    Image.new("L", (64, 64)).save(faces / "0.png")
    names = ["file", *(f"{point}_{axis}" for point in range(68) for axis in "xy")]
    (faces / "points.csv").write_text(f"{','.join(names)}\n0.png{',0' * 136}\n", encoding="utf-8")


def sums_of(training: Mapping[str, Any]) -> list[str]:
    """Return a comment for each cap of a plan: the parts in GiB, their sum, and the cap.

    Raises ValueError.
    """
    lines = []
    if not training["caps"]:
        raise ValueError(training["not_planned"] or "no node has a worker")
    for cap in training["caps"]:
        if cap["verdict"] == "does_not_fit":
            raise ValueError(cap["sentence"])
        step = next(step for step in cap["steps"] if step["fits"])
        parts = " + ".join(
            f"{part} {step[f'{part}_bytes'] / GIB:.2f}" for part in _PARTS if step[f"{part}_bytes"]
        )
        total = f"{step['total_bytes'] / GIB:.2f} of {cap['cap_bytes'] / GIB:.2f} GiB"
        split = f"{step['micro_batch']} x {step['accumulation']} samples"
        split += ", all blocks recomputed" if 0 < step["memory_level"] == training["blocks"] else ""
        host = (
            f", {step['on_host_bytes'] / GIB:.2f} GiB in host memory"
            if step["on_host_bytes"]
            else ""
        )
        lines.append(f"# {', '.join(cap['nodes'])} with {split}{host}:\n#   {parts}\n#   = {total}")
    return lines


def with_sums(recipe: str, training: Mapping[str, Any]) -> str:
    """Return a recipe's text with the sums between `# plan:` and the next empty line."""
    sums = "\n".join(sums_of(training))
    return re.sub(r"(?m)^# plan:\n(#.*\n)*", lambda _: f"# plan:\n{sums}\n", recipe, count=1)


def planned_for_cards() -> dict[str, Any]:
    """Return the largest micro-batch of the guide's model on each card, and its parameters, in
    millions.
    """
    from workers.training.memory_plan import MemoryPlanner
    from workers.training.tasks import find_task

    settings = TrainSettings(preset=_PRESET, batch=_BATCH, precision="bf16")
    planner = MemoryPlanner(find_task(settings, 0), settings, on_card=True)
    parameters_m = planner.plan(1, 0).weights_bytes / 4e6

    @cache  # the cards ask for the same steps
    def total_bytes(micro: int, level: int) -> float:
        return float(planner.plan(micro, level).total_bytes)

    plans = {}
    for key in CARDS:
        cap_gib = round(_SHARE * PROFILES[key].shown_gib - ASSUMED_CONTEXT_BYTES / GIB, 2)
        for name, level in (("none", 0), ("all", planner.most_level)):
            micro = _largest_micro(total_bytes, level, cap_gib * GIB)
            plans[f"{key} {name}"] = {"micro": micro, "parameters_m": parameters_m}
    return plans


def _largest_micro(total_bytes: Callable[[int, int], float], level: int, cap_bytes: float) -> int:
    """Return the most samples at once that fit; 0: not even one does."""
    return bisect_right(
        range(1, _BATCH + 1), cap_bytes, key=lambda micro: total_bytes(micro, level)
    )


def comparison(
    plans: Mapping[str, Mapping[str, float]], measured: Sequence[Mapping[str, Any]]
) -> str:
    """Return the table.

    A figure is marked by where it comes from: guide, plan, measured, or the card's data.
    """
    flop = 6e6 * plans[f"{CARDS[0]} none"]["parameters_m"] + _ATTENTION_FLOP
    peaks = [peak_tflops(PROFILES[key], "bf16") or 0.0 for key in CARDS]
    rows = [
        ("memory that it shows, GiB", "card's data", *(f"{PROFILES[key].shown_gib:.2f}" for key in CARDS)),
        ("batch x accumulation", "guide", *GUIDE["batch x accumulation"]),
        (f"micro x accumulation of {_BATCH} that fits", "plan", *(_split(plans[f"{key} none"]) for key in CARDS)),
        ("with all blocks recomputed", "plan", *(_split(plans[f"{key} all"]) for key in CARDS)),
        ("states on the host", "guide", *GUIDE["states on the host"]),
        ("the same, needed for one sample", "plan", *(_states_needed(plans[f"{key} none"]) for key in CARDS)),
        ("bf16 peak, TFLOP/s", "card's data", *(f"{peak:.1f}" for peak in peaks)),
        ("tokens a second", "see each", *(_tokens(key, flop, measured) for key in CARDS)),
        ("20 epochs of its data", "guide", *GUIDE["20 epochs of its data"]),
        ("speed, of the 3060's", "card's data", *(f"{peak / peaks[0]:.1f}" for peak in peaks)),
    ]  # fmt: skip
    heads = (
        "GPT-2 medium, bf16",
        "from",
        *(PROFILES[key].product.removeprefix("NVIDIA GeForce ") for key in CARDS),
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))


def measured_in(folder: Path) -> list[dict[str, Any]]:
    """Return what a finished run measured on known cards: tokens a second of all workers of one
    card together.

    Raises:
        ValueError: The run did not train the table's model, or measured nothing on a card of the
            table.
    """
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if settings["workload"]["name"] != "train" or settings["train"]["preset"] != _PRESET:
        raise ValueError(f"{folder} did not train {_PRESET}; name a run that did")
    found: dict[str, dict[str, Any]] = {}
    for row in summary["workers"]:
        profile = match_profile(row["gpu_name"] or "", row["device_total_bytes"])
        if profile is not None and profile.key in CARDS and row["tokens_per_s"]:
            card = found.setdefault(
                row["gpu_uuid"],
                {"card": profile.key, "run": summary["run_id"], "tokens_per_s": 0.0},
            )
            card["tokens_per_s"] += row["tokens_per_s"]
    if not found:
        raise ValueError(f"{folder} has no tokens a second of {', '.join(CARDS)}")
    return list(found.values())


def _tokens(key: str, flop: float, measured: Sequence[Mapping[str, Any]]) -> str:
    known = [each for each in measured if each["card"] == key]
    if known:
        best = max(known, key=lambda each: float(each["tokens_per_s"]))
        return f"{best['tokens_per_s']:,.0f} (measured, run {best['run']})"
    return f"at most {(peak_tflops(PROFILES[key], 'bf16') or 0.0) * 1e12 / flop:,.0f} (card's data)"


def _split(plan: Mapping[str, float]) -> str:
    micro = int(plan["micro"])
    return f"{micro} x {-(-_BATCH // micro)}" if micro else "none fits"


def _states_needed(plan: Mapping[str, float]) -> str:
    return "none" if plan["micro"] else "some"


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise ValueError(f"{' '.join(arguments)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def rendered(measured: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Return the text of each file that this script writes."""
    recipes = sorted(FOLDER.glob("*.yaml"))
    with ThreadPoolExecutor(1) as pool:
        cards = pool.submit(planned_for_cards)
        texts = {
            path: with_sums(path.read_text(encoding="utf-8"), training)
            for path, training in zip(recipes, plans_of(recipes), strict=True)
        }
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        after = rest.partition(_END)[2]
        texts[PAGE] = f"{before}{_BEGIN}\n\n{comparison(cards.result(), measured)}\n\n{_END}{after}"
    return texts


def main() -> int:
    """Run the script and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Write the sums of recipes and the comparison of cards."
    )
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=(), help="folders of finished runs"
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1: something is old"
    )
    arguments = parser.parse_args()
    try:
        measured = json.loads(MEASURED.read_text(encoding="utf-8"))
        measured += [each for folder in arguments.measured for each in measured_in(folder)]
        texts = rendered(measured)
    except (OSError, KeyError, ValueError) as problem:
        print(f"render_recipes: {problem}", file=sys.stderr)
        return 2
    texts[MEASURED] = json.dumps(measured, indent=2) + "\n"
    old = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    for path in old:
        if arguments.check:
            print(f"{path.relative_to(ROOT)} is old: python scripts/render_recipes.py")
        else:
            path.write_text(texts[path], encoding="utf-8")
    return 1 if old and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
