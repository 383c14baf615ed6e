"""What the sections of `gpu_check.py` share: the options, the models, the lane modes and their server flags.

Owns no measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.bench import make_shape
from scripts.serving import TINY

ROOT = Path(__file__).resolve().parents[2]
FAKE_KV = "64GiB"
"""The fake device keeps eight bytes a token, whatever the model's pages would take."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to serve: `off[-CHUNK]`, `stream[-CHUNK]`, `green-SMS[-CHUNK]`, or `auto[-CHUNK]`."""

    label: str
    overlap: str
    decode_sms: int | None
    chunk: int | None
    """Tokens of a prefill launch; None: the product's default."""
    flags: tuple[str, ...] = ()


VARIANTS = {
    "unstaged": "--staged-inputs=off",
    "depth1": "--async-depth=1",
    "depth3": "--async-depth=3",
    "frontends2": "--frontends=2",
}
"""What a mode may be compared with, all else equal."""


def parse_mode(label: str) -> Mode:
    """Raises argparse.ArgumentTypeError naming the forms."""
    match = re.fullmatch(rf"(off|stream|auto|green-(\d+))(?:-(\d+))?(?:\+({'|'.join(VARIANTS)}))?", label)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{label!r} is no mode: off[-CHUNK], stream[-CHUNK], green-SMS[-CHUNK] or auto[-CHUNK], and then perhaps "
            f"one of {', '.join(f'+{name}' for name in VARIANTS)}"
        )
    name, sms, chunk, variant = match.groups()
    flags = (VARIANTS[variant],) if variant else ()
    return Mode(label, name.partition("-")[0], int(sms) if sms else None, int(chunk) if chunk else None, flags)


def parse_row(name: str) -> str:
    """A load's name as it is. Raises argparse.ArgumentTypeError naming the forms."""
    number = r"\d+(\.\d+)?"
    if re.fullmatch(rf"\d+|\d+@\d+@{number}|c\d+|{number}/s|goodput@{number}", name) is None:
        raise argparse.ArgumentTypeError(
            f"{name!r} is no load: D or D@TOKENS@PER_SECOND (itl), cN, N/s or goodput@N (rows)"
        )
    return name


@dataclass(frozen=True, slots=True)
class Options:
    """How the sections run; all of it stands in the header of what they measured."""

    device: str
    """cuda, cuda:N, or fake for a dry run of the harness."""
    out: Path
    work: Path
    """Logs and models of shapes."""
    shape: str
    """tiny (real weights) or a shape of make_shape.py (random weights)."""
    modes: tuple[Mode, ...]
    rows: tuple[str, ...]
    injected_s: float
    undisturbed_s: float
    repeats: int

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def model(self) -> Path:
        """A folder of the shape."""
        if self.shape == "tiny":
            return TINY
        folder = self.work / f"qwen3-{self.shape}"
        return folder if (folder / "config.json").exists() else make_shape.write(self.shape, folder)

    @property
    def max_num_seqs(self) -> int:
        return 256 if self.shape == "0.6b" else 128

    @property
    def vocabulary(self) -> int:
        return 4000 if self.shape == "tiny" else make_shape.VOCABULARY

    @property
    def context(self) -> int:
        return 2048 if self.shape == "tiny" else 16384


def server_flags(options: Options, mode: Mode, *further: str) -> list[str]:
    """Flags of `greenlane serve` for a mode; what is the same for every mode is here alone."""
    flags = [
        f"--device={options.device}",
        f"--decode-overlap={mode.overlap}",
        f"--max-model-len={options.context}",
        f"--max-num-seqs={options.max_num_seqs}",
    ]
    if mode.chunk is not None:
        flags.append(f"--max-num-batched-tokens={mode.chunk}")
    if mode.decode_sms is not None:
        flags.append(f"--decode-sms={mode.decode_sms}")
    if options.shape != "tiny":
        flags.append("--load-format=dummy")
    flags.append("--gpu-memory-utilization=0.8" if options.on_gpu else f"--kv-cache-memory={FAKE_KV}")
    return [*flags, *mode.flags, *further]


def digest(path: Path) -> dict[str, int | str] | None:
    """What identifies a file that isn't kept."""
    if not path.exists():
        return None
    data = path.read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "lines": data.count(b"\n")}
