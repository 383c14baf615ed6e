"""vllm.grpc.engine requests as text requests.

Owns what that contract's zeros mean (unset, in fields without presence) and the refusal, by name, of what isn't served.
Ranges are the engine core's to check, but for `n`.
"""

from __future__ import annotations

from typing import Any

from frontend.grammar import ANY_OBJECT, choice
from frontend.grpc_call import MAX_LABEL_CHARS
from frontend.openai_fields import invalid
from frontend.openai_types import MAX_N
from frontend.request import Grammar, Sampling, TextRequest
from frontend.serving import Served
from frontend.wire import MAX_LOGIT_BIAS, MAX_STOP_IDS, cap

UNSERVED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")
SEEDS = 1 << 64
"""A seed is taken modulo this: the contract allows negative ones."""


async def prompt_ids(served: Served, request: Any) -> list[int]:
    """The prompt of a GenerateRequest. Raises ApiError (INVALID_ARGUMENT) for none, and for inputs not served."""
    for name in UNSERVED:
        if request.HasField(name):
            raise invalid(f"{name} is not served here", name)
    if request.extra_mm_inputs:
        raise invalid("extra_mm_inputs is not served here", "extra_mm_inputs")
    if request.data_parallel_rank:
        raise invalid(f"data_parallel_rank is {request.data_parallel_rank}; there is only rank 0", "data_parallel_rank")
    match request.WhichOneof("input"):
        case "tokenized":
            served.check_length(len(request.tokenized.input_ids))
            return list(request.tokenized.input_ids)
        case "text":
            return await served.encode(request.text)
    raise invalid("input is missing: set tokenized or text", "input")


def text_request(request: Any, ids: list[int], deadline: float | None) -> TextRequest:
    """What to ask of the engine core. `spaces_between_special_tokens` changes text alone, of which none is sent, and
    `skip_special_tokens` only where stop strings are found. Raises ApiError (INVALID_ARGUMENT)."""
    params = request.sampling_params
    if params.HasField("truncate_prompt_tokens"):
        raise invalid(
            "truncate_prompt_tokens is not served; cut the prompt before sending it", "truncate_prompt_tokens"
        )
    return TextRequest(
        prompt_ids=ids,
        sampling=_sampling(params),
        stop=tuple(params.stop),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        deadline_s=deadline,
        label=request.request_id[:MAX_LABEL_CHARS],
        grammar=constraint(params),
    )


def constraint(params: Any) -> Grammar | None:
    """The one place that reads a constraint on the output. Raises ApiError (INVALID_ARGUMENT) naming its kind."""
    kind = params.WhichOneof("constraint")
    match kind:
        case None:
            return None
        case "json_object":
            return Grammar("json_schema", ANY_OBJECT, kind) if params.json_object else None
        case "choice":
            return choice(list(params.choice.choices), kind)
    return Grammar("lark" if kind == "grammar" else kind, getattr(params, kind), kind)


def _sampling(params: Any) -> Sampling:
    if params.n > MAX_N:  # answers are allocated from it before the engine core sees it
        raise invalid(f"n is {params.n}; it must be from 1 to {MAX_N}", "n")
    cap("stop_token_ids", len(params.stop_token_ids), MAX_STOP_IDS)
    cap("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS)
    seed = _present(params, "seed")
    return Sampling(
        temperature=_present(params, "temperature"),
        top_p=params.top_p or None,
        top_k=params.top_k or None,
        min_p=params.min_p or None,
        seed=None if seed is None else seed % SEEDS,
        repetition_penalty=params.repetition_penalty or None,
        presence_penalty=params.presence_penalty or None,
        frequency_penalty=params.frequency_penalty or None,
        logit_bias=dict(params.logit_bias),
        max_tokens=_present(params, "max_tokens"),
        min_tokens=params.min_tokens or None,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos or None,
        n=params.n or None,
        logprobs=_present(params, "logprobs"),
        prompt_logprobs=_present(params, "prompt_logprobs"),
    )


def _present(params: Any, name: str) -> Any:
    """A field with presence, None where it is absent."""
    return getattr(params, name) if params.HasField(name) else None
