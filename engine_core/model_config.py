"""A model folder's config.json and generation_config.json as plain data, in old and new spellings.

Owns what the engine core must know of a model without loading it: shape, context, eos ids, sampling defaults.
Imports no torch; refuses an architecture or a value that the decoder doesn't serve, naming it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError
from engine_core.request import SamplingDefaults

MAX_JSON_BYTES = 4 << 20
MOST = {"num_hidden_layers": 1024, "max_position_embeddings": 1 << 24}
MOST_ELSE = 1 << 24
"""Beyond any model; what is computed or allocated from these stays bounded."""
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: plain, Llama 3 scaled or YaRN scaled. Lengths in tokens."""

    theta: float
    kind: str = "default"
    """default, linear, llama3 or yarn."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    """As the checkpoint says: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    defaults: SamplingDefaults

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """KV cache bytes of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 4 MiB; raises ConfigError naming the file."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no regular file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_JSON_BYTES} bytes; this is no model configuration")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing; --model must name a folder with config.json and safetensors files"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return data


def _positive(data: dict[str, Any], name: str, default: int | None = None) -> int:
    value = data.get(name, default)
    most = MOST.get(name, MOST_ELSE)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        shown = repr(value)
        raise ConfigError(f"config.json: {name} is {shown[:40]}; it must be a positive integer, at most {most}")
    return value


def _real(data: dict[str, Any], name: str, default: float, low: float = 1e-30, high: float = 1e30) -> float:
    """A number from `low` to `high`; the bounds keep what is computed from it finite."""
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        shown = value if isinstance(value, float) or len(repr(value)) < 40 else "out of range"
        raise ConfigError(f"config.json: {name} is {shown!r}; it must be a number from {low:g} to {high:g}")
    return float(value)


def _token_ids(value: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    """Ids given as one number, a list or null."""
    items = [] if value is None else value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise ConfigError(f"{where}: {item!r} is no id of the vocabulary (0 to {vocab_size - 1})")
    return tuple(dict.fromkeys(items))


def _rope(data: dict[str, Any], max_position: int) -> RopeConfig:
    """`rope_parameters` (new) or `rope_theta` + `rope_scaling` (old)."""
    spec = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(spec, dict):
        raise ConfigError(f"config.json: rope_parameters is {spec!r}; it must be an object")
    theta = _real(spec, "rope_theta", _real(data, "rope_theta", 10000.0, 1.001), 1.001)
    kind = spec.get("rope_type", spec.get("type", "default")) or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"config.json: rope type {kind!r} is not served; default, linear, llama3 and yarn are")
    original = _positive(
        spec, "original_max_position_embeddings", data.get("original_max_position_embeddings", max_position)
    )

    def optional(name: str) -> float | None:
        return None if spec.get(name) is None else _real(spec, name, 1.0)

    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_real(spec, "factor", 1.0, 1e-3, 1e6),
        low_freq_factor=_real(spec, "low_freq_factor", 1.0),
        high_freq_factor=_real(spec, "high_freq_factor", 4.0),
        original_max_position=original,
        beta_fast=_real(spec, "beta_fast", 32.0, 1e-3, 1e6),
        beta_slow=_real(spec, "beta_slow", 1.0, 1e-3, 1e6),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(spec.get("truncate", True)),
    )


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """Sampling defaults of generation_config.json; `do_sample: false` there means nothing, as for other servers."""

    def real(name: str, fallback: float, low: float, high: float) -> float:
        value = generation.get(name)
        if value is None:
            return fallback
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigError(f"generation_config.json: {name} is {value!r}; it must be from {low:g} to {high:g}")
        return float(value)

    return SamplingDefaults(
        temperature=real("temperature", 1.0, 0.0, 100.0),
        top_p=real("top_p", 1.0, 1e-9, 1.0),
        top_k=max(0, int(real("top_k", 0, -1, 2**31 - 1))),
        min_p=real("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=real("repetition_penalty", 1.0, 1e-9, 100.0),
    )


def _served_architecture(data: dict[str, Any]) -> str:
    """The architecture's name, if the decoder computes what this configuration asks for."""
    names = data.get("architectures") or []
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: architecture {architecture!r} is not served; served are {', '.join(ARCHITECTURES)}"
        )
    if data.get("quantization_config"):
        raise ConfigError("config.json: quantized checkpoints are not served; use the float checkpoint")
    if data.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {data['hidden_act']!r} is not served; silu is")
    if data.get("use_sliding_window") and data.get("sliding_window"):
        raise ConfigError("config.json: sliding window attention is not served")
    return architecture


def load_model_config(folder: Path) -> ModelConfig:
    """Read and check a model folder's configuration. Raises ConfigError, naming file, field and remedy."""
    data = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    architecture = _served_architecture(data)
    heads = _positive(data, "num_attention_heads")
    hidden = _positive(data, "hidden_size")
    kv_heads = _positive(data, "num_key_value_heads", heads) if data.get("num_key_value_heads") is not None else heads
    head_dim = _positive(data, "head_dim") if data.get("head_dim") is not None else hidden // heads
    if heads % kv_heads:
        raise ConfigError(f"config.json: {heads} query heads can't share {kv_heads} key/value heads")
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim is {head_dim}; rotary embedding needs an even one")
    vocab = _positive(data, "vocab_size")
    max_position = _positive(data, "max_position_embeddings")
    dtype = data.get("dtype") or data.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"config.json: dtype {dtype!r} is not served; float32, bfloat16 and float16 are")
    attention_bias = bool(data.get("attention_bias", False))
    eos = _token_ids(generation.get("eos_token_id", data.get("eos_token_id")), vocab, "eos_token_id")
    bos = _token_ids(data.get("bos_token_id"), vocab, "bos_token_id")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=_positive(data, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive(data, "intermediate_size"),
        vocab_size=vocab,
        max_position=max_position,
        rms_norm_eps=_real(data, "rms_norm_eps", 1e-6),
        rope=_rope(data, max_position),
        tied=bool(data.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(data.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=dtype,
        eos_token_ids=eos,
        bos_token_id=bos[0] if bos else None,
        defaults=_defaults(generation),
    )
