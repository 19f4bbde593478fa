"""Writes the result of `plan` into each file of recipes/, and prints the files that it changed.

    python scripts/render_recipes.py

Does not measure: `plan` computes everything from the data of the cards.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

# The script is outside the packages, and the packages need not be installed.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402 - needs the sys.path entry above

from workers.units import GIB  # noqa: E402 - needs the sys.path entry above

FOLDER: Final = ROOT / "recipes"
#: Configurations of the model folders that recipes name, without the defaults of transformers:
#: GPT-2 medium (Radford et al., 2019) and Llama 3.2 1B.
MODELS: Final[Mapping[str, Mapping[str, object]]] = {
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "llama-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128_256, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
}  # fmt: skip

_PARTS: Final = ("weights", "gradients", "optimizer", "average", "activations", "workspace")


def plans_of(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the key `training` of `plan --json` for each recipe; two processes run at a time.

    Raises ValueError.
    """

    def plan(path: Path) -> dict[str, Any]:
        keys = yaml.safe_load(path.read_text(encoding="utf-8")).get("train", {})
        overrides = [
            f"--set=train.{key}={Path(folder, Path(keys[key]).name)}"
            for key in ("model", "data")
            if key in keys
        ]
        output = _python("-m", "orchestrator", "plan", "-c", str(path), "--json", *overrides)
        training: dict[str, Any] = json.loads(output)["training"]
        return training

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        _stand_in(Path(folder))
        return list(pool.map(plan, paths))


def _stand_in(folder: Path) -> None:
    """Make stand-ins for the files that recipes name: models without weights, a text, a picture."""
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
    """Return a comment for each cap of a plan: the memory parts in GiB, their sum, and the cap.

    Raises ValueError if nothing was planned or a cap is too small.
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
    """Return the text of a recipe with the new sums in the comment that begins with `# plan:`."""
    sums = "\n".join(sums_of(training))
    return re.sub(r"(?m)^# plan:\n(#.*\n)*", lambda _: f"# plan:\n{sums}\n", recipe, count=1)


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise ValueError(f"{' '.join(arguments)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def main() -> int:
    """Run the script and return its exit code."""
    paths = sorted(FOLDER.glob("*.yaml"))
    before = {path: path.read_text(encoding="utf-8") for path in paths}
    try:
        after = {
            path: with_sums(before[path], training)
            for path, training in zip(paths, plans_of(paths), strict=True)
        }
    except (KeyError, ValueError) as problem:
        print(f"render_recipes: {problem}", file=sys.stderr)
        return 2
    for path in (path for path in paths if after[path] != before[path]):
        path.write_text(after[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
