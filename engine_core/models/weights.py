"""Checkpoints into parameters: streamed safetensors, checked from their headers before anything is allocated.

Owns the names of checkpoint tensors and how they are fused (q, k, v into one matrix; gate and up into one). Reads
safetensors only; nothing in a model folder is executed. Every complaint is a ConfigError that names the file, the
tensor, what was expected and what was found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine_core.errors import ConfigError
from engine_core.model_config import ModelConfig
from engine_core.models.dense import DenseModel
from engine_core.models.layers import DecoderOps
from engine_core.models.safetensors_file import Shard, open_shards

Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)."""
Shape = tuple[int, ...]

BLOCK_BYTES = 16 << 20
"""Read at once; bounds the memory that loading needs beyond the parameters themselves."""
DUMMY_STD = 0.02
DUMMY_NOISE = 4_194_301
"""Length of the noise that dummy weights repeat. A prime, so that no row of a matrix equals another."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a checkpoint tensor goes: rows row .. row + shape[0] of a parameter."""

    parameter: str
    row: int
    shape: Shape


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every parameter that `DenseModel` takes."""
    shapes: dict[str, Shape] = {}
    for target in checkpoint_targets(config).values():
        rows = target.row + target.shape[0]
        known = shapes.get(target.parameter, (0,))
        shapes[target.parameter] = (max(rows, known[0]), *target.shape[1:])
    return shapes


def checkpoint_targets(config: ModelConfig) -> dict[str, _Target]:
    """What each tensor of a transformers-style checkpoint must look like and where it goes."""
    hidden, vocab = config.hidden_size, config.vocab_size
    targets = {
        "model.embed_tokens.weight": _Target("embedding", 0, (vocab, hidden)),
        "model.norm.weight": _Target("final_norm", 0, (hidden,)),
    }
    if not config.tied:
        targets["lm_head.weight"] = _Target("head", 0, (vocab, hidden))
    for index in range(config.num_layers):
        for name, target in _layer_targets(config, f"layers.{index}."):
            targets[f"model.layers.{index}.{name}"] = target
    return targets


def _layer_targets(config: ModelConfig, prefix: str) -> Iterator[tuple[str, _Target]]:
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * width, config.num_kv_heads * width
    projections = (
        ("self_attn.q_proj", "qkv", 0, q, hidden, config.qkv_bias),
        ("self_attn.k_proj", "qkv", q, kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", "qkv", q + kv, kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", "out", 0, hidden, q, config.o_bias),
        ("mlp.gate_proj", "gate_up", 0, inner, hidden, config.mlp_bias),
        ("mlp.up_proj", "gate_up", inner, inner, hidden, config.mlp_bias),
        ("mlp.down_proj", "down", 0, hidden, inner, config.mlp_bias),
    )
    for name, parameter, row, rows, columns, bias in projections:
        yield f"{name}.weight", _Target(f"{prefix}{parameter}.weight", row, (rows, columns))
        if bias:
            yield f"{name}.bias", _Target(f"{prefix}{parameter}.bias", row, (rows,))
    yield "input_layernorm.weight", _Target(prefix + "input_norm", 0, (hidden,))
    yield "post_attention_layernorm.weight", _Target(prefix + "post_norm", 0, (hidden,))
    if config.qk_norm:
        yield "self_attn.q_norm.weight", _Target(prefix + "q_norm", 0, (width,))
        yield "self_attn.k_norm.weight", _Target(prefix + "k_norm", 0, (width,))


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    progress: Progress,
    ops: DecoderOps | None = None,
) -> DenseModel:
    """The model in `folder` on `device`, every floating tensor cast to `dtype`.

    Raises ConfigError for a checkpoint that isn't exactly what the configuration says.
    """
    parameters = load_parameters(folder, config, dtype=dtype, device=device, load_format=load_format, progress=progress)
    return DenseModel(config, parameters, ops)


def load_parameters(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    progress: Progress,
) -> dict[str, Tensor]:
    """The parameters of `parameter_shapes`, on `device`, cast to `dtype`.

    `load_format` is auto or safetensors (the folder's checkpoint), or dummy (random weights of the right shapes; no
    checkpoint is looked for). Raises ConfigError.
    """
    if load_format == "dummy":
        return dummy_parameters(config, dtype, device, progress)
    return _load(open_shards(folder), checkpoint_targets(config), config, dtype, device, progress)


# ------------------------------ checkpoints


def check_checkpoint(folder: Path, config: ModelConfig) -> None:
    """The files' headers, sizes, names and shapes, without their values. Raises ConfigError."""
    _check(open_shards(folder), checkpoint_targets(config), config)


