"""Logits of the dense decoder against transformers, on random checkpoints of every served variant."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.ops import panels
from tests.models.checkpoints import Recipe, Rows, build, expected_logits, load, random_ids

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

RECIPES = {
    "qwen3": Recipe("qwen3"),
    "qwen3 tied": Recipe("qwen3", {"tie_word_embeddings": True}),
    "qwen3 old spelling": Recipe("qwen3", {"tie_word_embeddings": True}, old_spelling=True),
    "qwen3 yarn": Recipe("qwen3", {"rope_parameters": YARN}),
    "qwen3 with biases": Recipe("qwen3", {"attention_bias": True}),
    "qwen2": Recipe("qwen2"),
    "qwen2 tied, sharded": Recipe("qwen2", {"tie_word_embeddings": True}, shard_size="200KB"),
    "qwen2 old spelling, yarn": Recipe("qwen2", {"rope_parameters": YARN}, old_spelling=True),
    "llama": Recipe("llama"),
    "llama tied": Recipe("llama", {"tie_word_embeddings": True}),
    "llama without groups": Recipe("llama", {"num_key_value_heads": 6}),
    "llama with one kv head": Recipe("llama", {"num_key_value_heads": 1}),
    "llama with biases": Recipe("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": Recipe("llama", {"rope_parameters": LINEAR}),
    "llama linear, old spelling": Recipe("llama", {"rope_parameters": LINEAR}, old_spelling=True),
    "llama llama3": Recipe("llama", {"rope_parameters": LLAMA3}),
    "llama llama3, old spelling": Recipe("llama", {"rope_parameters": LLAMA3}, old_spelling=True),
    "llama yarn": Recipe("llama", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}),
    "llama yarn, own attention factor": Recipe("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "llama yarn, mscale": Recipe("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama yarn, not truncated": Recipe("llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "llama of bf16 weights": Recipe("llama", dtype=torch.bfloat16),
    "qwen3 of fp16 weights, sharded": Recipe("qwen3", dtype=torch.float16, shard_size="100KB"),
}


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    difference = (found - expected).abs().max().item()
    assert difference <= tolerance, f"logits differ by {difference:.2e}"
    assert expected.std().item() > 0.1, "the model says nothing; agreement would mean nothing"


@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_prompt_agrees(name: str, tmp_path: Path) -> None:
    """Red when a norm, a bias, a rotation, a scale, a head mapping or the tie is dropped or misread."""
    reference = build(RECIPES[name], tmp_path)
    config, model = load(tmp_path)
    ids = random_ids(200, seed=1)
    assert_close(Rows(config, model, 1).feed({0: ids})[0], expected_logits(reference, ids))


@pytest.mark.parametrize("name", ["qwen3 with biases", "llama with biases", "qwen2 tied, sharded"])
def test_panels_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a layer in panels or its bias breaks what reads its output by views."""
    monkeypatch.setattr(panels, "PANEL_MIN_WEIGHTS", 1)
    monkeypatch.setattr(panels, "WIDTH", 4)
    reference = build(RECIPES[name], tmp_path)
    config, model = load(tmp_path)
    ids = random_ids(40, seed=1)
    rows = Rows(config, model, 1)
    parts = [rows.feed({0: ids[start : start + 10]})[0] for start in range(0, len(ids), 10)]
    assert_close(torch.cat(parts), expected_logits(reference, ids))


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("name", ["qwen3", "llama llama3", "qwen2"])
def test_chunks_and_decode_agree_with_the_whole(name: str, page: int, tmp_path: Path) -> None:
    """Red when a chunk forgets or overwrites what came before it, at page borders above all."""
    reference = build(RECIPES[name], tmp_path)
    config, model = load(tmp_path)
    ids = random_ids(330, seed=2)
    rows = Rows(config, model, 1, page=page)
    cuts = [0, 1, 2, 16, 17, 33, 300, 328, 329, 330]
    parts = [rows.feed({0: ids[a:b]})[0] for a, b in pairwise(cuts)]
    assert_close(torch.cat(parts), expected_logits(reference, ids))


