"""One frontend process from its settings to its exit status.

Owns the assembly of the parts, readiness, signals and draining. A lost engine core doesn't end the process: health
turns first, open requests fail, and the client reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import grpc.aio
import uvloop

from frontend import listeners
from frontend.chat_template import ChatTemplate
from frontend.config import ConfigError, FrontendConfig, Supervision
from frontend.engine_client import EngineClient
from frontend.engine_group import EngineGroup
from frontend.generate import generate
from frontend.guards import Guards
from frontend.health import HealthService
from frontend.http_server import HttpServer
from frontend.metrics import Metrics
from frontend.model_files import ModelFiles
from frontend.openai_api import OpenAiApi
from frontend.peers import Peers
from frontend.scrape import Scrape
from frontend.serving import Health, Served
from frontend.spans import Spans
from frontend.status_pages import OPEN_PATHS, StatusPages
from frontend.text_service import SERVICE, TextService
from frontend.tokenizer import Tokenizer, resolve
from frontend.vllm_service import SERVICE as VLLM_SERVICE
from frontend.vllm_service import VllmService
from telemetry.life import show_life
from telemetry.tracing import Tracing, TracingError

logger = logging.getLogger(__name__)

COLLECTIONS = (60_000, 2, 20)
"""Thresholds of garbage collection, in objects and in collections of the generation below."""
LAST_WORDS_S = 1.0
"""How long requests that were cut off may take to tell their clients."""


def run(config: FrontendConfig, supervision: Supervision) -> int:
    """Serve until a signal; the exit status: 0 stopped, 1 a server failed, 2 settings that can't be served."""
    try:
        guards = Guards.load(config)
        model = Model.load(config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_live(_serve(config, guards, model, supervision), supervision.alive_fd))
    except ConfigError as error:
        os.write(2, f"error: {error}\n".encode())
        return 2


@dataclass(frozen=True, slots=True)
class Model:
    """What a frontend needs of a model folder."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None: the model can't chat."""
    files: ModelFiles | None
    """None: no VllmEngine is served."""

    @classmethod
    def load(cls, config: FrontendConfig) -> Model:
        """Raises ConfigError for a folder that can't be served."""
        folder = resolve(config.model)
        tokenizer = Tokenizer.load(folder)
        files = None if config.vllm_grpc_port is None else ModelFiles.load(folder)
        return cls(tokenizer, _template(str(folder), tokenizer), files)


async def _live(serving: Awaitable[int], alive_fd: int | None) -> int:
    """Serve, with a sign of life beside where one is wanted."""
    if alive_fd is not None:
        os.set_blocking(alive_fd, False)
        show_life(alive_fd, asyncio.get_running_loop())
    return await serving


class Signals:
    """SIGTERM and SIGINT: the first asks to stop, the second to stop at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.at_once if self.stop.is_set() else self.stop).set()


async def _serve(config: FrontendConfig, guards: Guards, model: Model, supervision: Supervision) -> int:
    signals = Signals()
    client = _engines(config, guards)
    health = HealthService(SERVICE, *(() if model.files is None else (VLLM_SERVICE,)))
    served = _served(config, guards, model, supervision, client, health)
    peers, shared, traces = Peers(supervision.place), supervision.place.count > 1, spans(config)
    listener = listeners.bind(config.host, config.port, shared=shared)
    application = _application(served, peers, config, guards, traces)
    http = listeners.HttpListener(application, listener, guards.http_tls)
    servers = _grpc_servers(config, guards, served, health, model.files, peers, traces)
    addresses = {kind: address for kind, (_, address) in servers.items()}
    for server, _ in servers.values():
        await server.start()
    await peers.start()
    http_task = http.start()
    await client.start()
    try:
        if await _first(client.serving(), signals.stop.wait(), asyncio.wait((http_task,))) == 0:
            _check_vocabulary(client, model.tokenizer)
            http_address = listeners.http_address(listener, tls=guards.http_tls is not None)
            keep_out_of_collections()
            _announce(supervision.ready_fd, {"http": http_address, **addresses})
            await _first(signals.stop.wait(), asyncio.wait((http_task,)))
        failed = http_task.done()
        application.hurry()
        await _drain(served, health, client, signals, config.drain_timeout)
    finally:
        await client.close()
        await http.stop()
        await peers.stop()
        await asyncio.to_thread(traces.close)
        for server, _ in servers.values():
            await server.stop(0)
    return 1 if failed else 0


def _engines(config: FrontendConfig, guards: Guards) -> EngineGroup:
    timeout, connect, metadata = config.engine_timeout, guards.connect, guards.engine_metadata
    return EngineGroup(
        [
            EngineClient(address, engine_timeout=timeout, connect=connect, metadata=metadata)
            for address in config.engine_address.split(",")
        ]
    )


def _served(
    config: FrontendConfig,
    guards: Guards,
    model: Model,
    supervision: Supervision,
    client: EngineGroup,
    health: HealthService,
) -> Served:
    """The model over its engine cores; health follows their state from now on."""
    served = Served(
        names=config.served_model_name or (config.model,),
        tokenizer=model.tokenizer,
        template=model.template,
        engine=client,
        start=functools.partial(generate, client, model.tokenizer),
        on_lost=functools.partial(health.tell, False),
        metrics=Metrics(),
        clock=time.monotonic,
        request_timeout=config.request_timeout,
        engine_restarts=supervision.engine_restarts,
        keys=guards.keys,
    )
    client.on_state(lambda _: health.tell(served.health is Health.SERVING))
    return served


def keep_out_of_collections() -> None:
    """What stands by now stays: looking through it again and again would hold up every stream by tens of ms.

    Nor is there garbage in a burst of calls: with Python's own thresholds 256 that began together were looked through
    some fifty times, which took a seventh of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


