"""The session protocol by values: what a frontend may say, in which order, and what each violation costs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from greenlane.engine.v1 import engine_pb2 as pb

from engine_core.errors import StatusCode
from engine_core.request import (
    Abort,
    CloseSession,
    Grammar,
    Request,
    prefix_chain,
)
from engine_core.session import HEARTBEAT_S, HELLO_S, MAX_ADDS, Session, SessionBroken
from tests.unit.session_rig import HELLO, LIMITS, add, break_with, opened, packed, refusals, request_of, sampling

# ------------------------------ hello


def test_nothing_is_said_before_hello() -> None:
    """Red when the welcome, or anything else, goes out to a client that hasn't said hello."""
    session = opened(greeted=False)
    assert session.take(100.0) is None


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (add(), "hello must be in the first message"),
        (pb.SessionRequest(hello=pb.Hello(protocol_version=2)), "protocol version 2"),
        (pb.SessionRequest(hello=pb.Hello()), "protocol version 0"),
        (pb.SessionRequest(hello=pb.Hello(protocol_version=1, client_name="é" * 65)), "client_name"),
        *(
            (pb.SessionRequest(hello=pb.Hello(protocol_version=1, heartbeat_s=wrong)), "heartbeat_s")
            for wrong in (0.0, 0.09, 61.0, float("inf"), float("nan"))
        ),
    ],
)
def test_a_wrong_first_message_breaks_the_session(first: pb.SessionRequest, text: str) -> None:
    """Red when a version, name or interval goes unchecked, or requests are taken from a client that said no hello."""
    break_with(opened(greeted=False), first, StatusCode.INVALID_ARGUMENT, text)


def test_a_second_hello_breaks_the_session() -> None:
    """Red when hello is honoured twice."""
    break_with(opened(), HELLO, StatusCode.INVALID_ARGUMENT, "only there")


def test_hello_must_come_in_time() -> None:
    """Red when a connection may hold one of the bounded places for ever without speaking."""
    session = opened(greeted=False)
    assert session.due(HELLO_S - 0.1) == HELLO_S
    with pytest.raises(SessionBroken, match="no hello came"):
        session.due(HELLO_S)
    assert opened().due(1000.0) == HEARTBEAT_S


# ------------------------------ requests


def test_a_request_is_read_by_values() -> None:
    """Red when a field is dropped, mixed up with another, or the deadline isn't counted from receipt."""
    message = add(
        number=5,
        ids=packed(*range(1, 10)),
        cache_salt="tenant",
        sampling=sampling(temperature=0.5, seed=2**64 - 1, max_tokens=7, stop_token_ids=[3], logit_bias={4: -1.5}, n=2),
        priority=-3,
        deadline_s=2.5,
        label="mine",
    )
    request = request_of(opened(), message, now=10.0)
    assert (request.session, request.number, request.priority) == (7, 5, -3)
    assert request.ids.tolist() == list(range(1, 10))
    assert (request.salt, request.deadline, request.label) == (b"tenant", 12.5, "mine")
    params = request.params
    assert (params.temperature, params.seed, params.max_tokens, params.n) == (0.5, 2**64 - 1, 7, 2)
    assert (params.stop_token_ids, params.logit_bias) == (frozenset({3}), {4: -1.5})


def test_absent_fields_take_their_defaults() -> None:
    """Red when presence isn't respected: an absent salt is not the empty one, an absent seed is drawn."""
    request = request_of(opened(), add())
    assert request.salt is None
    assert request.deadline is None
    assert request.params.seed == 42
    assert request.params.max_tokens == LIMITS.max_model_len - 3
    assert request.params.temperature == 1.0
    assert request_of(opened(), add(cache_salt="")).salt == b""


