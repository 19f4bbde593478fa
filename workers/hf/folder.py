"""A model, its tokenizer and its configuration from a local folder, as transformers writes it.

The model is transformers' own, with its own names of weights. On tensors without data, as in a
memory plan, weights are created and not read.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from workers.hf.folder_files import CONFIG, check_folder, refused
from workers.oom import one_line
from workers.training.errors import TaskError, optional_library
from workers.training.settings import TrainSettings

#: Default limit of a sample in tokens, which fits on small cards.
_DEFAULT_SEQ: Final = 1024

#: More tokens than any model reads: with it a tokenizer says that it has no limit.
_NO_LIMIT: Final = 1_000_000

#: A model with more than this many times the weights of the files is another model.
_LARGEST_RATIO: Final = 1.5

#: Most names of weights in a message.
_MOST_NAMES: Final = 3

#: Suffixes of files that determine tokens: files of the tokenizer, and chat templates.
_TOKENIZER_SUFFIXES: Final = {".json", ".jinja", ".txt", ".model"}

AutoClass = Literal[
    "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM"
]


def transformers() -> ModuleType:
    """Import transformers, in offline mode.

    Raises:
        TaskError: It is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forked
    need = "the presets hf-causal and hf-pairs need transformers"
    library = optional_library("transformers", need)
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def load_code(folder: str) -> None:
    """Import what the model of a folder needs.

    Raises:
        Exception: It cannot be imported; `ModelFolder` reports why.
    """
    library = transformers()
    config = library.AutoConfig.from_pretrained(Path(folder).expanduser())
    for auto in (getattr(library, name) for name in get_args(AutoClass)):
        if type(config) in auto._model_mapping:
            auto._model_mapping[type(config)]
    library.AutoTokenizer, library.PreTrainedTokenizerFast  # noqa: B018 - imported when named


