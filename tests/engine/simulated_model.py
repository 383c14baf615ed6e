"""The model that the simulated worker computes: tokens as a function of the whole history, and of nothing else."""

from __future__ import annotations

from typing import Any

from engine_core.request import Request, SamplingParams, sequence_seed

VOCABULARY = 48
EOS = 0
_MASK = (1 << 61) - 1


def digest(previous: int, token: int) -> int:
    """What a position's KV stands for: this token after that history."""
    return (previous * 1_000_003 + (token + 17) * 7_919) & _MASK


def history(tokens: list[int]) -> int:
    value = 1
    for token in tokens:
        value = digest(value, token)
    return value


def draw(state: int, seed: int, suppressed: tuple[int, ...]) -> int:
    """The token after a history; suppressed ids can't be drawn."""
    token = ((state ^ (seed * 0x9E3779B97F4A7C15)) >> 7) % VOCABULARY
    while token in suppressed:
        token = (token + 1) % VOCABULARY
    return token


def expected_tokens(request: Request, index: int, eos: tuple[int, ...] = (EOS,)) -> list[int]:
    """Tokens of one sequence, computed alone and from scratch."""
    params, tokens = request.params, [int(token) for token in request.ids]
    stops = params.stop_token_ids.union(() if params.ignore_eos and request.grammar is None else eos)
    output: list[int] = []
    while len(output) < params.max_tokens:
        barred = tuple(sorted(stops)) if len(output) < params.min_tokens else ()
        output.append(draw(history(tokens + output), sequence_seed(params.seed, index), barred))
        if output[-1] in stops and len(output) > params.min_tokens:
            break
    return output


def params(**changes: Any) -> SamplingParams:
    """Plain sampling parameters with some changed."""
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "max_tokens": 8,
        "min_tokens": 0,
        "stop_token_ids": frozenset(),
        "ignore_eos": True,
        "n": 1,
        "logprobs": -1,
        "prompt_logprobs": -1,
    }
    unknown = changes.keys() - values.keys()
    if unknown:
        raise ValueError(f"no such parameters: {sorted(unknown)}")
    return SamplingParams(**{**values, **changes})