def _grpc_servers(
    config: FrontendConfig,
    guards: Guards,
    served: Served,
    health: HealthService,
    files: ModelFiles | None,
    peers: Peers,
    traces: Spans,
) -> dict[str, tuple[grpc.aio.Server, str]]:
    """What speaks gRPC, with its address, by the name under which it is announced. Raises ConfigError."""
    text, size, shared = TextService(served, _new_id), config.max_body_bytes, peers.place.count > 1
    servers = {
        "grpc": listeners.grpc_server(
            *(config.host, config.grpc_port, text, health, size),
            tls=guards.grpc_tls,
            keys=guards.keys,
            shared=shared,
            spans=traces,
        )
    }
    if files is not None and config.vllm_grpc_port is not None:
        vllm = VllmService(served, files, peers, time.monotonic)
        servers["vllm"] = listeners.vllm_server(
            *(config.vllm_grpc_host, config.vllm_grpc_port, vllm, health, size), shared=shared, spans=traces
        )
    return servers


def spans(config: FrontendConfig) -> Spans:
    """Where the frontend's spans go, if somewhere. Raises ConfigError."""
    try:
        endpoint = config.otlp_traces_endpoint
        return Spans(None if endpoint is None else Tracing(endpoint, "greenlane-frontend"))
    except TracingError as error:
        raise ConfigError(str(error)) from error


def _application(served: Served, peers: Peers, config: FrontendConfig, guards: Guards, traces: Spans) -> HttpServer:
    api = OpenAiApi(served, time.time, _new_id)
    pages = StatusPages(served, Scrape(served, peers), version("greenlane"), time.monotonic)
    return HttpServer({**api.routes(), **pages.routes()}, config.max_body_bytes, guards.keys, OPEN_PATHS, traces)


async def _drain(
    served: Served, health: HealthService, client: EngineGroup, signals: Signals, drain_timeout: float
) -> None:
    """Refuse new requests, let the open ones finish, cut off what is left and let it say so."""
    served.drain()
    await health.tell(False)
    logger.info("stopping; open requests: %d", served.metrics.open_requests)
    await _first(served.idle(), signals.at_once.wait(), asyncio.sleep(drain_timeout))
    await client.close()
    await _first(served.idle(), asyncio.sleep(LAST_WORDS_S))
    await asyncio.sleep(0)


async def _first(*waits: Awaitable[object]) -> int:
    """The position of the wait that ended first; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(position for position, task in enumerate(tasks) if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _template(folder: str, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template; a model without one serves completions alone."""
    try:
        template = ChatTemplate.load(folder, tokenizer.named_tokens)
        template.prepare()
        return template
    except ConfigError as error:
        logger.warning("chats can't be served: %s", error)
        return None


def _check_vocabulary(client: EngineGroup, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a tokenizer whose ids the engine core's model doesn't have."""
    info = client.info
    if info is not None and tokenizer.vocab_size > info.vocab_size:
        raise ConfigError(
            f"--model's tokenizer has ids up to {tokenizer.vocab_size - 1}, the engine core's model only up to "
            f"{info.vocab_size - 1}: give both the same model"
        )


def _announce(ready_fd: int | None, addresses: Mapping[str, str]) -> None:
    """Tell whoever started this process, and the log, where it serves what."""
    logger.info("serving %s", ", ".join(f"{kind} on {address}" for kind, address in addresses.items()))
    if ready_fd is None:
        return
    line = json.dumps(addresses) + "\n"
    with contextlib.suppress(BrokenPipeError):
        os.write(ready_fd, line.encode())
    os.close(ready_fd)


def _new_id() -> str:
    return uuid.uuid4().hex
