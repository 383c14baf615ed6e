"""The safetensors format: headers checked against the file, tensors read in blocks.

Owns the parsing of headers and of the shard index. Believes nothing that a file says about itself until it is checked:
names stay inside the folder, lengths are capped before anything is allocated, every tensor's bytes lie in the file and
are as many as its shape says.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_core.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_INDEX_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes lie in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int
    """Bytes."""

    def read_into(self, file: BufferedReader, out: Tensor, scratch: Tensor, where: str) -> Iterator[int]:
        """Fill the flat tensor `out`, casting to its dtype, through `scratch` (uint8); yields bytes read so far.

        Raises ConfigError, starting with `where`, if the file has become shorter than its header said, or holds what no
        model was trained to.
        """
        file.seek(self.offset)
        width = self.dtype.itemsize
        step = len(scratch) // width
        raw = scratch.numpy().data
        for start in range(0, len(out), step):
            count = min(step, len(out) - start)
            block = raw[: count * width]
            if file.readinto(block) != len(block):
                raise ConfigError(f"{where} could not be read whole: the file was cut while it was being loaded")
            values = scratch[: count * width].view(self.dtype)
            _check_finite(values, where)
            out[start : start + count] = values
            yield count * width


def _check_finite(values: Tensor, where: str) -> None:
    """NaN and infinities show in the extremes, at the price of one more look at the block."""
    lowest, highest = values.aminmax()
    if not (math.isfinite(lowest.item()) and math.isfinite(highest.item())):
        raise ConfigError(f"{where} holds NaN or infinite values: the checkpoint is broken")


@dataclass(frozen=True, slots=True)
class Shard:
    path: Path
    tensors: dict[str, StoredTensor]


def open_shards(folder: Path) -> list[Shard]:
    """The checked headers of every safetensors file of a checkpoint. Raises ConfigError."""
    if (folder / INDEX).exists():
        return _indexed(folder)
    if not (folder / SINGLE).exists():
        raise ConfigError(
            f"{folder} holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints are served "
            "(--load-format dummy serves the shape with random weights)"
        )
    return [read_header(folder / SINGLE)]


def _indexed(folder: Path) -> list[Shard]:
    """The shards that the index lists, holding exactly the tensors that it says."""
    index = folder / INDEX
    weight_map = _json_object(index, _read_bounded(index, MAX_INDEX_BYTES)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map must map tensor names to files")
    listed: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{index}: tensor {name} is said to be in {file!r}; it must be a .safetensors file here")
        listed.setdefault(file, set()).add(name)
    shards: list[Shard] = []
    for file, names in sorted(listed.items()):
        if not (folder / file).exists():
            raise ConfigError(f"{folder / file} is missing, but {INDEX} lists it ({len(names)} tensors)")
        shard = read_header(folder / file)
        for name in sorted(names - shard.tensors.keys()):
            raise ConfigError(f"{shard.path}: tensor {name} is not in this file, but {INDEX} says so")
        for name in sorted(shard.tensors.keys() - names):
            raise ConfigError(f"{shard.path}: tensor {name} is in this file, but {INDEX} doesn't list it there")
        shards.append(shard)
    return shards


def read_header(path: Path) -> Shard:
    """A file's tensors, after its header was checked against its size. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no regular file")
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if 8 + length > size or length > MAX_HEADER_BYTES:
                raise ConfigError(
                    f"{path}: the file has {size} bytes, its header alone claims {length}; it is truncated or no "
                    "safetensors file"
                )
            header = _json_object(path, file.read(length))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    begin = 8 + length
    tensors = {name: _stored(path, name, spec, begin, size) for name, spec in header.items() if name != "__metadata__"}
    _check_layout(path, tensors, begin, size)
    return Shard(path, tensors)


def _stored(path: Path, name: str, spec: Any, begin: int, file_size: int) -> StoredTensor:
    """One entry of a header, believed only if its parts agree with each other and with the file."""
    fields = spec if isinstance(spec, dict) else {}
    kind, shape, offsets = fields.get("dtype"), _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ConfigError(f"{path}: the header's entry for tensor {name} is malformed")
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ConfigError(f"{path}: tensor {name} has dtype {kind}; served are {', '.join(DTYPES)}")
    dtype, size = DTYPES[kind], offsets[1] - offsets[0]
    if prod(shape) * dtype.itemsize != size:
        raise ConfigError(
            f"{path}: tensor {name} of shape {shape} and dtype {kind} needs {prod(shape) * dtype.itemsize} bytes, but "
            f"the header gives it {size}"
        )
    if begin + offsets[1] > file_size:
        raise ConfigError(
            f"{path}: tensor {name} ends at byte {begin + offsets[1]}, but the file has {file_size}: it is truncated"
        )
    return StoredTensor(dtype, tuple(shape), begin + offsets[0], size)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], begin: int, file_size: int) -> None:
    """The tensors fill the file after its header, without gap or overlap."""
    position = begin
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if stored.offset != position:
            raise ConfigError(
                f"{path}: tensor {name} starts at byte {stored.offset}, where {position} was expected; tensors must "
                "lie back to back"
            )
        position += stored.size
    if position != file_size:
        raise ConfigError(f"{path}: the tensors end at byte {position}, but the file has {file_size}")


def _naturals(value: Any) -> list[int] | None:
    """The value if it is a list of integers from 0 to 2**63 - 1."""
    fits = isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
    return value if fits else None


def _read_bounded(path: Path, limit: int) -> bytes:
    try:
        if path.stat().st_size > limit:
            raise ConfigError(f"{path} is larger than {limit} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error}") from error


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the header or index is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: the header or index must be a JSON object")
    return parsed
