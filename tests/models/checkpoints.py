"""Random tiny checkpoints of the served architectures, written by transformers, and forwards over them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine_core.model_config import ModelConfig, load_model_config
from engine_core.models.dense import DenseModel
from engine_core.models.weights import load_model
from engine_core.ops.attention import CpuAttention, PagedKV

CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
VOCAB: int = SHAPE["vocab_size"]


@dataclass(frozen=True)
class Recipe:
    """One random checkpoint."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    old_spelling: bool = False
    dtype: torch.dtype = torch.float32
    shard_size: str = "1GB"


def build(recipe: Recipe, folder: Path) -> PreTrainedModel:
    """Write the checkpoint and return transformers' own model of it, in float32 and with every parameter perturbed.

    Norm weights and biases start constant: without the perturbation, ignoring them would go unnoticed.
    """
    config_class, model_class = CLASSES[recipe.family]
    shape = {**SHAPE, **recipe.changes}
    if recipe.family == "qwen2":
        shape.pop("head_dim")
        shape["hidden_size"] = 192
    torch.manual_seed(11)
    model = model_class(config_class(**shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
    model.to(recipe.dtype).save_pretrained(folder, max_shard_size=recipe.shard_size)
    reference: PreTrainedModel = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    if recipe.old_spelling:
        _respell(folder / "config.json")
    return reference


def _respell(path: Path) -> None:
    """config.json as transformers before version 5 wrote it."""
    data = json.loads(path.read_text())
    rope = data.pop("rope_parameters")
    data["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    data["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    data["torch_dtype"] = data.pop("dtype")
    path.write_text(json.dumps(data))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, DenseModel]:
    config = load_model_config(folder)
    model = load_model(
        folder, config, dtype=dtype, device=torch.device("cpu"), load_format="auto", progress=lambda *_: None
    )
    return config, model


class Rows:
    """Sequences in a paged cache of scattered pages, fed to a model chunk by chunk."""

    def __init__(self, config: ModelConfig, model: DenseModel, count: int, *, page: int = 4, seed: int = 0) -> None:
        pages = -(-config.max_position // page)
        order = np.random.default_rng(seed).permutation(count * pages).astype(np.int32)
        self.tables = order.reshape(count, pages)
        self.lengths = np.zeros(count, np.int32)
        self._model = model
        self.kv = PagedKV(
            num_layers=config.num_layers,
            total_pages=count * pages,
            page_size=page,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
        )
        self.attention = CpuAttention(self.kv, config.head_dim**-0.5)

    def feed(self, chunks: dict[int, npt.NDArray[np.int64]]) -> dict[int, Tensor]:
        """Append ids to rows in one forward; logits [len, V] of each row's new tokens."""
        rows = np.array(list(chunks), np.int64)
        lengths = np.array([len(ids) for ids in chunks.values()], np.int32)
        starts = self.lengths[rows]
        self.attention.begin(self.tables[rows], starts, lengths)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        ids = np.concatenate(list(chunks.values()))
        hidden = self._model.forward(torch.from_numpy(ids), torch.from_numpy(positions), self.attention)
        self.lengths[rows] += lengths
        parts = torch.split_with_sizes(self._model.logits(hidden), lengths.tolist())
        return dict(zip(chunks, parts, strict=True))


def random_ids(count: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def expected_logits(model: PreTrainedModel, ids: npt.NDArray[np.int64]) -> Tensor:
    """transformers' logits [len, V] of one sequence."""
    with torch.inference_mode():
        logits: Tensor = model(torch.from_numpy(ids)[None]).logits[0]
    return logits
