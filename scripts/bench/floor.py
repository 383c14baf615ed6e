"""How near a step is to what the card allows: bytes and operations that it can't do without, against what it took.

    python scripts/bench/floor.py [PROFILE.json] [--shape 4b]

Reads what `scripts/gpu_profile.py --out` wrote. A step's floor is the longer of its bytes at the read bandwidth and
its operations at the bf16 rate, both measured on the card with plain kernels. Bytes: every weight once, the KV that
decode rows read, the KV that is written. Operations: two a weight and token, four a query, key and head dimension in
attention; the head's product for the rows that draw. Prints a Markdown table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

from scripts.bench.make_shape import SHAPES, VOCABULARY, Shape

RESULTS = Path(__file__).parent / "results"
READ_BYTES_S, BF16_FLOP_S = 4.2e12, 790e12
"""Of an H200: large reads, and large matrix products."""
CONTEXT = 1024
"""Tokens of a decode row in the profile."""
HEAD_DIM, BF16 = 128, 2


@dataclass(frozen=True, slots=True)
class Floor:
    case: str
    gbytes: float
    gflop: float
    floor_us: float
    took_us: float

    @property
    def ratio(self) -> float:
        return self.took_us / self.floor_us


def layer_weights(shape: Shape) -> int:
    """Of all layers: the attention's four products and the MLP's three."""
    attention = (2 * shape.heads + 2 * shape.kv_heads) * HEAD_DIM * shape.hidden
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def floor_of(case: str, took_us: float, shape: Shape) -> Floor:
    """`case` as gpu_profile.py names it: decode:R, prefill:T, eager:T or mixed:R+T."""
    match = re.fullmatch(r"(decode|prefill|eager|mixed):(?:(\d+)\+)?(\d+)", case)
    if match is None:
        raise ValueError(f"{case!r} has no floor of its own")
    kind, first, last = match[1], int(match[2] or 0), int(match[3])
    rows, chunk = (last, 0) if kind == "decode" else (first, last)
    weights, head = layer_weights(shape), VOCABULARY * shape.hidden
    drawn = rows + (chunk > 0)
    kv_token = 2 * shape.layers * shape.kv_heads * HEAD_DIM * BF16
    read = BF16 * (weights + head) + kv_token * (rows * CONTEXT + rows + chunk)
    attention = 4 * shape.layers * shape.heads * HEAD_DIM * (rows * CONTEXT + chunk * chunk // 2)
    operations = 2 * weights * (rows + chunk) + 2 * head * drawn + attention
    floor_us = 1e6 * max(read / READ_BYTES_S, operations / BF16_FLOP_S)
    return Floor(case, read / 1e9, operations / 1e9, floor_us, took_us)


def table(floors: list[Floor]) -> list[str]:
    out = ["| step | GB | GFLOP | floor µs | took µs | took / floor |", "|---|---|---|---|---|---|"]
    return out + [
        f"| {each.case} | {each.gbytes:.2f} | {each.gflop:.0f} | {each.floor_us:.0f} | {each.took_us:.0f} | "
        f"{each.ratio:.2f} |"
        for each in floors
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, default=RESULTS / "h200-profile.json")
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    options = parser.parse_args()
    report: dict[str, Any] = json.loads(options.profile.read_text())
    cases = [case for case in report["cases"] if not case["case"].startswith("lane")]
    floors = [floor_of(case["case"], case["wall_us"], SHAPES[options.shape]) for case in cases]
    print("\n".join(table(floors)))
    rows = [{**asdict(each), "ratio": each.ratio} for each in floors]
    print(json.dumps({"machine": report["machine"], "floors": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
