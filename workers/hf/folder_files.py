"""Checks a Hugging Face folder without loading it: which files exist, and whether they are
complete.

Needs neither torch nor transformers, so that the head can use it. Reads only headers of weights.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, Final

from workers.training.errors import TaskError

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = "tokenizer.json"

_PICKLED: Final = {".bin", ".pt", ".pth", ".ckpt"}

#: Largest safetensors header that the format allows (safetensors/src/tensor.rs).
_LONGEST_HEADER_BYTES: Final = 100_000_000


def refused(path: object, what: str) -> TaskError:
    """Return the error for a folder, or for a file in it."""
    return TaskError(f"train.model: {path} {what}")


def check_folder(name: str) -> tuple[dict[str, Any], int]:
    """Check a folder's files; return the content of its config.json, and the number of weights.

    Raises:
        TaskError: A file is missing, cut off, pickled, or wants code of the folder to be run.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise refused(
            folder, f"is no folder on this machine; name one with {CONFIG}, {WEIGHTS}, {TOKENIZER}"
        )
    config = _json_of(folder / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise refused(folder / CONFIG, 'names no "model_type"; take the config of the model')
    for path in filter(Path.is_file, (folder / CONFIG, folder / "tokenizer_config.json")):
        if "auto_map" in _json_of(path):
            raise refused(
                path,
                'has an "auto_map": it wants code of the folder to be run (trust_remote_code), and '
                "none is; take a model whose code is in transformers",
            )
    count = sum(map(_check_weights, _weights_in(folder)))
    if not (folder / TOKENIZER).is_file():
        raise refused(
            folder, f"has no {TOKENIZER}; save it with AutoTokenizer, save_pretrained, or copy it"
        )
    _json_of(folder / TOKENIZER)
    return config, count


def _weights_in(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        parts = _json_of(folder / INDEX).get("weight_map")
        if not isinstance(parts, dict) or not parts:
            raise refused(folder / INDEX, 'has no "weight_map"; copy it again')
        return [folder / name for name in sorted(set(map(str, parts.values())))]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise refused(
            folder / pickled[0],
            "is pickled, and reading it would run code; save the model with save_pretrained, which "
            f"writes {WEIGHTS}",
        )
    raise refused(folder, f"has no {WEIGHTS}; copy it, or save the model with save_pretrained")


def _check_weights(path: Path) -> int:
    """Compare the header of a weights file with the file's size; return the number of weights."""
    try:
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 0 < length <= _LONGEST_HEADER_BYTES:
                raise refused(path, "is no file of safetensors; copy it again")
            header = json.loads(file.read(length))
        tensors = [tensor for key, tensor in header.items() if key[:2] != "__"]
        ends = [tensor["data_offsets"][1] for tensor in tensors]
        needed, has = 8 + length + max(ends, default=0), path.stat().st_size
        count: int = sum(math.prod(tensor["shape"]) for tensor in tensors)
    except OSError as failure:
        raise refused(path, f"cannot be read: {failure.strerror}") from failure
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise refused(path, "has a damaged header; copy it again") from failure
    if has != needed or not ends:
        raise refused(
            path, f"has {has} bytes, and its header declares {needed}: it is cut off; copy it again"
        )
    return count


def _json_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as failure:
        raise refused(path.parent, f"has no {path.name}; copy it from the model") from failure
    except OSError as failure:
        raise refused(path, f"cannot be read: {failure.strerror}") from failure
    except (ValueError, RecursionError) as failure:
        raise refused(path, f"is no JSON ({failure}); copy it again") from failure
    if not isinstance(content, dict):
        raise refused(path, f"holds a {type(content).__name__} and no JSON object; copy it again")
    return content