def _load(
    shards: list[Shard],
    targets: Mapping[str, _Target],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> dict[str, Tensor]:
    _check(shards, targets, config)
    parameters = {
        name: torch.empty(shape, dtype=dtype, device=device) for name, shape in parameter_shapes(config).items()
    }
    total = sum(stored.size for shard in shards for name, stored in shard.tensors.items() if name in targets)
    done = 0
    scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    for shard in shards:
        with shard.path.open("rb") as file:
            for name, stored in sorted(shard.tensors.items(), key=lambda item: item[1].offset):
                if name not in targets:
                    continue
                target = targets[name]
                rows = parameters[target.parameter][target.row : target.row + target.shape[0]]
                for size in stored.read_into(file, rows.view(-1), scratch, f"{shard.path}: tensor {name}"):
                    done += size
                    progress("load weights", done, total)
    return parameters


def _check(shards: list[Shard], targets: Mapping[str, _Target], config: ModelConfig) -> None:
    """Every expected tensor, of the expected shape, and no other. (Each is in one shard: `open_shards` saw to it.)"""
    found = {name: (shard.path, stored) for shard in shards for name, stored in shard.tensors.items()}
    missing = [name for name in targets if name not in found]
    if missing:
        raise ConfigError(
            f"{shards[0].path.parent}: {len(missing)} tensors are missing from the checkpoint, first {missing[0]} of "
            f"shape {list(targets[missing[0]].shape)}; {config.architecture} with this config.json needs it"
        )
    for name, (path, stored) in found.items():
        if name in targets:
            _check_shape(path, name, stored.shape, targets[name].shape)
        elif name == "lm_head.weight" and config.tied:
            # Some tied checkpoints carry the embedding a second time; it is checked, then left out.
            _check_shape(path, name, stored.shape, (config.vocab_size, config.hidden_size))
        elif not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(
                f"{path}: tensor {name} of shape {list(stored.shape)} is not part of {config.architecture} with this "
                "config.json; the checkpoint and its config.json don't belong together"
            )


def _check_shape(path: Path, name: str, found: Shape, expected: Shape) -> None:
    if found != expected:
        raise ConfigError(f"{path}: tensor {name} has shape {list(found)}; config.json makes it {list(expected)}")


# ------------------------------ weights without a checkpoint


def dummy_parameters(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> dict[str, Tensor]:
    """Random parameters, the same on every run: matrices of deviation 0.02, norms around 1, small biases.

    Slices of one block of noise are repeated, which costs a memory copy instead of a normal draw per element.
    """
    noise = torch.randn(DUMMY_NOISE, generator=torch.Generator().manual_seed(0)).mul_(DUMMY_STD)
    blocks = {False: noise.to(device, dtype), True: (1 + 5 * noise).to(device, dtype)}
    shapes = parameter_shapes(config)
    total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
    done = 0
    parameters: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        parameter = torch.empty(shape, dtype=dtype, device=device)
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % DUMMY_NOISE
        _repeat(blocks[name.endswith("norm")], start, parameter.view(-1))
        parameters[name] = parameter
        done += parameter.nbytes
        progress("make dummy weights", done, total)
    return parameters


def _repeat(block: Tensor, start: int, out: Tensor) -> None:
    """Fill `out` with `block`, from `start` on and over again."""
    filled = 0
    while filled < len(out):
        count = min(len(out) - filled, len(block) - start)
        out[filled : filled + count] = block[start : start + count]
        filled += count
        start = 0
