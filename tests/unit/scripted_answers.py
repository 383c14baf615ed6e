"""A served model whose answers a test writes: the real edges, tokenizer and template over no engine core at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.chat_template import ChatTemplate
from frontend.config import Place
from frontend.engine_client import ClientState
from frontend.http_server import HttpServer
from frontend.kv_events import Core
from frontend.listeners import HttpListener, bind, http_address
from frontend.metrics import Metrics
from frontend.openai_api import OpenAiApi
from frontend.peers import Peers
from frontend.request import ApiError, Delta, TextRequest, TokenLogprob, Usage
from frontend.scrape import Scrape
from frontend.serving import Health, Served
from frontend.status_pages import StatusPages
from frontend.tokenizer import Tokenizer

HANG_GUARD_S = 60.0
FIXTURE = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"
MAX_BODY = 1 << 20
NOW = 1_700_000_000.9

Step = Sequence[Delta] | ApiError | None
"""Deltas, a failure, or None: wait for a `release()`."""
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {% if open %}<think>\n{% endif %}"
    "{# </think> #}"
)


def words(*texts: str, index: int = 0, finish: str = "stop") -> list[list[Delta]]:
    """One step a text, each one token; the last one ends the sequence."""
    steps = [[Delta(index, text, [100 + i])] for i, text in enumerate(texts)]
    steps[-1][0].finish_reason = finish
    return steps


def gated(steps: Sequence[Step]) -> list[Step]:
    """The steps with a wait before each."""
    return [each for step in steps for each in (None, step)]


class ScriptedAnswer:
    """Plays the steps of its script."""

    def __init__(self, request: TextRequest, script: Script) -> None:
        self.request = request
        self.prompt_logprobs: list[TokenLogprob] | None = script.prompt_logprobs
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self.started = False
        self.asked = False
        self.closed = 0
        self._script = script
        self._steps = script.next_steps.pop(0) if script.next_steps else script.steps
        self._released = asyncio.Semaphore(0)

    def release(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._released.release()

    async def accepted(self) -> None:
        self.asked = True
        if self._script.gated_acceptance:
            await self._released.acquire()
        if self._script.refusal is not None:
            raise self._script.refusal

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self._play()

    async def _play(self) -> AsyncIterator[list[Delta]]:
        for step in self._steps:
            if step is None:
                await self._released.acquire()
                continue
            if isinstance(step, ApiError):
                raise step
            self.usage.completion_tokens += sum(len(delta.token_ids) for delta in step)
            self.usage.cached_tokens = self._script.cached_tokens
            yield [Delta(d.index, d.text, d.token_ids, d.logprobs, d.finish_reason, d.stop_reason) for d in step]

    async def aclose(self) -> None:
        self.closed += 1


class Script:
    """What every request is answered; `answers` are those that were."""

    def __init__(self) -> None:
        self.steps: Sequence[Step] = words("Hello", " world")
        self.next_steps: list[Sequence[Step]] = []
        """Of the next requests, one each; then `steps` again."""
        self.refusal: ApiError | None = None
        self.surprise: Exception | None = None
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.cached_tokens = 3
        self.gated_acceptance = False
        self.answers: list[ScriptedAnswer] = []

    def start(self, request: TextRequest) -> ScriptedAnswer:
        if self.surprise is not None:
            raise self.surprise
        self.answers.append(ScriptedAnswer(request, self))
        return self.answers[-1]

    @property
    def request(self) -> TextRequest:
        """The newest request."""
        return self.answers[-1].request


class UntoldCore:
    """Nothing is known of its cache."""

    async def serving(self) -> None:
        await asyncio.Event().wait()

    def watch_cache(self) -> Any:
        raise NotImplementedError


class QuietEngine:
    """An engine core that is there and does nothing."""

    def __init__(self) -> None:
        self.state = ClientState.SERVING
        self.fail_stops = self.sessions_lost = 0
        self.clients: list[Core] = [UntoldCore()]
        self.info: pb.GetInfoResponse | None = pb.GetInfoResponse(
            device="cpu", vocab_size=4096, limits=pb.Limits(max_model_len=2048)
        )
        self.stats = pb.GetStatsResponse(uptime_s=5.0)
        self.failure: ApiError | None = None

    async def each_stats(self) -> list[pb.GetStatsResponse | None]:
        return [None if self.failure is not None else self.stats]

    async def flush_cache(self) -> int:
        raise NotImplementedError


class Site:
    """The whole HTTP application over a script."""

    def __init__(self, template_source: str | None = None, with_template: bool = True) -> None:
        self.script = Script()
        self.engine = QuietEngine()
        self.metrics = Metrics()
        self.tokenizer = Tokenizer.load(FIXTURE)
        template = ChatTemplate.load(FIXTURE, self.tokenizer.named_tokens)
        if template_source is not None:
            template = ChatTemplate(template_source, self.tokenizer.named_tokens)
        self.time = 0.0
        self.told_health: list[Health] = []
        self.served = Served(
            names=("austen", "tiny/alias"),
            tokenizer=self.tokenizer,
            template=template if with_template else None,
            engine=self.engine,
            start=self.script.start,
            on_lost=self._lose,
            metrics=self.metrics,
            clock=lambda: self.time,
        )
        ids = iter(range(1, 1 << 30))
        self.api = OpenAiApi(self.served, lambda: NOW, lambda: f"id{next(ids)}")
        self.pages = StatusPages(self.served, Scrape(self.served, Peers(Place())), "1.2.3", lambda: self.time)
        self.app = HttpServer({**self.api.routes(), **self.pages.routes()}, MAX_BODY)

    async def _lose(self) -> None:
        self.told_health.append(self.served.health)

    def client(self) -> httpx.AsyncClient:
        """A client of the application without a socket; a stream's events arrive all at once at its end."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://front")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The application on a real socket, served by the product's own listener; gives the base URL."""
        listener = bind("127.0.0.1", 0)
        address = http_address(listener)
        http = HttpListener(self.app, listener)
        http.start()
        try:
            yield address
        finally:
            await http.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(HANG_GUARD_S):
        for _ in iter(condition, True):
            await asyncio.sleep(0.001)
