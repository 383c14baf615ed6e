"""Checkpoints that aren't what they claim: each is refused before weights are allocated, naming what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.errors import ConfigError
from engine_core.model_config import ModelConfig, load_model_config
from engine_core.models import weights
from engine_core.models.safetensors_file import INDEX, SINGLE, read_header
from engine_core.models.weights import load_model, parameter_shapes
from tests.models.checkpoints import Recipe, Rows, build, load, random_ids

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"


def refused(folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch | None = None) -> str:
    """Loading fails with a ConfigError that holds all these words; with `monkeypatch`, before anything is allocated."""
    if monkeypatch is not None:
        monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated before it was checked"))
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is missing from: {message}"
    return message


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) >= 3
    return found


def test_missing_tensor(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when absent weights stay uninitialized."""
    rewrite(single, lambda tensors: tensors.__delitem__("model.layers.1.self_attn.k_norm.weight"))
    refused(single, "model.layers.1.self_attn.k_norm.weight", "missing", "[32]", monkeypatch=monkeypatch)


def test_unexpected_tensor(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a tensor that the model would need (here a bias) is left out silently."""
    rewrite(single, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(192)}))
    refused(single, SINGLE, "model.layers.0.self_attn.q_proj.bias", "[192]", monkeypatch=monkeypatch)


def test_wrong_shape(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when shapes are compared by size alone (a transposed matrix) or not at all."""
    name = "model.layers.2.mlp.down_proj.weight"
    rewrite(single, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    refused(single, SINGLE, name, "[160, 96]", "[96, 160]", monkeypatch=monkeypatch)


@pytest.mark.parametrize("cut", [1, 1000, 200_000])
def test_truncated_file(cut: int, single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a half-downloaded file is served with garbage at its end."""
    path = single / SINGLE
    path.write_bytes(path.read_bytes()[:-cut])
    refused(single, SINGLE, "truncated", str(path.stat().st_size), monkeypatch=monkeypatch)


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_file_shorter_than_its_header(size: int, single: Path) -> None:
    """Red when a short file ends in struct.error or a JSON error instead of naming the file."""
    path = single / SINGLE
    path.write_bytes(path.read_bytes()[:size])
    refused(single, SINGLE, f"{size} bytes")


def test_truncated_shard(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when only the first shard's size is checked."""
    last = shards(sharded)[-1]
    last.write_bytes(last.read_bytes()[:-4])
    refused(sharded, last.name, "truncated", monkeypatch=monkeypatch)


def test_missing_shard(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the shards found are loaded instead of those listed."""
    second = shards(sharded)[1]
    second.unlink()
    refused(sharded, second.name, "missing", INDEX, monkeypatch=monkeypatch)


def test_tensor_in_another_shard_than_listed(sharded: Path) -> None:
    """Red when the index is believed without looking into the shard."""
    first, second = shards(sharded)[:2]
    index = json.loads((sharded / INDEX).read_text())
    name = next(name for name, file in index["weight_map"].items() if file == first.name)
    index["weight_map"][name] = second.name
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, first.name, name, INDEX)


def test_tensor_in_two_shards(sharded: Path) -> None:
    """Red when which of two copies is served depends on the order of files."""
    first, second = shards(sharded)[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file({**load_file(second), name: tensors[name] + 1}, second)
    refused(sharded, second.name, name, INDEX)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "weights.bin", 7])
def test_index_that_leads_outside(file: object, sharded: Path) -> None:
    """Red when a model folder can make the loader open files elsewhere."""
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, INDEX, "model.norm.weight", repr(file))


LIES: dict[str, Any] = {
    # what is wrong: how the header is changed, and words of the complaint
    "dimensions beyond the bytes": (lambda h: h[NORM].update(shape=[96, 1000]), NORM, "needs 384000 bytes"),
    "huge dimensions": (lambda h: h[NORM].update(shape=[2**62, 2**62]), NORM, "needs"),
    "negative dimension": (lambda h: h[NORM].update(shape=[-96]), NORM, "malformed"),
    "boolean dimension": (lambda h: h[NORM].update(shape=[True]), NORM, "malformed"),
    "bytes beyond the file": (
        lambda h: h[NORM].update(data_offsets=[10**12, 10**12 + 384]),
        NORM,
        "truncated",
    ),
    "reversed offsets": (lambda h: h[NORM].update(data_offsets=[384, 0]), NORM, "malformed"),
    "overlapping tensors": (lambda h: h[NORM].update(data_offsets=[0, 384]), "back to back"),
    "no entry": (lambda h: h.update({NORM: 3}), NORM, "malformed"),
    "other dtype": (lambda h: h[NORM].update(dtype="F8_E4M3"), NORM, "F8_E4M3"),
    "dtype of wrong type": (lambda h: h[NORM].update(dtype=["F32"]), NORM, "dtype"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_header(lie: str, single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when something is allocated or read because a header says so."""
    change, *words = LIES[lie]
    edit_header(single / SINGLE, change)
    refused(single, SINGLE, *words, monkeypatch=monkeypatch)


def test_bytes_after_the_last_tensor(single: Path) -> None:
    """Red when a file may carry more than its header accounts for."""
    with (single / SINGLE).open("ab") as file:
        file.write(b"more")
    refused(single, SINGLE, "tensors end at byte")


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff\xff", b"[" * 5000])
def test_header_that_is_no_object(header: bytes, single: Path) -> None:
    """Red when bad JSON escapes as another error than ConfigError."""
    (single / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header)
    refused(single, SINGLE, "header")


def test_header_length_is_capped(tmp_path: Path) -> None:
    """Red when a header of any length is read into memory."""
    path = tmp_path / SINGLE
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10**9))
        file.truncate(2 * 10**9)
    with pytest.raises(ConfigError, match="1000000000"):
        read_header(path)


def test_no_checkpoint(single: Path) -> None:
    """Red when a folder with other formats only is tried in some other way."""
    (single / SINGLE).rename(single / "pytorch_model.bin")
    refused(single, "safetensors", "dummy")


def test_file_cut_while_loading(single: Path) -> None:
    """Red when a short read leaves the rest of a parameter uninitialized."""
    shard = read_header(single / SINGLE)
    name = max(shard.tensors, key=lambda name: shard.tensors[name].offset)
    stored = shard.tensors[name]
    (single / SINGLE).write_bytes((single / SINGLE).read_bytes()[:-4])
    out = torch.empty(stored.size // stored.dtype.itemsize)
    with (single / SINGLE).open("rb") as file, pytest.raises(ConfigError, match=f"{name}.*cut"):
        list(stored.read_into(file, out, torch.empty(1 << 20, dtype=torch.uint8), f"tensor {name}"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype, single: Path) -> None:
    """Red when a broken checkpoint loads, to answer every request with an error or nonsense."""
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensors: Tensors) -> None:
        tensors.update({each: tensor.to(dtype) for each, tensor in tensors.items()})
        tensors[name][-1, -1] = value

    rewrite(single, spoil)
    refused(single, name, "NaN or infinite")


def test_tied_checkpoint_with_a_head(tmp_path: Path) -> None:
    """Red when a tied model uses (or refuses) the copy of the embedding that some checkpoints carry as lm_head."""
    build(Recipe("llama", {"tie_word_embeddings": True}), tmp_path)
    ids = random_ids(9, seed=1)
    config, model = load(tmp_path)
    expected = Rows(config, model, 1).feed({0: ids})[0]
    shape = (config.vocab_size, config.hidden_size)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.full(shape, torch.nan)}))
    config, model = load(tmp_path)
    assert torch.equal(Rows(config, model, 1).feed({0: ids})[0], expected)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 3)}))
    refused(tmp_path, "lm_head.weight", "[3, 3]")


