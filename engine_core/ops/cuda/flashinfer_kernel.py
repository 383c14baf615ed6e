"""FlashInfer's FA3 kernel for paged prefill: compiled by the package once, then a library of ours on disk.

Owns that library's file. Importing the package takes a second or two, which a start that finds the library saves: its
functions need `tvm_ffi` alone, through which they take torch's tensors and its current stream.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

PACKAGES = "flashinfer-python", "apache-tvm-ffi"
"""Whose versions the library depends on, beside CUDA's."""


def paged_run(head_dim: int, folder: Path) -> Callable[..., None]:
    """The kernel for bf16 queries, keys and values of so many elements, as `PagedPrefill` calls it.

    `folder` exists and is for this user alone (see nvrtc.CodeCache). Compiles for a minute or two if the library isn't
    there; raises what FlashInfer raises where it can't.
    """
    file = folder / _name(head_dim)
    if not file.exists():
        _compile(head_dim, file)
    module: Any = tvm_ffi.load_module(str(file))
    run: Callable[..., None] = module.paged_run
    return run


def _name(head_dim: int) -> str:
    versions = "-".join(version(package) for package in PACKAGES)
    return f"prefill-{head_dim}-{versions}-cuda{torch.version.cuda}.so"


def _compile(head_dim: int, file: Path) -> None:
    from flashinfer.jit.attention import gen_batch_prefill_module

    dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    no_position_encoding, plain = 0, (False, False, False)  # no sliding window, soft cap or float16 reduction
    kernel = gen_batch_prefill_module("fa3", *dtypes, head_dim, head_dim, no_position_encoding, *plain)
    kernel.build_and_load()
    with (
        tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as copy,
        kernel.get_library_path().open("rb") as made,
    ):
        shutil.copyfileobj(made, copy)
    Path(copy.name).rename(file)