def test_prefix_hashes_are_the_clients_or_computed_here() -> None:
    """Red when absent hashes stay empty, or the chain here differs from the one that engine.proto defines."""
    ids = packed(*range(1, 10))
    root = hashlib.sha256(b"greenlane.prefix.v1\x01s").digest()
    first = hashlib.sha256(root + ids[:16]).digest()
    chain = first + hashlib.sha256(first + ids[16:32]).digest()
    assert request_of(opened(), add(ids=ids, cache_salt="s")).hashes == chain
    own = bytes(range(64))
    assert request_of(opened(), add(ids=ids, prefix_hashes=own)).hashes == own
    assert prefix_chain(np.frombuffer(ids, "<i4"), 4, b"s") == chain


@pytest.mark.parametrize(
    ("fields", "reason", "parameter"),
    [
        ({"ids": b""}, pb.REJECT_REASON_EMPTY_PROMPT, "prompt"),
        ({"ids": packed(1, 1000)}, pb.REJECT_REASON_TOKEN_OUT_OF_VOCABULARY, "prompt"),
        ({"ids": packed(-1)}, pb.REJECT_REASON_TOKEN_OUT_OF_VOCABULARY, "prompt"),
        ({"ids": packed(*[1] * 128)}, pb.REJECT_REASON_CONTEXT_EXCEEDED, "prompt"),
        ({"sampling": sampling(max_tokens=126)}, pb.REJECT_REASON_CONTEXT_EXCEEDED, "max_tokens"),
        ({"sampling": sampling(max_tokens=0)}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "max_tokens"),
        ({"sampling": sampling(temperature=float("nan"))}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "temperature"),
        ({"sampling": sampling(repetition_penalty=0.0)}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "repetition_penalty"),
        ({"sampling": sampling(logit_bias={1: float("inf")})}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "logit_bias"),
        ({"sampling": sampling(n=0)}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "n"),
        ({"sampling": sampling(n=129)}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "n"),
        ({"deadline_s": 0.0}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "deadline_s"),
        ({"deadline_s": float("nan")}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "deadline_s"),
        ({"deadline_s": float("inf")}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "deadline_s"),
        ({"cache_salt": "x" * 257}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "cache_salt"),
        ({"label": "ü" * 129}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "label"),
        ({"prefix_hashes": bytes(32)}, pb.REJECT_REASON_MALFORMED, "prefix_hashes"),
        ({"ids": packed(1, 2, 3, 4), "prefix_hashes": b""}, pb.REJECT_REASON_MALFORMED, "prefix_hashes"),
        ({"grammar": pb.Grammar()}, pb.REJECT_REASON_MALFORMED, "grammar"),
        ({"grammar": pb.Grammar(regex="é" * 65_537)}, pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE, "grammar"),
        (
            {"grammar": pb.Grammar(regex="a"), "sampling": sampling(min_tokens=1)},
            pb.REJECT_REASON_PARAMETER_OUT_OF_RANGE,
            "min_tokens",
        ),
    ],
)
def test_a_bad_request_is_refused_and_harms_nothing_else(
    fields: Mapping[str, Any], reason: int, parameter: str
) -> None:
    """Red when a check is lost, names the wrong field, or a refusal breaks the session (cases 13, 15, 16)."""
    session = opened()
    (finish,) = refusals(session, add(1, **fields))
    assert (finish.number, finish.reason) == (1, pb.FINISH_REASON_REJECTED)
    assert (finish.error.reject_reason, finish.error.parameter) == (reason, parameter)
    assert finish.error.code == StatusCode.INVALID_ARGUMENT
    assert session.rejected == 1
    assert request_of(session, add(2)).number == 2


def test_a_grammar_is_passed_on_as_text() -> None:
    """Red when a kind of grammar is lost or renamed on its way, or one is read into a request without any."""
    assert request_of(opened(), add()).grammar is None
    for kind in ("json_schema", "regex", "lark", "choice", "structural_tag"):
        message = add(grammar=pb.Grammar(**{kind: "text"}))
        assert request_of(opened(), message).grammar == Grammar(kind, "text")


