"""What VllmEngine says of its server, over scripted answers: health, model, tokenizer, load; and its connections."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import socket
import struct
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2 as common

from frontend import vllm_service
from frontend.engine_client import ClientState
from frontend.load_meter import FRESH_S, LoadMeter
from frontend.model_files import ModelFiles
from frontend.request import ApiError, Code
from frontend.tokenizer import Tokenizer
from tests.unit.rich_errors import retry_ms
from tests.unit.scripted_answers import FIXTURE, until
from tests.unit.vllm_front import Scripted, failed, scripted


@pytest_asyncio.fixture
async def front() -> AsyncIterator[Scripted]:
    async with scripted() as front:
        yield front


# ------------------------------ what is said of the server


async def test_health(front: Scripted) -> None:
    """Red if a server that is still starting answers at all (a gateway takes that for ready), or one that is lost or
    draining calls itself healthy."""

    async def check() -> Any:
        return await front.engine.HealthCheck(pb.HealthCheckRequest())

    assert (await check()) == pb.HealthCheckResponse(healthy=True, message="serving")
    front.site.engine.state = ClientState.DEAD
    assert (await check()) == pb.HealthCheckResponse(healthy=False, message="dead")
    front.site.engine.state = ClientState.CONNECTING
    assert (await failed(check())).code() is grpc.StatusCode.UNAVAILABLE
    front.site.served.drain()
    assert (await check()) == pb.HealthCheckResponse(healthy=False, message="draining")
    error = await failed(front.generate(text="x"))
    assert (error.code(), retry_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 5000)


async def test_model_info(front: Scripted) -> None:
    """Red if a gateway can't find the tokenizer, or is told limits and defaults that aren't the engine core's."""
    assert front.site.engine.info is not None
    front.site.engine.info.architecture = "Qwen3ForCausalLM"
    front.site.engine.info.eos_token_ids.append(2)
    front.site.engine.info.defaults.CopyFrom(
        engine_pb2.SamplingDefaults(temperature=0.5, top_p=1.0, top_k=20, repetition_penalty=1.0)
    )
    info = await front.engine.GetModelInfo(pb.GetModelInfoRequest())
    assert info.model_path == info.tokenizer_path == str(FIXTURE.resolve())
    assert (info.served_model_name, info.model_type, info.is_generation) == ("austen", "qwen3", True)
    assert ([*info.architectures], [*info.eos_token_ids]) == (["Qwen3ForCausalLM"], [2])
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (2048, 2047, 4096)
    assert info.default_sampling_params_json == '{"temperature": 0.5, "top_k": 20}'
    front.site.engine.info = None
    error = await failed(front.engine.GetModelInfo(pb.GetModelInfoRequest()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_server_info(front: Scripted) -> None:
    """Red if the open requests or what the engine core serves with are made up."""
    assert front.site.engine.info is not None
    front.site.engine.info.page_size = 16
    front.site.engine.info.dtype = "float32"
    front.site.engine.info.limits.max_num_seqs = 8
    front.site.script.steps = [None]
    call = front.generate(text="x")
    await until(lambda: len(front.site.script.answers) == 1)
    info = await front.engine.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.active_requests, info.uptime_seconds, info.server_type) == (1, 5.0, "vllm-grpc")
    assert (info.block_size, info.model_dtype, info.max_num_seqs, info.is_paused) == (16, "float32", 8, False)
    assert info.last_receive_timestamp > 0
    call.cancel()


async def test_tokenizer(front: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red if the archive's pieces don't add up to a tokenizer like ours, or its digest stands on another piece."""
    monkeypatch.setattr(vllm_service, "CHUNK_BYTES", 10_000)
    chunks = [chunk async for chunk in front.engine.GetTokenizer(common.GetTokenizerRequest())]
    assert len(chunks) > 2
    archive = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        files.extractall(tmp_path)
        names = set(files.namelist())
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert "model.safetensors" not in names
    text = "Emma Woodhouse, handsome"
    assert Tokenizer.load(tmp_path).encode_inline(text) == front.site.tokenizer.encode_inline(text)


def test_same_files_same_archive(tmp_path: Path) -> None:
    """Red if the digest depends on anything but the files' contents: two machines would seem to serve two models."""
    copy = tmp_path / "copy"
    shutil.copytree(FIXTURE, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert ModelFiles.load(copy).sha256 == ModelFiles.load(FIXTURE).sha256


# ------------------------------ load


def busy(front: Scripted, uptime_s: float = 10.0, output_tokens: int = 100) -> None:
    """An engine core at work."""
    assert front.site.engine.info is not None
    front.site.engine.info.page_size = 16
    front.site.engine.info.limits.max_num_seqs = 4
    front.site.engine.stats = engine_pb2.GetStatsResponse(
        uptime_s=uptime_s,
        gauges=engine_pb2.Gauges(
            running=3, waiting=2, pages_total=200, pages_referenced=45, pages_retiring=5, pages_cached=100
        ),
        counters=engine_pb2.Counters(output_tokens=output_tokens, prefix_queries=8, prefix_hits=2),
    )


async def test_loads(front: Scripted) -> None:
    """Red if a figure isn't the engine core's: a gateway would send requests where there is no room."""
    busy(front)
    front.site.script.gated_acceptance = True
    call = front.generate(tokenized=pb.TokenizedInput(input_ids=[5] * 77))
    await until(lambda: len(front.site.script.answers) == 1)
    answer = await front.engine.GetLoads(pb.GetLoadsRequest())
    (load,) = answer.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (800, 3200, 0.25)
    assert (load.gen_throughput, load.cache_hit_rate, load.utilization) == (10.0, 0.25, 0.75)
    assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (4, 77)
    assert answer.dp_rank_count == 1
    assert len((await front.engine.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads) == 0
    call.cancel()


async def test_rate_between_samples(front: Scripted) -> None:
    """Red if the rate is the average since the start, or goes negative when the engine core was restarted."""
    now = 0.0
    meter = LoadMeter(front.served, lambda: now)

    async def rate(uptime_s: float, output_tokens: int) -> float:
        nonlocal now
        now += 1.0
        busy(front, uptime_s, output_tokens)
        return (await meter.sample()).tokens_per_s

    assert await rate(100.0, 1000) == 10.0
    assert await rate(102.0, 1500) == 250.0
    assert await rate(102.5, 9999) == 250.0
    assert await rate(1.0, 50) == 0.0
    assert await rate(3.0, 90) == 20.0
    assert await rate(60.0, 70) == 0.0  # one of two engine cores doesn't answer


async def test_several_engine_cores(front: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a gateway is told the load of all engine cores beside the room of one."""
    busy(front)
    one = front.site.engine.stats

    async def each() -> list[engine_pb2.GetStatsResponse | None]:
        return [one, None, one]

    monkeypatch.setattr(front.site.engine, "each_stats", each)
    (load,) = (await front.engine.GetLoads(pb.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.max_running_requests, load.utilization) == (6, 8, 0.75)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (1600, 6400, 0.25)


async def test_samples_are_shared(front: Scripted) -> None:
    """Red if many subscribers ask the engine core as often as there are of them."""
    now, asked = 0.0, 0
    meter = LoadMeter(front.served, lambda: now)
    busy(front)
    original = front.site.engine.each_stats

    async def counted() -> list[engine_pb2.GetStatsResponse | None]:
        nonlocal asked
        asked += 1
        return await original()

    front.site.engine.each_stats = counted  # type: ignore[method-assign]
    await asyncio.gather(*(meter.sample() for _ in range(10)))
    assert asked == 1
    now += 2 * FRESH_S
    await meter.sample()
    assert asked == 2
    front.site.engine.failure = ApiError(Code.UNAVAILABLE, "gone")
    now += 2 * FRESH_S
    with pytest.raises(ApiError):
        await meter.sample()


async def test_load_pushes(front: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a subscriber that takes load records gets none, or ones that look like cache events; or if the stream
    ends because the engine core is away for a moment."""
    monkeypatch.setattr(vllm_service, "PUSH_S", FRESH_S / 10)
    busy(front)
    request = common.SubscribeKvEventsRequest(load_records_before_first_batch=True)
    call = front.engine.SubscribeKvEvents(request)
    first = await call.read()
    front.site.engine.failure = ApiError(Code.UNAVAILABLE, "gone")
    await asyncio.sleep(2 * FRESH_S)
    front.site.engine.failure = None
    for _ in range(30):
        second = await call.read()
    assert (first.sequence_number, len(first.events), first.load.load_only) == (0, 0, True)
    assert (first.load.running_requests, first.load.waiting_requests, first.load.token_usage) == (3, 2, 0.25)
    assert (first.load.gen_throughput, first.load.max_running_requests) == (10.0, 4)
    assert second.load.sample > first.load.sample
    call.cancel()


async def test_subscriber_without_load_records(front: Scripted) -> None:
    """Red if an old subscriber gets batches that it can't read, or waits for ever to be connected."""
    call = front.engine.SubscribeKvEvents(common.SubscribeKvEventsRequest())
    await call.initial_metadata()
    reading = asyncio.ensure_future(call.read())
    await asyncio.sleep(0.1)
    assert not reading.done()
    call.cancel()


# ------------------------------ the connection


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    """An HTTP/2 frame on stream 0."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload


def frames(data: bytes) -> list[int]:
    """The kinds of the frames in `data`."""
    kinds, at = [], 0
    while at + 9 <= len(data):
        kinds.append(data[at + 3])
        at += 9 + int.from_bytes(data[at : at + 3], "big")
    return kinds


async def test_pings_do_no_harm(front: Scripted) -> None:
    """Red if a gateway that pings while nothing is said loses its connection ("too many pings"), and with it a long
    silent prefill."""
    ping, goaway = 6, 7
    host, port = front.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b""))
    received = b""
    for number in range(8):
        writer.write(frame(ping, 0, struct.pack(">Q", number)))
        async with asyncio.timeout(30):
            while frames(received).count(ping) <= number:
                data = await reader.read(4096)
                assert data, "the connection was closed"
                received += data
                assert goaway not in frames(received)
    writer.close()
