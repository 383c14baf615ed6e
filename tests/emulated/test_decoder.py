"""A forward whose last layer goes no further than its KV but for the tokens that are drawn from, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch

from engine_core.model_config import ModelConfig
from engine_core.ops.cuda import reference
from engine_core.ops.cuda.attention import Cut, DecodeAttention
from engine_core.ops.cuda.decoder import FEW_ROWS, CudaDecoder, Drawn
from engine_core.ops.cuda.layer import Heads, rope_table
from engine_core.ops.cuda.splits import PAGE
from tests.emulated import EmulatedKernels
from tests.emulated.comparing import BF16, CPU, assert_near, integers, poisoned, random

HEADS = Heads(4, 2, 64)
LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 3, 64, 128, 32
LENGTHS = [37, 20]
"""Tokens of two prompts, in slots 1 and 0; of the second no token is drawn yet."""
PICKS = [36, 0, 0]
"""Places of the tokens drawn from, padded."""
SAMPLE_SLOTS, SAMPLE_POSITIONS = [1, -1, -1], [36, 0, 0]


class Multiplied:
    """A `Multiply` in float32."""

    sms = 3

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False
    ) -> torch.Tensor:
        y = x.float() @ weight.float().T
        y = y if bias is None else y + bias.float()
        return y if wide else y.to(BF16)


multiply = Multiplied()


class Prompts:
    """A decoder of random weights, and two prompts' tokens before it."""

    def __init__(self, kernels: EmulatedKernels, slots: int = 2) -> None:
        self.table = (
            torch.arange(8 if slots == 2 else 2 * slots, dtype=torch.int32).view(slots, -1).flip(0).contiguous()
        )
        shape = SimpleNamespace(
            hidden_size=HIDDEN,
            num_layers=LAYERS,
            intermediate_size=INTERMEDIATE,
            rms_norm_eps=1e-6,
            tied=True,
            qk_norm=True,
        )
        turns = torch.arange(64)[:, None] * 1e4 ** (-torch.arange(0, HEADS.head_dim, 2) / HEADS.head_dim)
        rope = rope_table(turns.cos(), turns.sin())
        parameters = _parameters()
        self.final_norm = parameters["final_norm"]
        self.decoder = CudaDecoder(cast(ModelConfig, shape), parameters, kernels, HEADS, rope, self.table)
        self.attention = DecodeAttention(HEADS, max(4, slots), 4, CPU, kernels, Cut(4, 2))
        self.slots = integers([1] * LENGTHS[0] + [0] * LENGTHS[1])
        self.positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(torch.int32)
        self.tokens = random(sum(LENGTHS), HIDDEN)

    def attend(self, qkv: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        firsts = (0, LENGTHS[0])
        for slot, first, length in zip((1, 0), firsts, LENGTHS, strict=True):
            rows = slice(first, first + length)
            queries = qkv[rows, : HEADS.query]
            out[rows] = reference.paged_attention(queries, kv, self.table[slot], length, HEADS.head_dim**-0.5).to(BF16)

    def attend_rows(self, qkv: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        self.attention(qkv, kv, self.table, out, HEADS.head_dim**-0.5)

    def drawn(self, states: torch.Tensor) -> Drawn:
        def attend(queries: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            self.attention(queries, kv, self.table, out, HEADS.head_dim**-0.5)

        slots, positions = integers(SAMPLE_SLOTS), integers(SAMPLE_POSITIONS)
        return Drawn(torch.tensor(PICKS), lambda: self.attention.plan(slots, positions), attend, states)

    def run(self, span: range, residual: torch.Tensor, kv: torch.Tensor, drawn: Drawn | None = None) -> None:
        rest = residual, self.slots, self.positions, kv, self.attend, multiply
        self.decoder.layers(*rest, fused=False, span=span, drawn=drawn)


def _parameters() -> dict[str, torch.Tensor]:
    out = {"embedding": random(VOCABULARY, HIDDEN), "final_norm": 1 + random(HIDDEN, scale=0.1)}
    for index in range(LAYERS):
        shapes = {
            "qkv.weight": (HEADS.total * HEADS.head_dim, HIDDEN),
            "out.weight": (HIDDEN, HEADS.query * HEADS.head_dim),
            "gate_up.weight": (2 * INTERMEDIATE, HIDDEN),
            "down.weight": (HIDDEN, INTERMEDIATE),
        }
        sizes = {"input_norm": HIDDEN, "post_norm": HIDDEN, "q_norm": HEADS.head_dim, "k_norm": HEADS.head_dim}
        out |= {f"layers.{index}.{name}": random(*shape, scale=0.1) for name, shape in shapes.items()}
        out |= {f"layers.{index}.{name}": 1 + random(size, scale=0.1) for name, size in sizes.items()}
    return out


def test_the_tokens_drawn_from_end_as_in_a_whole_forward(kernels: EmulatedKernels) -> None:
    """Red when another token's row is taken, attention reads past the token or before its KV is written,
    the last layer's KV differs, or padding isn't finite; and when what was left undone can't be made up for."""
    prompts = Prompts(kernels)
    whole, few = (torch.zeros(LAYERS, 8, 2, PAGE, HEADS.kv, HEADS.head_dim, dtype=BF16) for _ in range(2))
    all_states, left, states = prompts.tokens.clone(), prompts.tokens.clone(), poisoned(len(PICKS), HIDDEN)
    prompts.run(range(LAYERS), all_states, whole)
    prompts.run(range(LAYERS), left, few, prompts.drawn(states))
    assert torch.equal(few, whole)
    assert_near(states[0], all_states[PICKS[0]])
    assert bool(states.isfinite().all())
    prompts.run(range(LAYERS - 1, LAYERS), left, few)
    assert torch.equal(left, all_states)
    assert torch.equal(few, whole)


def test_rows_whose_products_are_streamed_end_as_with_any_multiply(kernels: EmulatedKernels) -> None:
    """Red when a layer adds to another's residual, a norm is another layer's, attention reads keys and queries that
    aren't there, or logits are of rows that weren't normed."""
    rows = FEW_ROWS + 2
    prompts = Prompts(kernels, rows)
    slots, positions = integers(list(range(rows))), integers([3 * row % 30 for row in range(rows)])
    tokens, outcomes = random(rows, HIDDEN), []
    for fused in (True, False):
        kv = torch.zeros(LAYERS, 2 * rows, 2, PAGE, HEADS.kv, HEADS.head_dim, dtype=BF16)
        residual = tokens.clone()
        prompts.attention.plan(slots, positions)
        rest = residual, slots, positions, kv, prompts.attend_rows, multiply
        prompts.decoder.layers(*rest, fused=fused, span=range(LAYERS))
        outcomes.append((kv, residual, prompts.decoder.logits(residual.clone(), multiply)))
    for streamed, multiplied in zip(*outcomes, strict=True):
        assert_near(streamed, multiplied, bound=2e-2)
    streamed_logits = outcomes[0][2]
    final = reference.rms_norm(outcomes[0][1], prompts.final_norm, 1e-6).to(BF16).float()
    assert_near(streamed_logits, final @ prompts.decoder.embedding.float().T)
