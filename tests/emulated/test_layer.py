"""The small kernels of a layer on the CPU: embedding, norm, gate, rotary embedding with KV write."""

from __future__ import annotations

import math

import pytest
import torch

from engine_core.ops.cuda import reference
from engine_core.ops.cuda.layer import AddRmsNorm, EmbedLast, Heads, MergeSpans, RopeAndStore, SiluMul, rope_table
from tests.emulated import EmulatedKernels
from tests.emulated.comparing import BF16, assert_near, integers, poisoned, random

EPSILON = 1e-6


@pytest.mark.parametrize("width", [64, 2568])
def test_add_and_norm(kernels: EmulatedKernels, width: int) -> None:
    """Red if the sum isn't rounded before it is normed, or a row's tail is left out of the mean."""
    x, residual, weight, y = random(3, width), random(3, width), random(width), poisoned(3, width)
    total = (x.float() + residual.float()).to(BF16)
    AddRmsNorm(width, EPSILON, kernels)(x, residual, weight, y)
    assert torch.equal(residual, total)
    assert_near(y, reference.rms_norm(total, weight, EPSILON))


def test_norm_alone_leaves_the_residual(kernels: EmulatedKernels) -> None:
    """Red if a null x is read or the residual is changed."""
    residual, weight, y = random(2, 64), random(64), poisoned(2, 64)
    before = residual.clone()
    AddRmsNorm(64, EPSILON, kernels)(None, residual, weight, y)
    assert torch.equal(residual, before)
    assert_near(y, reference.rms_norm(before, weight, EPSILON))


def test_silu_mul(kernels: EmulatedKernels) -> None:
    """Red if gate and up are swapped or a row's tail isn't written."""
    gate_up, y = random(3, 2 * 2056), poisoned(3, 2056)
    SiluMul(kernels)(gate_up, y)
    assert_near(y, reference.silu_mul(gate_up))


def test_embeddings_of_the_last_tokens(kernels: EmulatedKernels) -> None:
    """Red if rows are taken by batch position instead of by slot, or a padding row isn't zero."""
    table, y = random(50, 1032), poisoned(3, 1032)
    EmbedLast(kernels)(table, integers([4, 49, 7]), integers([2, -1, 1]), y)
    assert torch.equal(y, torch.stack([table[7], torch.zeros_like(table[0]), table[49]]))


@pytest.mark.parametrize(("heads", "qk_norm"), [(Heads(4, 2, 128), True), (Heads(7, 1, 64), False)])
def test_rope_writes_its_own_tokens_and_nothing_else(kernels: EmulatedKernels, heads: Heads, qk_norm: bool) -> None:
    """Red if a head is rotated as another kind, a line lands elsewhere in the pool, or a row of slot -1 is touched."""
    slots, positions = integers([1, -1, 0, 2, 2]), integers([0, 5, 37, 15, 16])
    table = torch.randperm(9).to(torch.int32).view(3, 3)
    kv, qkv = random(9, 2, 16, heads.kv, heads.head_dim), random(5, heads.total, heads.head_dim)
    turns = torch.rand(64, heads.head_dim // 2) * 6
    norms = (random(heads.head_dim), random(heads.head_dim)) if qk_norm else None
    before, kv_before = qkv.clone(), kv.clone()
    rope = rope_table(turns.cos(), turns.sin())
    RopeAndStore(heads, EPSILON, kernels, qk_norm=qk_norm)(qkv, norms, rope, positions, slots, table, kv)

    live = [0, 2, 3, 4]
    queries, keys = before[live, : heads.query].float(), before[live, heads.query : heads.query + heads.kv].float()
    if norms is not None:
        queries, keys = (reference.rms_norm(queries, norms[0], EPSILON), reference.rms_norm(keys, norms[1], EPSILON))
    angle = turns[positions[live].long()]
    assert_near(qkv[live, : heads.query], reference.rotate(queries, angle.cos(), angle.sin()))
    place = positions[live].long()
    page = table[slots[live].long(), place // 16].long()
    assert_near(kv[page, 0, place % 16], reference.rotate(keys, angle.cos(), angle.sin()))
    assert torch.equal(kv[page, 1, place % 16], before[live, heads.query + heads.kv :])
    kv[page, :, place % 16] = kv_before[page, :, place % 16]
    assert torch.equal(kv, kv_before)
    assert torch.equal(qkv[1], before[1])


@pytest.mark.parametrize("heads", [Heads(4, 2, 128), Heads(7, 1, 64)])
def test_spans_are_merged_by_their_weights(heads: Heads, kernels: EmulatedKernels) -> None:
    """Red if a row takes another's weight, or a span without keys (minus infinity) counts or makes NaN."""
    out, other = random(5, heads.query, heads.head_dim), random(5, heads.query, heads.head_dim)
    lse, other_lse = 4 * torch.randn(5, heads.query), 4 * torch.randn(5, heads.query)
    other_lse[1], other_lse[3, 0], other[1] = -torch.inf, 500.0, 0
    weight = torch.sigmoid((lse - other_lse).double() * math.log(2))[..., None]
    expected = (weight * out.double() + (1 - weight) * other.double()).float()
    untouched = out[1].clone()
    MergeSpans(heads, kernels)(other, other_lse, out, lse)
    assert_near(out, expected)
    assert torch.equal(out[1], untouched)