class ModelFolder:
    """A checked model folder; `model` makes its model."""

    def __init__(self, settings: TrainSettings, auto_class: AutoClass, **changes: object) -> None:
        """Read configuration and tokenizer.

        Args:
            settings: The section `train:`.
            auto_class: The class of transformers that makes the model.
            changes: Changes of the configuration.

        Raises:
            TaskError: The folder cannot be used, or transformers is missing.
        """
        self.path = Path(str(settings.model)).expanduser()
        content, self._stored = check_folder(str(self.path))
        kind = content["model_type"]
        library = transformers()
        if kind not in library.CONFIG_MAPPING:
            raise refused(
                self.path / CONFIG,
                f"is of a {kind!r}, which transformers {library.__version__} does not know; "
                "install a newer one, or take another model",
            )
        self._auto = getattr(library, auto_class)
        try:
            config = library.AutoConfig.from_pretrained(self.path, local_files_only=True, **changes)
            self.tokenizer = library.AutoTokenizer.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise refused(self.path, f"cannot be loaded: {one_line(error)}") from error
        self.config = config.get_text_config() if hasattr(config, "get_text_config") else config
        if type(self.config) not in self._auto._model_mapping:
            raise refused(
                self.path / CONFIG,
                f"is of a {kind}, which transformers has no {auto_class.removeprefix('Auto')} for; "
                "take another preset or another model",
            )
        if len(self.tokenizer) > self.config.vocab_size:
            raise refused(
                self.path,
                f"has a tokenizer of {len(self.tokenizer)} tokens, and the model knows "
                f"{self.config.vocab_size}; take the tokenizer of this model, or call "
                "model.resize_token_embeddings(len(tokenizer)) and save the folder again",
            )
        self._dtype: Any = "auto" if settings.weights == "as-stored" else torch.float32
        self._quantised = _nf4(settings, library) if settings.weights == "nf4" else {}
        self._change_config(settings)
        self.seq = self._seq_of(settings)
        self.notes = tuple(self._notes(settings))
        self.tokenizer_version = self._tokenizer_version(library)
        """Changes whenever its tokens, or the texts of a chat, may change."""

    def model(self) -> nn.Module:
        """Make the model with the folder's weights; on tensors without data none are read.

        Raises:
            TaskError: The weights are of another model, or not finite.
        """
        _use_fast_kernels()
        if isinstance(torch.empty(0), FakeTensor):
            dtype = self._stored_dtype() if self._dtype == "auto" else self._dtype
            # Without data transformers cannot detect that no row holds several documents, and would
            # plan a mask and copies that a training does not need.
            masks = importlib.import_module("transformers.masking_utils")
            masks.find_packed_sequence_indices = lambda _: None  # type: ignore[attr-defined]
            model = self._auto.from_config(self.config, dtype=dtype)
            if self._quantised:
                _to_4_bits_without_data(model, self._quantised["quantization_config"])
            return _without_attention_dropout(model)
        with torch.device("meta"):
            body = getattr(self._auto.from_config(self.config), "base_model")  # noqa: B009 - Any
        needed = _count_weights(body)
        if needed > _LARGEST_RATIO * self._stored:  # before missing weights are allocated
            raise refused(
                self.path,
                f"holds {self._stored:,} weights, and its config declares {needed:,}; "
                "config and weights are of two models",
            )
        try:
            model, loaded = self._auto.from_pretrained(
                self.path,
                config=self.config,
                dtype=self._dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **self._quantised,
            )
        except (MemoryError, RuntimeError):
            raise  # perhaps out of memory, which callers handle
        except Exception as error:
            raise refused(self.path, f"cannot be loaded: {one_line(error)}") from error
        self._refuse_wrong_weights(model, loaded)
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # Otherwise bitsandbytes evaluates in bf16 with another kernel than it trains with,
                # which refuses most shapes.
                module.support_avx512bf16_for_cpu = False
        return _without_attention_dropout(model)

    def _refuse_wrong_weights(self, model: nn.Module, loaded: Mapping[str, Any]) -> None:
        """Refuse weights that are not of this model. A head may be fresh."""
        fresh = {
            f"{name}.{weight}"
            for name, module in model.named_modules()
            if module in heads_of(model)
            for weight in module.state_dict()
        }
        missing = {str(name) for name in loaded["missing_keys"]}
        other = {str(key if isinstance(key, str) else key[0]) for key in loaded["mismatched_keys"]}
        if lacking := sorted((missing | other) - fresh):
            raise refused(
                self.path,
                f"has no weights that fit {', '.join(lacking[:_MOST_NAMES])} ({len(lacking)} of "
                f"{len(model.state_dict())} of {type(model).__name__}); config and weights are of "
                "two models",
            )
        for name, weight in model.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise refused(self.path, f"has NaN or infinite weights in {name}; copy it again")

    def _change_config(self, settings: TrainSettings) -> None:
        config = self.config
        config.use_cache = False
        for key, value in config.to_dict().items():
            if "drop" in key and isinstance(value, int | float) and not isinstance(value, bool):
                # Dropout inside attention, and the choice of skipped layers, would draw from
                # torch's own random numbers.
                is_own = "att" in key or "layerdrop" in key
                setattr(config, key, 0.0 if is_own else settings.dropout)
        if config.pad_token_id is None:
            ends = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
            config.pad_token_id = next(token for token in ends if token is not None)

    def _seq_of(self, settings: TrainSettings) -> int:
        most = getattr(self.config, "max_position_embeddings", None) or _NO_LIMIT
        if "roberta" in self.config.model_type or self.config.model_type == "camembert":
            most -= self.config.pad_token_id + 1  # positions begin after that of padding
        most = min(most, self.tokenizer.model_max_length or _NO_LIMIT)
        if settings.seq is not None and settings.seq > most:
            raise TaskError(
                f"train.seq is {settings.seq}, and the model of {self.path} reads at most {most} "
                "tokens"
            )
        return settings.seq or min(most, _DEFAULT_SEQ)

    def _tokenizer_version(self, library: ModuleType) -> str:
        digest = hashlib.blake2b(library.__version__.encode(), digest_size=16)
        for path in sorted(self.path.iterdir()):
            if path.suffix in _TOKENIZER_SUFFIXES and path.is_file():
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
        return digest.hexdigest()

    def _stored_dtype(self) -> torch.dtype:
        dtype = self.config.dtype or torch.float32
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))

    def _notes(self, settings: TrainSettings) -> Sequence[str]:
        dtype = self._stored_dtype()
        if settings.weights != "as-stored" or dtype == torch.float32:
            return ()
        sentence = (
            f"train.weights: as-stored trains weights in {str(dtype).removeprefix('torch.')}, "
            "where small updates are rounded away: at a learning rate of 1e-5, 14 % of bf16 "
            "weights moved against 95 % of fp32 ones; set train.weights to fp32"
        )
        return (sentence,)


