"""Tiny Hugging Face folders of each family, with a tokenizer trained on the project's documents."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.scene import ROOT
from workers.hf.folder import transformers

NAMES = ("pad", "bos", "eos", "unk", "mask")
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

DECODER = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
}
ENCODER = {key: DECODER[key] for key in list(DECODER)[:4]} | {"max_position_embeddings": 130}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "llama": ("LlamaConfig", DECODER),
    "qwen3": ("Qwen3Config", DECODER),
    "gemma": ("GemmaConfig", DECODER),
    "mistral": ("MistralConfig", DECODER | {"sliding_window": 8}),
    "bert": ("BertConfig", ENCODER),
    "roberta": ("RobertaConfig", ENCODER),
    "t5": (
        "T5Config",
        {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
    ),
    "bart": (
        "BartConfig",
        {"d_model": 48, "max_position_embeddings": 128, "decoder_start_token_id": 2}
        | {
            f"{side}_{key}": size
            for side in ("encoder", "decoder")
            for key, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 96}.items()
        },
    ),
}


@cache
def tokenizer_json() -> str:
    """Return a byte-level tokenizer of 384 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))[:6]], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return str(made.to_str())


def make_folder(
    path: Path, family: str = "gpt2", *, head: str = "CausalLM", dtype: str = "float32", **keys: Any
) -> Path:
    """Write a folder with seeded random weights; `head` is the end of the auto class's name."""
    library = transformers()
    name, sizes = FAMILIES[family]
    config = getattr(library, name)(
        vocab_size=384, pad_token_id=0, bos_token_id=1, eos_token_id=2, **(sizes | keys)
    )
    torch.manual_seed(3)
    auto = library.AutoModel if head == "" else getattr(library, f"AutoModelFor{head}")
    auto.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(path)
    own = {f"{name}_token": token for name, token in zip(NAMES, SPECIAL, strict=True)}
    library.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()), chat_template=CHAT, **own
    ).save_pretrained(path)
    return path
