"""`--decode-overlap auto` in real processes on the fake device: any mix of ways gives the tokens of `off`."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from greenlane.engine.v1 import engine_pb2, engine_pb2_grpc

from engine_core.device.green import AUTO_DECODE_SMS
from tests.e2e.conftest import MakeServer
from tests.e2e.harness import CHANNEL_OPTIONS, Server

pytestmark = pytest.mark.e2e

CLIENTS = 12
LENGTHS = (5, 40, 64, 300, 900)
FLAGS = ("--device=fake", "--no-enable-prefix-caching", "--max-num-seqs=16", "--kv-cache-memory=64MiB")


def answers(server: Server) -> list[list[int]]:
    """Tokens of forty requests, a dozen at a time: long answers to short prompts beside short ones to long prompts."""
    rng = random.Random(3)
    bodies: list[dict[str, Any]] = [
        {
            "prompt": [rng.randrange(10, 4000) for _ in range(rng.choice(LENGTHS))],
            "max_tokens": rng.choice((2, 200)),
            "temperature": rng.choice((0.0, 1.0)),
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for number in range(40)
    ]
    with ThreadPoolExecutor(CLIENTS) as pool:
        replies = list(pool.map(lambda body: server.complete(**body), bodies))
    assert [reply.status_code for reply in replies] == [200] * len(bodies)
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]


def ways(server: Server) -> dict[str, float]:
    metrics = server.metrics()
    return {way: metrics["greenlane_engine_prefills_total", "1", way] for way in ("alone", "mixed", "lane")}


def test_auto_gives_the_tokens_of_off(make_server: MakeServer) -> None:
    """Red when a choice of the policy changes a token, loses a request, or `auto` never puts a prompt beside decode."""
    auto, off = make_server(*FLAGS, "--decode-overlap=auto"), make_server(*FLAGS, "--decode-overlap=off")
    assert answers(auto) == answers(off)
    chosen = ways(auto)
    assert chosen["alone"] > 0
    assert chosen["mixed"] + chosen["lane"] > 0
    assert ways(off)["lane"] == 0


def test_the_splits_that_auto_chooses_from_are_told(make_server: MakeServer) -> None:
    """Red when the start-up line or GetInfo names one split as if it were always in force."""
    server = make_server(*FLAGS, "--decode-overlap=auto")
    spoken = ", ".join(map(str, AUTO_DECODE_SMS))
    assert f"lanes auto ({spoken} of 132 SMs for decode)" in server.logged()
    with grpc.insecure_channel(server.engine, options=CHANNEL_OPTIONS) as channel:
        info = engine_pb2_grpc.EngineStub(channel).GetInfo(engine_pb2.GetInfoRequest(), timeout=60)
    assert tuple(info.lanes.decode_sms_choices) == AUTO_DECODE_SMS
    assert info.lanes.decode_sms == AUTO_DECODE_SMS[-1]


def test_what_is_in_force_is_told(make_server: MakeServer) -> None:
    """Red when the start-up line, GetInfo or the metrics don't say the mode, each lane's SMs and their alignment."""
    server = make_server(*FLAGS, "--decode-overlap=green", "--decode-sms=32")
    assert "lanes green (32 SMs beside 100, in steps of 8)" in server.logged()
    lanes = server.ready["info"]["lanes"]
    assert lanes.pop("decode_sms_choices") == []
    assert lanes == {"overlap": "green", "decode_sms": 32, "prefill_sms": 100, "sm_alignment": 8}
    metrics = server.metrics()
    told = {lane: metrics["greenlane_engine_lane_sms", "1", lane, "green"] for lane in ("primary", "prefill")}
    assert told == {"primary": 32, "prefill": 100}
    assert metrics["greenlane_engine_sm_alignment", "1"] == 8
    with grpc.insecure_channel(server.engine, options=CHANNEL_OPTIONS) as channel:
        info = engine_pb2_grpc.EngineStub(channel).GetInfo(engine_pb2.GetInfoRequest(), timeout=60)
    assert (info.lanes.overlap, info.lanes.decode_sms, info.lanes.prefill_sms) == ("green", 32, 100)