def _nf4(settings: TrainSettings, library: ModuleType) -> dict[str, Any]:
    """Return the arguments that load weights in 4 bits (QLoRA, Dettmers et al., 2023).

    Raises:
        TaskError: bitsandbytes cannot be used here.
    """
    try:
        importlib.import_module("bitsandbytes")
    except Exception as error:
        raise TaskError(
            f"train.weights is nf4, and bitsandbytes cannot be used here ({one_line(error)}); "
            "pip install 'bitsandbytes>=0.50' there, or set train.weights: fp32"
        ) from error
    computed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision)
    config = library.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=computed or torch.float32,
    )
    # Without a map transformers uses the card by itself, before memory is counted.
    return {"quantization_config": config, "device_map": {"": "cpu"}}


def _itself(module: nn.Module, _: object) -> nn.Module:
    return module


@torch.no_grad()
def _to_4_bits_without_data(model: Any, config: Any) -> None:  # noqa: ANN401 - transformers'
    """Give a model on tensors without data the 4-bit layers that it has with data."""
    layers = importlib.import_module("transformers.integrations.bitsandbytes")
    base = importlib.import_module("transformers.quantizers.base")
    functional = importlib.import_module("bitsandbytes.functional")
    before = dict(model.named_parameters())
    with unset_fake_temporarily():  # a tensor without data cannot become one of their type
        layers.replace_with_bnb_linear(model, base.get_keys_to_not_convert(model), config)
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if not hasattr(weight, "quant_state"):
            continue
        own = before[f"{name}.weight"]
        own = own if own.shape == (module.out_features, module.in_features) else own.T.contiguous()
        data, state = functional.quantize_4bit(
            own, blocksize=weight.blocksize, compress_statistics=False, quant_type=weight.quant_type
        )
        packed: Any = nn.Parameter(data, requires_grad=False)
        packed.quant_state, packed.bnb_quantized = state, True
        for key in ("blocksize", "compress_statistics", "quant_type", "quant_storage"):
            setattr(packed, key, getattr(weight, key))
        module._parameters["weight"] = packed
        # peft's DoRA copies the layer, and copying tensors without data crashes the process.
        module.__deepcopy__ = partial(_itself, module)
        if module.bias is not None:
            module._parameters["bias"] = before[f"{name}.bias"]
    model.is_loaded_in_4bit = True  # peft chooses its layers by this


def _use_fast_kernels() -> None:
    """Make transformers repeat the keys that heads share if they are in fp32.

    For shared keys in fp32 a card has only the plain kernel, whose memory grows with the square of
    the length (torch, scaled_dot_product_attention, `enable_gqa`). The plan does not count it.
    """
    attention = importlib.import_module("transformers.integrations.sdpa_attention")
    usual = getattr(attention, "use_gqa_in_sdpa", None)
    if usual is None or usual.__module__ == __name__:
        return

    def use_gqa_in_sdpa(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
        is_narrow = key.dtype != torch.float32 or torch.is_autocast_enabled(key.device.type)
        return is_narrow and bool(usual(mask, key, value))

    vars(attention)["use_gqa_in_sdpa"] = use_gqa_in_sdpa


def _without_attention_dropout(model: nn.Module) -> nn.Module:
    """Disable attention dropout in models that have one dropout for all layers, such as T5."""
    for module in model.modules():
        if (
            "attention" in type(module).__name__.lower()
            and type(vars(module).get("dropout")) is float
        ):
            module.dropout = 0.0  # type: ignore[assignment]  # a number, and no module
    return model


def heads_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules outside the body of a model, and poolers: those that may be fresh."""
    body = getattr(model, "base_model", model)
    outside = [child for child in model.children() if child is not body]
    if body is model:  # such as T5, whose encoder and decoder are in no module of their own
        outside = [child for child in outside if isinstance(child, nn.Linear)]
    return outside + [module for name, module in model.named_modules() if name.endswith("pooler")]


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules of the largest ModuleList; for an encoder and a decoder, of both."""
    both = [
        module for name, module in model.named_modules() if name.endswith(("encoder", "decoder"))
    ]
    roots = both if len(both) == 2 else [model]
    lists = [
        [module for module in root.modules() if isinstance(module, nn.ModuleList)] for root in roots
    ]
    return [block for some in lists for block in max(some, key=_count_weights, default=[])]


def _count_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