def test_a_worker_without_masks_has_grammars_refused_by_name() -> None:
    """Red when a device that can't mask is asked to follow a grammar, or the client isn't told why not."""
    limits = dataclasses.replace(LIMITS, no_grammars="the model's folder has no tokenizer.json")
    session = Session(7, limits, pb.GetInfoResponse(), now=0.0, draw_seed=lambda: 42)
    session.receive(HELLO, 0.0)
    assert session.take(0.0) is not None
    session.written(0.0)
    (finish,) = refusals(session, add(grammar=pb.Grammar(regex="a")))
    assert (finish.error.reject_reason, finish.error.parameter) == (pb.REJECT_REASON_UNSUPPORTED, "grammar")
    assert "no tokenizer.json" in finish.error.message


def test_every_sequence_of_a_refused_request_gets_its_last_word() -> None:
    """Red when a frontend that waits for n last words would wait for ever (case 5)."""
    session = opened()
    finishes = refusals(session, add(10, sampling=sampling(n=3, temperature=-1.0)))
    assert [finish.number for finish in finishes] == [10, 11, 12]
    assert session.rejected == 3


def test_a_refused_request_between_good_ones_keeps_the_order() -> None:
    """Red when a refusal drops its neighbours in the same message."""
    session = opened()
    good, bad = add(1).adds[0], add(2, ids=b"").adds[0]
    last = add(3).adds[0]
    commands = session.receive(pb.SessionRequest(adds=[good, bad, last]), 0.0)
    assert [command.number for command in commands if isinstance(command, Request)] == [1, 3]


# ------------------------------ protocol violations


def test_numbers_must_increase_beyond_all_n() -> None:
    """Red when a number inside an earlier request's range is accepted: two sequences would share it."""
    session = opened()
    assert request_of(session, add(10, sampling=sampling(n=4))).number == 10
    break_with(session, add(13), StatusCode.INVALID_ARGUMENT, "must be at least 14")
    session = opened()
    request_of(session, add(10, sampling=sampling(n=4)))
    assert request_of(session, add(14)).number == 14
    break_with(session, add(14), StatusCode.INVALID_ARGUMENT, "must be at least 15")


def test_numbers_stay_within_64_bits() -> None:
    """Red when the last of n numbers wraps around."""
    session = opened()
    break_with(session, add(2**64 - 2, sampling=sampling(n=3)), StatusCode.INVALID_ARGUMENT, "64 bits")
    assert request_of(opened(), add(2**64 - 3, sampling=sampling(n=3))).number == 2**64 - 3


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (add(ids=b"\x01\x00\x00"), "prompt_ids has 3 bytes"),
        (add(prefix_hashes=bytes(31)), "prefix_hashes has 31 bytes"),
        (pb.SessionRequest(aborts=bytes(12)), "aborts has 12 bytes"),
        (pb.SessionRequest(ack=1), "ack 1"),
    ],
)
def test_ragged_columns_and_unsent_acks_break_the_session(message: pb.SessionRequest, text: str) -> None:
    """Red when a column that is cut off is read as far as it goes, or an ack for the future is believed."""
    break_with(opened(), message, StatusCode.INVALID_ARGUMENT, text)


def test_aborts_follow_the_adds_of_their_message() -> None:
    """Red when an abort overtakes the add that it is about, or its numbers are misread."""
    session = opened()
    message = add(2**63)
    message.aborts = np.array([2**63, 4], "<u8").tobytes()
    request, abort = session.receive(message, 0.0)
    assert isinstance(request, Request)
    assert abort == Abort(7, (2**63, 4))
    assert session.close() == CloseSession(7)


def test_too_many_adds_in_one_message_break_the_session() -> None:
    """Red if one message may hold up every other session while its adds are checked."""
    one = [pb.AddRequest(number=number, prompt_ids=packed(1)) for number in range(1, MAX_ADDS + 2)]
    break_with(opened(), pb.SessionRequest(adds=one), StatusCode.INVALID_ARGUMENT, "at most 256 are allowed")
    assert len(opened().receive(pb.SessionRequest(adds=one[:-1]), 0.0)) == MAX_ADDS
