"""Decode pace under prefill, one row: streaming decoders run while cold prompts arrive at a fixed rate.

    python scripts/bench/itl_mix.py --url URL --model NAME --decoders 16 --inject-len 4096 --qps 4 --n 40

The load of `greenlane bench` for scripts: nothing is asked of the server beforehand, and one phase is measured. Works
on any OpenAI-style server whose /v1/completions takes token ids and `ignore_eos`, and streams usage. Decoders must
outlast the injection: raise --out if `decoders_alive` is below --decoders. Prints a line for people, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import uvloop

from frontend.bench.client import Target
from frontend.bench.mix import Mix, Run, figures


async def run(options: argparse.Namespace) -> dict[str, Any]:
    mix = Mix(
        model=options.model,
        vocabulary=options.vocab,
        decoders=options.decoders,
        output=options.out,
        inject_len=options.inject_len,
        qps=options.qps,
        n=options.n,
        seconds=options.seconds,
    )
    name = "injected" if mix.qps > 0 else "undisturbed"
    (phase,) = await Run(Target.of(options.url), mix, lambda what, done: None).measure([name])
    return figures(mix, phase, options.label)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode pace while prompts arrive.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--label", default="")
    parser.add_argument("--decoders", type=int, default=16)
    parser.add_argument("--out", type=int, default=8000, help="tokens of each decoder")
    parser.add_argument("--inject-len", type=int, default=4096)
    parser.add_argument("--qps", type=float, default=2.0, help="injected prompts a second; 0: none")
    parser.add_argument("--n", type=int, default=20, help="prompts injected")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time without injection")
    parser.add_argument("--vocab", type=int, default=150000)
    row = uvloop.run(run(parser.parse_args()))
    print(
        f"{row['label']}: {row['decoders']} decoders, {row['inject_len']} at {row['qps']}/s: "
        f"ITL p50 {row['itl_p50_ms']} p99 {row['itl_p99_ms']} max {row['itl_max_ms']} ms, "
        f"{row['decode_tok_s']} tok/s, TTFT p50 {row['ttft_p50_ms']} ms"
    )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
