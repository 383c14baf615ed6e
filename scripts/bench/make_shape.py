"""Writes a model folder of a real Qwen3 shape without weights, to be served with `--load-format dummy`.

    python scripts/bench/make_shape.py {0.6b,4b,8b} FOLDER

The tokenizer is word-level (`t0 t1 …`), so that text prompts of an exact length are easy to make.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 151936
CONTEXT = 40960
BOS, EOS = 151643, 151645


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool


SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 3072, True),
    "4b": Shape(2560, 36, 32, 8, 9728, True),
    "8b": Shape(4096, 36, 32, 8, 12288, False),
}


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128,
        "intermediate_size": shape.intermediate,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }


def write(name: str, folder: Path) -> Path:
    """Write the folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": config(SHAPES[name]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "eos_token": f"t{EOS}",
            "pad_token": f"t{BOS}",
            "unk_token": "t0",
        },
        "generation_config.json": {"eos_token_id": EOS, "bos_token_id": BOS},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a model folder of a real shape without weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(write(options.shape, options.folder))