def test_a_mixed_batch_agrees_with_each_row_alone(tmp_path: Path) -> None:
    """Red when rows of a ragged batch see each other, or a row's tokens are put in another's place."""
    reference = build(RECIPES["qwen3"], tmp_path)
    config, model = load(tmp_path)
    lengths = [1, 7, 60, 61, 130, 300, 2]
    sequences = [random_ids(n + 12, seed=n) for n in lengths]
    rows = Rows(config, model, len(lengths))
    got: list[list[torch.Tensor]] = [[] for _ in lengths]

    def feed(chunks: dict[int, int]) -> None:
        starts = {row: int(rows.lengths[row]) for row in chunks}
        cut = {row: sequences[row][starts[row] : starts[row] + count] for row, count in chunks.items()}
        for row, logits in rows.feed(cut).items():
            got[row].append(logits)

    feed({0: 1, 1: 7, 2: 60, 3: 61})  # prompts together
    feed({3: 1, 4: 100, 0: 1, 1: 1})  # decode rows beside a first chunk, in any order
    feed({4: 30, 5: 290, 2: 1})  # a later chunk beside a first one
    feed({5: 10, 6: 2, 4: 1, 0: 1})
    for _ in range(6):
        feed(dict.fromkeys(range(len(lengths)), 1))
    for row, sequence in enumerate(sequences):
        whole = torch.cat(got[row])
        assert_close(whole, expected_logits(reference, sequence[: len(whole)]))


def test_many_decode_rows_of_unlike_length_agree(tmp_path: Path) -> None:
    """Red when grouping or padding of decode rows lets a row attend beyond its own tokens."""
    reference = build(RECIPES["llama"], tmp_path)
    config, model = load(tmp_path)
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 500, 500, 499]
    sequences = [random_ids(n + 2, seed=n) for n in lengths]
    rows = Rows(config, model, len(lengths))
    rows.feed({row: sequence[:-2] for row, sequence in enumerate(sequences)})
    first = rows.feed({row: sequence[-2:-1] for row, sequence in enumerate(sequences)})
    second = rows.feed({row: sequence[-1:] for row, sequence in reversed(list(enumerate(sequences)))})
    for row, sequence in enumerate(sequences):
        found = torch.cat((first[row], second[row]))
        assert_close(found, expected_logits(reference, sequence)[-2:])


def test_bf16_compute_stays_close(tmp_path: Path) -> None:
    """Red when bf16 takes a path that the float32 tests don't see (masks, tables, norms of the wrong dtype)."""
    reference = build(RECIPES["qwen3"], tmp_path)
    config, model = load(tmp_path, torch.bfloat16)
    ids = random_ids(64, seed=3)
    rows = Rows(config, model, 2)
    found = torch.cat([rows.feed({0: ids[:40], 1: ids[:3]})[0], rows.feed({0: ids[40:63]})[0]])
    found = torch.cat([found, rows.feed({0: ids[63:], 1: ids[3:4]})[0]])
    expected = expected_logits(reference, ids)
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min().item() > 0.995


def test_stale_values_in_the_pool_reach_nobody(tmp_path: Path) -> None:
    """Red when padding or a page's unused tail is multiplied in: what a failed step left there may be NaN."""
    build(RECIPES["llama"], tmp_path)
    config, model = load(tmp_path)
    sequences = [random_ids(n, seed=n) for n in (3, 9, 40)]
    clean, dirty = Rows(config, model, 3), Rows(config, model, 3)
    dirty.kv.keys.fill_(torch.nan)
    dirty.kv.values.fill_(torch.nan)
    for step in ([0, -1], [-1, None]):
        cut = {row: sequence[slice(*step)] for row, sequence in enumerate(sequences)}
        expected, found = clean.feed(cut), dirty.feed(cut)
        for row in cut:
            assert torch.equal(found[row], expected[row])


def test_int32_ids_and_positions(tmp_path: Path) -> None:
    """Red when int32 positions or ids, which the engine's tables hold, stop working."""
    build(RECIPES["llama"], tmp_path)
    config, model = load(tmp_path)
    ids = random_ids(5, seed=4)
    rows = Rows(config, model, 1)
    rows.attention.begin(rows.tables, np.zeros(1, np.int32), np.array([5], np.int32))
    small = model.forward(torch.from_numpy(ids).int(), torch.arange(5, dtype=torch.int32), rows.attention)
    rows.attention.begin(rows.tables, np.zeros(1, np.int32), np.array([5], np.int32))
    assert torch.equal(small, model.forward(torch.from_numpy(ids), torch.arange(5), rows.attention))
