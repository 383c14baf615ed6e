"""One dense decoder for Qwen3 (norms on queries and keys), Qwen2 (biases on q, k, v) and Llama.

Owns the order of computation and how the loaded parameters are used. Loads nothing (`weights.py` does), keeps no
KV cache and no state between forwards (the attention op does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine_core.model_config import ModelConfig
from engine_core.models.layers import AttentionOp, DecoderOps, RotaryTable, Rotation, TorchOps
from engine_core.ops.panels import Projection


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Projection
    """[T, H] to [T, (Hq + 2 Hkv) D]: queries, keys, values."""
    qk_norm: Tensor | None
    """[Hq + Hkv, D]."""
    out: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection


class DenseModel:
    """A loaded decoder. Shapes: T tokens of a ragged batch, H hidden, Hq and Hkv heads of dimension D."""

    def __init__(self, config: ModelConfig, parameters: dict[str, Tensor], ops: DecoderOps | None = None) -> None:
        """`parameters` are those of `weights.parameter_shapes(config)`, on one device and of one dtype.

        The mapping is emptied: a weight that a device keeps in a layout of its own is released at once.
        """
        self.config = config
        self._ops = ops if ops is not None else TorchOps()
        self._embedding = parameters.pop("embedding")
        self._head = self._ops.projection(self._embedding if config.tied else parameters.pop("head"), None)
        self._layers = [self._layer(parameters, f"layers.{index}.") for index in range(config.num_layers)]
        inputs = [parameters.pop(f"layers.{index}.input_norm") for index in range(config.num_layers)]
        self._norms = [*inputs, parameters.pop("final_norm")]
        """Norm `index` precedes layer `index`; the last one follows the last layer."""
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_position, self._embedding.device)

    def _layer(self, parameters: dict[str, Tensor], prefix: str) -> _Layer:
        def projection(name: str) -> Projection:
            return self._ops.projection(
                parameters.pop(f"{prefix}{name}.weight"), parameters.pop(f"{prefix}{name}.bias", None)
            )

        return _Layer(
            qkv=projection("qkv"),
            qk_norm=self._qk_norm(parameters, prefix) if self.config.qk_norm else None,
            out=projection("out"),
            post_norm=parameters.pop(prefix + "post_norm"),
            gate_up=projection("gate_up"),
            down=projection("down"),
        )

    def _qk_norm(self, parameters: dict[str, Tensor], prefix: str) -> Tensor:
        """The norm weights of queries and keys, one row a head, so that one call serves both."""
        q = parameters.pop(prefix + "q_norm").expand(self.config.num_heads, -1)
        k = parameters.pop(prefix + "k_norm").expand(self.config.num_kv_heads, -1)
        return torch.cat((q, k))

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attention: AttentionOp) -> Tensor:
        """Final hidden states [T, H] of tokens `ids` [T] at `positions` [T] (int32 or int64).

        `attention` knows which token belongs to which sequence and holds what came before.
        """
        eps, ops = self.config.rms_norm_eps, self._ops
        residual = functional.embedding(ids, self._embedding)
        rotation = self._rotary.at(positions, residual.dtype)
        hidden = ops.rms_norm(residual, self._norms[0], eps)
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, hidden, rotation)
            attended = layer.out(attention(index, q, k, v))
            hidden = ops.add_rms_norm(attended, residual, layer.post_norm, eps)
            expanded = layer.down(ops.silu_mul(layer.gate_up(hidden)))
            hidden = ops.add_rms_norm(expanded, residual, self._norms[index + 1], eps)
        return hidden

    def _qkv(self, layer: _Layer, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, Hq, D] and keys [T, Hkv, D], and values [T, Hkv, D]."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(hidden).view(-1, heads + 2 * kv_heads, self.config.head_dim)
        qk = self._ops.rotate(qkv[:, : heads + kv_heads], layer.qk_norm, self.config.rms_norm_eps, rotation)
        return qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocabulary] in float32 of hidden states [R, H]."""
        return self._head(hidden).float()
