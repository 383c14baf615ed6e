"""What a client may ask for: every range, every default, and what derived values are made of."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest

from engine_core.errors import Rejected, RejectReason, StatusCode
from engine_core.request import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_IDS,
    ModelLimits,
    RawSampling,
    SamplingDefaults,
    SamplingParams,
    check_prompt,
    prefix_chain,
    prefix_next,
    prefix_root,
    resolve,
    sequence_seed,
)

LIMITS = ModelLimits(
    vocab_size=100,
    max_model_len=64,
    page_size=4,
    total_pages=16,
    eos_token_ids=(2,),
    defaults=SamplingDefaults(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1),
)


def resolved(prompt_len: int = 4, **fields: Any) -> SamplingParams:
    return resolve(RawSampling(**fields), prompt_len, LIMITS, drawn_seed=99)


def ids(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def test_absent_means_the_model_s_default() -> None:
    """Red when a default changes, or when absent and zero become the same."""
    assert resolved() == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        seed=99,
        repetition_penalty=1.1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={},
        max_tokens=60,
        min_tokens=0,
        stop_token_ids=frozenset(),
        ignore_eos=False,
        n=1,
        logprobs=-1,
        prompt_logprobs=-1,
    )


def test_present_values_are_taken_as_they_are() -> None:
    given: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 7,
        "min_p": 0.0,
        "seed": 2**64 - 1,
        "repetition_penalty": 2.0,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "logit_bias": {5: -100.0},
        "max_tokens": 60,
        "min_tokens": 60,
        "ignore_eos": True,
        "n": MAX_N,
        "logprobs": 0,
        "prompt_logprobs": 20,
    }
    params = resolved(**given)
    assert {name: getattr(params, name) for name in given} == given


@pytest.mark.parametrize("value", [-1, 0, 100, 10**9])
def test_top_k_off(value: int) -> None:
    """-1, 0 and anything that keeps the whole vocabulary are all "off"."""
    assert resolved(top_k=value).top_k == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 10**20),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 100.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 61),
        ("stop_token_ids", tuple(range(MAX_STOP_IDS + 1))),
        ("n", 0),
        ("n", MAX_N + 1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
    ],
)
def test_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    """Cases 15 and 16. Red when a bound moves or the refusal names another field."""
    with pytest.raises(Rejected) as refusal:
        resolved(**{name: value})
    assert refusal.value.reason is RejectReason.PARAMETER_OUT_OF_RANGE
    assert refusal.value.parameter == name
    assert refusal.value.reason.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"],
)
def test_not_a_number_is_refused(name: str, value: float) -> None:
    """Red when a comparison lets NaN or an infinity through to the sampler."""
    fields: dict[str, Any] = {name: {5: value} if name == "logit_bias" else value}
    with pytest.raises(Rejected) as refusal:
        resolved(**fields)
    assert refusal.value.parameter == name


@pytest.mark.parametrize(("name", "value"), [("stop_token_ids", (100,)), ("logit_bias", {-1: 0.0})])
def test_ids_outside_the_vocabulary(name: str, value: Any) -> None:
    with pytest.raises(Rejected) as refusal:
        resolved(**{name: value})
    assert (refusal.value.reason, refusal.value.parameter) == (RejectReason.TOKEN_OUT_OF_VOCABULARY, name)


def test_prompt_and_output_share_the_context() -> None:
    """Red when max_tokens is cut silently, or the last token that fits is refused."""
    assert resolved(prompt_len=60, max_tokens=4).max_tokens == 4
    with pytest.raises(Rejected) as refusal:
        resolved(prompt_len=60, max_tokens=5)
    assert (refusal.value.reason, refusal.value.parameter) == (RejectReason.CONTEXT_EXCEEDED, "max_tokens")
    assert "prompt + max_tokens <= max_model_len" in refusal.value.message


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (ids(), RejectReason.EMPTY_PROMPT),
        (ids(1, 100), RejectReason.TOKEN_OUT_OF_VOCABULARY),
        (ids(1, -1), RejectReason.TOKEN_OUT_OF_VOCABULARY),
        (ids(*[1] * 64), RejectReason.CONTEXT_EXCEEDED),
    ],
)
def test_prompts_that_can_t_be_served(prompt: np.ndarray[tuple[int], np.dtype[np.int32]], reason: RejectReason) -> None:
    """Case 13. Red when one of these reaches the engine."""
    with pytest.raises(Rejected) as refusal:
        check_prompt(prompt, LIMITS)
    assert (refusal.value.reason, refusal.value.parameter) == (reason, "prompt")


def test_the_longest_prompt_leaves_one_token() -> None:
    check_prompt(ids(*[0] * 62, 99), LIMITS)


def test_refusals_have_their_status() -> None:
    retry = {RejectReason.QUEUE_FULL: StatusCode.RESOURCE_EXHAUSTED, RejectReason.DRAINING: StatusCode.UNAVAILABLE}
    for reason in RejectReason:
        assert reason.code is retry.get(reason, StatusCode.INVALID_ARGUMENT)


def test_sequences_of_a_request_draw_with_seeds_of_their_own() -> None:
    """Case 5. Red when n sequences draw alike, or the first doesn't draw as n = 1 would."""
    seeds = [sequence_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(4)]
    assert seeds[0::4] == [0, 1, 2**64 - 1]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_prefix_chain_is_what_the_wire_contract_says() -> None:
    """Red when the chain's definition changes: every frontend computes it, too."""
    root = hashlib.sha256(b"greenlane.prefix.v1\x01tenant").digest()
    first = hashlib.sha256(root + np.array([1, 2], "<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.array([3, 4], "<i4").tobytes()).digest()
    assert prefix_chain(ids(1, 2, 3, 4, 5), 2, b"tenant") == first + second
    assert prefix_next(prefix_root(b"tenant"), np.array([1, 2], "<i4").tobytes()) == first
    assert prefix_chain(ids(1), 2, None) == b""
    assert len({prefix_root(None), prefix_root(b""), prefix_root(b"\x00"), prefix_root(b"tenant")}) == 4
