"""The dense decoder on the GPU: which kernel computes what, for few rows, many rows and ragged chunks.

Owns the order of launches over loaded parameters. Up to FEW_ROWS decode rows a layer is six fused launches; beyond,
stream-K multiplies decode rows up to a few dozen, cuBLASLt all else, and the small kernels do the rest. Keeps no state
between calls; allocates only temporaries, so that a captured call lives in its graph's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.model_config import ModelConfig
from engine_core.ops.cuda.kernel import Kernels
from engine_core.ops.cuda.layer import AddRmsNorm, EmbedLast, Heads, RopeAndStore, SiluMul
from engine_core.ops.cuda.linear import Epilogue, LinearWeights, SkinnyLinear
from engine_core.ops.cuda.matmul import Multiply
from engine_core.ops.cuda.streamk import StreamKLinear, streams

FEW_ROWS = 8
"""Decode rows of which a layer is six launches, norms, gate and adds within its products."""

Attend = Callable[[Tensor, Tensor, Tensor], None]
"""(qkv [rows, heads, D], the layer's KV pool, out [rows, query heads, D]): attention, KV already written."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices of one shape, one of each layer that has it."""

    matrices: list[Tensor]
    biases: list[Tensor] | None = None
    wide: bool = False
    """Products with them are float32."""
    streamed: list[StreamKLinear] | None = None
    """What multiplies by them for few rows."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of a forward whose final states are asked for: P of T."""

    tokens: Tensor
    """int64 [P]: their places."""
    plan: Callable[[], None]
    """What `attend` needs to have been launched, with others behind it."""
    attend: Attend
    """For these tokens' rows alone; what it leaves unwritten of `out` stays zero."""
    states: Tensor
    """bf16 [P, H]: where they go."""


@dataclass(frozen=True, slots=True)
class _Few:
    """A layer's products for up to FEW_ROWS rows, with what surrounds them."""

    qkv: SkinnyLinear
    out: SkinnyLinear
    gate_up: SkinnyLinear
    down: SkinnyLinear


@dataclass(frozen=True, slots=True)
class _Streamed:
    """A layer's products for the rows that `streams` names."""

    qkv: StreamKLinear
    out: StreamKLinear
    gate_up: StreamKLinear
    down: StreamKLinear


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    few: _Few
    streamed: _Streamed


class CudaDecoder:
    """bf16 parameters and KV on one device. Shapes: T tokens, H hidden, V vocabulary."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, Tensor],
        kernels: Kernels,
        heads: Heads,
        rope: Tensor,
        page_table: Tensor,
    ) -> None:
        """`rope`: see layer.rope_table; `page_table`: int32 [slots, pages a sequence]."""
        self._config = config
        self._heads = heads
        self._rope = rope
        self._page_table = page_table
        self.embedding = parameters["embedding"]
        self._final_norm = parameters["final_norm"]
        self._head = parameters["embedding" if config.tied else "head"]
        self._layers = [self._layer(parameters, f"layers.{i}.", kernels) for i in range(config.num_layers)]
        self._few_head = SkinnyLinear(
            LinearWeights(self._head, norm=self._final_norm, epsilon=config.rms_norm_eps, wide=True), kernels
        )
        self._streamed_head = StreamKLinear(self._head, kernels, whole=True)
        self._embed_last = EmbedLast(kernels)
        self._add_norm = AddRmsNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self._silu_mul = SiluMul(kernels)
        self._rope_and_store = RopeAndStore(heads, config.rms_norm_eps, kernels, qk_norm=config.qk_norm)

    def _layer(self, parameters: Mapping[str, Tensor], prefix: str, kernels: Kernels) -> _Layer:
        def given(name: str) -> Tensor:
            return parameters[prefix + name]

        epsilon = self._config.rms_norm_eps
        bias = parameters.get(prefix + "qkv.bias")
        few = _Few(
            qkv=SkinnyLinear(
                LinearWeights(given("qkv.weight"), norm=given("input_norm"), epsilon=epsilon, bias=bias), kernels
            ),
            out=SkinnyLinear(LinearWeights(given("out.weight"), Epilogue.ADD), kernels),
            gate_up=SkinnyLinear(
                LinearWeights(given("gate_up.weight"), Epilogue.GATED, given("post_norm"), epsilon), kernels
            ),
            down=SkinnyLinear(LinearWeights(given("down.weight"), Epilogue.ADD), kernels),
        )
        return _Layer(
            input_norm=given("input_norm"),
            qkv=given("qkv.weight"),
            qkv_bias=bias,
            norms=(given("q_norm"), given("k_norm")) if self._config.qk_norm else None,
            out=given("out.weight"),
            post_norm=given("post_norm"),
            gate_up=given("gate_up.weight"),
            down=given("down.weight"),
            few=few,
            streamed=_Streamed(
                *(StreamKLinear(given(f"{name}.weight"), kernels) for name in ("qkv", "out", "gate_up", "down"))
            ),
        )

    def weights(self) -> list[Weights]:
        """Of the layers' products; the head's are `head_weights`."""
        layers = self._layers
        streamed = [layer.streamed for layer in layers]
        biases = [layer.qkv_bias for layer in layers if layer.qkv_bias is not None]
        return [
            Weights([layer.qkv for layer in layers], biases or None, streamed=[each.qkv for each in streamed]),
            Weights([layer.out for layer in layers], streamed=[each.out for each in streamed]),
            Weights([layer.gate_up for layer in layers], streamed=[each.gate_up for each in streamed]),
            Weights([layer.down for layer in layers], streamed=[each.down for each in streamed]),
        ]

    def head_weights(self) -> Weights:
        return Weights([self._head], wide=True)

    def embed_last(self, last_token: Tensor, slots: Tensor, residual: Tensor) -> None:
        """residual [rows, H] = the embedding of each slot's newest token; zero for slot -1."""
        self._embed_last(self.embedding, last_token, slots, residual)

    def layers(
        self,
        residual: Tensor,
        slots: Tensor,
        positions: Tensor,
        kv: Tensor,
        attend: Attend,
        multiply: Multiply,
        *,
        fused: bool,
        span: range,
        drawn: Drawn | None = None,
    ) -> None:
        """Run the layers in `span` over `residual` [T, H] in place; tokens of slot -1 write no KV.

        slots, positions: int32 [T]; kv: [layers, pages, 2, page_size, kv heads, D]. `fused` allows the ways
        for few rows. With `drawn` the last of the layers goes no further than its KV but for those tokens, and
        `residual` is left as it came to that layer.
        """
        layers = [self._layers[index] for index in span]
        if fused and residual.shape[0] <= FEW_ROWS:
            for index, layer in zip(span, layers, strict=True):
                self._few_rows(layer, residual, slots, positions, kv[index], attend)
            return
        hidden = torch.empty_like(residual)
        self._add_norm(None, residual, layers[0].input_norm, hidden)
        following = [layer.input_norm for layer in layers[1:]] + [self._final_norm]
        if fused and streams(residual.shape[0], multiply.sms):
            for index, layer, norm in zip(span, layers, following, strict=True):
                self._streamed_rows(layer, norm, hidden, residual, slots, positions, kv[index], attend, multiply.sms)
            return
        whole = len(layers) if drawn is None else len(layers) - 1
        for index, layer, norm in zip(span[:whole], layers, following, strict=False):
            qkv = multiply(hidden, layer.qkv, layer.qkv_bias)
            attended = self._attention(layer, qkv, slots, positions, kv[index], attend)
            self._behind_attention(layer, norm, attended, hidden, residual, multiply)
        if drawn is not None:
            self._drawn_rows(layers[-1], hidden, residual, slots, positions, kv[span[-1]], drawn, multiply)

    def _few_rows(
        self, layer: _Layer, residual: Tensor, slots: Tensor, positions: Tensor, kv: Tensor, attend: Attend
    ) -> None:
        heads, rows = self._heads, residual.shape[0]
        qkv = residual.new_empty(rows, heads.total * heads.head_dim)
        layer.few.qkv(residual, qkv)
        attended = self._attention(layer, qkv, slots, positions, kv, attend)
        layer.few.out(attended, residual, residual)
        gated = residual.new_empty(rows, self._config.intermediate_size)
        layer.few.gate_up(residual, gated)
        layer.few.down(gated, residual, residual)

    def _streamed_rows(
        self,
        layer: _Layer,
        norm: Tensor,
        hidden: Tensor,
        residual: Tensor,
        slots: Tensor,
        positions: Tensor,
        kv: Tensor,
        attend: Attend,
        sms: int,
    ) -> None:
        """`hidden`: this layer's normed input, and then, by `norm`, the next one's."""
        heads, rows = self._heads, residual.shape[0]
        qkv = residual.new_empty(rows, heads.total, heads.head_dim)
        product = layer.streamed.qkv(hidden, sms), layer.qkv_bias
        self._rope_and_store(qkv, layer.norms, self._rope, positions, slots, self._page_table, kv, product)
        attended = residual.new_empty(rows, heads.query, heads.head_dim)
        attend(qkv, kv, attended)
        self._add_norm(layer.streamed.out(attended.view(rows, -1), sms), residual, layer.post_norm, hidden)
        gated = residual.new_empty(rows, self._config.intermediate_size)
        self._silu_mul(layer.streamed.gate_up(hidden, sms), gated)
        self._add_norm(layer.streamed.down(gated, sms), residual, norm, hidden)

    def _drawn_rows(
        self,
        layer: _Layer,
        hidden: Tensor,
        residual: Tensor,
        slots: Tensor,
        positions: Tensor,
        kv: Tensor,
        drawn: Drawn,
        multiply: Multiply,
    ) -> None:
        """A last layer: KV of all tokens, and all else for those that are drawn from."""
        drawn.plan()
        by_head = multiply(hidden, layer.qkv, layer.qkv_bias).view(hidden.shape[0], self._heads.total, -1)
        self._rope_and_store(by_head, layer.norms, self._rope, positions, slots, self._page_table, kv)
        # Between the KV write and the attention, which may begin to read before its predecessor has ended.
        queries = by_head.index_select(0, drawn.tokens)
        torch.index_select(residual, 0, drawn.tokens, out=drawn.states)
        attended = queries.new_zeros(queries.shape[0], self._heads.query, self._heads.head_dim)
        drawn.attend(queries, kv, attended)
        rows = attended.view(attended.shape[0], -1)
        states = torch.empty_like(drawn.states)
        self._behind_attention(layer, self._final_norm, rows, states, drawn.states, multiply)

    def _behind_attention(
        self, layer: _Layer, norm: Tensor, attended: Tensor, hidden: Tensor, residual: Tensor, multiply: Multiply
    ) -> None:
        """The rest of a layer; `hidden` then holds the next one's normed input."""
        self._add_norm(multiply(attended, layer.out), residual, layer.post_norm, hidden)
        gated = residual.new_empty(residual.shape[0], self._config.intermediate_size)
        self._silu_mul(multiply(hidden, layer.gate_up), gated)
        self._add_norm(multiply(gated, layer.down), residual, norm, hidden)

    def _attention(
        self, layer: _Layer, qkv: Tensor, slots: Tensor, positions: Tensor, kv: Tensor, attend: Attend
    ) -> Tensor:
        heads, rows = self._heads, qkv.shape[0]
        by_head = qkv.view(rows, heads.total, heads.head_dim)
        self._rope_and_store(by_head, layer.norms, self._rope, positions, slots, self._page_table, kv)
        out = qkv.new_empty(rows, heads.query, heads.head_dim)
        attend(by_head, kv, out)
        return out.view(rows, -1)

    def logits(self, residual: Tensor, multiply: Multiply) -> Tensor:
        """Logits float32 [R, V] of rows [R, H] as `layers` leaves them; the rows may be changed."""
        if residual.shape[0] <= FEW_ROWS:
            logits = torch.empty(residual.shape[0], self._head.shape[0], dtype=torch.float32, device=residual.device)
            self._few_head(residual, logits)
            return logits
        hidden = torch.empty_like(residual)
        self._add_norm(None, residual, self._final_norm, hidden)
        if streams(residual.shape[0], multiply.sms):
            return self._streamed_head(hidden, multiply.sms).sums[0]
        return multiply(hidden, self._head, wide=True)