def test_untied_checkpoint_without_a_head(single: Path) -> None:
    """Red when a missing head falls back to the embedding."""
    rewrite(single, lambda tensors: tensors.__delitem__("lm_head.weight"))
    refused(single, "lm_head.weight", "missing")


def test_rotary_buffers_of_old_checkpoints_are_left_out(single: Path) -> None:
    """Red when Llama checkpoints of 2023, which store inv_freq, are refused."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(single, lambda tensors: tensors.update({name: torch.zeros(16)}))
    load(single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_larger_than_a_block(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a tensor read in several blocks is misplaced or cut at their borders."""
    build(Recipe("qwen2", dtype=dtype), tmp_path)
    config, expected = load(tmp_path)
    monkeypatch.setattr(weights, "BLOCK_BYTES", 1022)
    _, found = load(tmp_path)
    ids = random_ids(9, seed=1)
    assert torch.equal(
        Rows(config, found, 1).feed({0: ids})[0],
        Rows(config, expected, 1).feed({0: ids})[0],
    )


def test_progress_counts_every_byte(sharded: Path) -> None:
    """Red when the bar stops short of its end, overshoots or runs backwards."""
    steps: list[tuple[str, int, int]] = []
    config = load_model_config(sharded)
    load_model(
        sharded,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="safetensors",
        progress=lambda *step: steps.append(step),
    )
    done = [step[1] for step in steps]
    assert done == sorted(done)
    total = sum(stored.size for path in shards(sharded) for stored in read_header(path).tensors.values())
    assert {step[2] for step in steps} == {total} == {done[-1]}


def dummy(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return weights.dummy_parameters(config, dtype, torch.device("cpu"), lambda *_: None)


def test_dummy_weights(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when dummy weights change between runs, are constant, or repeat a row within a matrix."""
    (single / SINGLE).unlink()
    config = load_model_config(single)
    monkeypatch.setattr(weights, "DUMMY_NOISE", 9973)  # small enough that the matrices wrap around it
    first, second = dummy(config), dummy(config)
    assert {name: tuple(value.shape) for name, value in first.items()} == parameter_shapes(config)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        if name.endswith("norm"):
            assert abs(value.mean().item() - 1) < 0.1
            assert value.std().item() > 0.02
        else:
            assert 0.015 < value.std().item() < 0.025
            assert len(torch.unique(value, dim=0)) == len(value)
    assert not torch.equal(first["layers.0.qkv.weight"], first["layers.1.qkv.weight"])


def test_dummy_format_needs_no_checkpoint(single: Path) -> None:
    """Red when --load-format dummy looks for files, or its model can't run."""
    (single / SINGLE).unlink()
    config = load_model_config(single)
    model = load_model(
        single,
        config,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        load_format="dummy",
        progress=lambda *_: None,
    )
    logits = Rows(config, model, 1).feed({0: random_ids(9, seed=1)})[0]
    assert bool(logits.isfinite().all())
    assert logits.std().item() > 0
