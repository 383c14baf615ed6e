"""The model that a frontend serves, as its edges see it: names, prompts, limits, health, and the way in for requests.

Owns what the HTTP API and the text gRPC service share: the model check, chat rendering, the list of open requests and
the refusal of new calls while draining. Knows no wire format and samples nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from greenlane.engine.v1 import engine_pb2

from access.keys import KeyFile
from frontend.chat_template import ChatTemplate
from frontend.engine_client import ClientState
from frontend.engine_group import added_up
from frontend.kv_events import Core
from frontend.metrics import Figures, Metrics
from frontend.open_request import Answer, OpenRequest
from frontend.reasoning import template_thinks
from frontend.request import ApiError, ChatPrompt, Code, TextRequest, shutting_down
from frontend.spans import serving
from frontend.tokenizer import Tokenizer
from frontend.tools import template_calls
from frontend.wire import cap

INLINE_IDS = 4096
"""Longer lists of ids are decoded in a worker thread."""
MAX_DECODED_IDS = 1 << 20
"""Only to look through tens of millions stops everything else for seconds."""
NOT_THERE_YET = "the engine core isn't serving yet: it still loads its model, or isn't there; try again later"


class Health(enum.Enum):
    """Whether requests are taken; `SERVING` is the only yes."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


_HEALTH = {
    ClientState.CONNECTING: Health.STARTING,
    ClientState.STARTING: Health.STARTING,
    ClientState.DRAINING: Health.DRAINING,
    ClientState.SERVING: Health.SERVING,
    ClientState.DEAD: Health.DEAD,
    ClientState.CLOSED: Health.DEAD,
}


class Engine(Protocol):
    """What the edges ask of the engine cores beyond requests (`engine_group.EngineGroup`)."""

    state: ClientState
    info: engine_pb2.GetInfoResponse | None

    @property
    def clients(self) -> Sequence[Core]: ...

    @property
    def fail_stops(self) -> int: ...

    @property
    def sessions_lost(self) -> int: ...

    async def each_stats(self) -> list[engine_pb2.GetStatsResponse | None]: ...

    async def flush_cache(self) -> int: ...


class Served:
    """One model behind one or several engine cores."""

    def __init__(
        self,
        *,
        names: Sequence[str],
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        engine: Engine,
        start: Callable[[TextRequest], Answer],
        on_lost: Callable[[], Awaitable[None]],
        metrics: Metrics,
        clock: Callable[[], float],
        request_timeout: float | None = None,
        engine_restarts: bool = False,
        keys: KeyFile | None = None,
    ) -> None:
        """`names[0]` is the one reported; `start` sends a request to the engine core; `clock` and times in seconds.

        `engine_restarts`: somebody starts a lost engine core again, so health calls it starting. `on_lost` tells
        whoever watches health that it has turned; it is waited for.
        """
        self.names = tuple(names)
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.thinks = template is not None and template_thinks(template.source)
        self.calls_tools = template is not None and template_calls(template.for_tools)
        self._template = template
        self._engine = engine
        self._start = start
        self._on_lost = on_lost
        self._lost: engine_pb2.GetInfoResponse | None = None
        self._clock = clock
        self._request_timeout = request_timeout
        self._keys = keys
        self._while_lost = Health.STARTING if engine_restarts else Health.DEAD
        self._draining = False
        self._open: dict[OpenRequest, None] = {}
        self._calls = 0
        self._idle = asyncio.Event()
        """No call is open."""
        self._idle.set()

    # ------------------------------ what is served

    @property
    def health(self) -> Health:
        if self._draining:
            return Health.DRAINING
        health = _HEALTH[self._engine.state]
        if health is Health.SERVING and self._lost is not None and self._lost is self._engine.info:
            health = Health.DEAD
        return self._while_lost if health is Health.DEAD else health

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt + output; 0 before the engine core was ever reached."""
        info = self._engine.info
        return 0 if info is None else info.limits.max_model_len

    @property
    def engine_info(self) -> engine_pb2.GetInfoResponse | None:
        return self._engine.info

    @property
    def engine_cores(self) -> Sequence[Core]:
        """Each of them, whether or not it is there."""
        return self._engine.clients

    def figures(self) -> Figures:
        """This frontend's own, now."""
        refused = 0 if self._keys is None else self._keys.refused
        return self.metrics.figures(self._engine.fail_stops, self._engine.sessions_lost, refused)

    async def engine_stats(self) -> engine_pb2.GetStatsResponse | None:
        """Fresh figures of all engine cores together, None if none answers in time."""
        return added_up(await self.each_stats())

    async def each_stats(self) -> list[engine_pb2.GetStatsResponse | None]:
        """Fresh figures of each engine core, None where one doesn't answer in time."""
        return await self._engine.each_stats()

    async def flush_cache(self) -> int:
        """Drop what the prefix cache keeps and no request refers to; the pages dropped. Raises ApiError."""
        return await self._engine.flush_cache()

    def prompt_backlog(self) -> tuple[int, int]:
        """Prompt tokens of this frontend's open requests: not begun, and without a first token yet (the former
        included)."""
        silent = [request for request in self._open if not request.answering]
        waiting = [request for request in silent if not request.started]
        return sum(each.prompt_tokens for each in waiting), sum(each.prompt_tokens for each in silent)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (NOT_FOUND) for a model that isn't served; None means the one that is."""
        if name is not None and name not in self.names:
            shown = name if len(name) <= 128 else name[:128] + "…"
            raise ApiError(
                Code.NOT_FOUND, f"model {shown!r} is not served here; {' or '.join(map(repr, self.names))} is", "model"
            )

    # ------------------------------ prompts

    async def render(self, chat: ChatPrompt) -> str:
        """The prompt of a chat. Raises ApiError (INVALID_ARGUMENT) for one that the template can't or won't render."""
        if chat.tools and not self.calls_tools:
            raise ApiError(Code.INVALID_ARGUMENT, "this model's chat template offers no tools; leave them out", "tools")
        if self._template is None:
            raise ApiError(
                Code.INVALID_ARGUMENT,
                "this model has no chat template that could be used (the server's log says why), so it can't chat; "
                "send a prompt to /v1/completions",
                "messages",
            )
        text = await self._template.render(
            chat.messages, chat.tools or None, chat.add_generation_prompt, chat.template_kwargs
        )
        return _cut_after_last_message(text, chat) if chat.continue_final_message else text

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt.

        Raises ApiError (INVALID_ARGUMENT) for text that has no UTF-8 form, and before any work for text that can't fit
        even if all its tokens were the longest one: a minute of a core for what is refused then is too much. What can
        fit is only known once the engine core was reached (UNAVAILABLE before).
        """
        length = self.max_model_len
        if not length:
            raise ApiError(Code.UNAVAILABLE, NOT_THERE_YET, retry_after_s=1.0)
        most = length * self.tokenizer.longest_token
        if len(text) > most:
            raise ApiError(
                Code.INVALID_ARGUMENT,
                f"the prompt has {len(text)} characters; the context of {length} tokens holds at most {most}",
                "prompt",
                reason="CONTEXT_EXCEEDED",
            )
        return await self.tokenizer.encode(text, add_special_tokens)

    def check_length(self, tokens: int) -> None:
        """Raise ApiError (INVALID_ARGUMENT) for a prompt of more tokens than the context holds, before it is copied."""
        if 0 < self.max_model_len < tokens:
            raise ApiError(
                Code.INVALID_ARGUMENT,
                f"the prompt has {tokens} tokens; the context holds {self.max_model_len}",
                "prompt",
                reason="CONTEXT_EXCEEDED",
            )

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool, parameter: str) -> str:
        """The text of ids, without blocking the event loop for long lists.

        Raises ApiError naming `parameter` for an id that the model doesn't have, or for more ids than MAX_DECODED_IDS.
        """
        cap(parameter, len(ids), MAX_DECODED_IDS)
        info = self._engine.info
        size = max(self.tokenizer.vocab_size, 0 if info is None else info.vocab_size)
        if ids and not 0 <= min(ids) <= max(ids) < size:
            raise ApiError(
                Code.INVALID_ARGUMENT, f"{parameter} holds an id outside the vocabulary, 0 to {size - 1}", parameter
            )
        if len(ids) <= INLINE_IDS:
            return self.tokenizer.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens)

    # ------------------------------ requests

    @contextlib.contextmanager
    def refusals_counted(self) -> Iterator[None]:
        """Around what makes a request of a call: one refused here counts as those do that the engine core refuses."""
        began = self._clock()
        try:
            yield
        except ApiError:
            self.metrics.count_outcome("rejected")
            self.metrics.duration.observe(self._clock() - began)
            raise

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call from its arrival to its end, in which it starts its requests.

        One that came before a drain runs to its end, however long it waits for its turn or a tokenizer; a drain waits
        for it. One that comes later raises ApiError (UNAVAILABLE).
        """
        with self.refusals_counted():
            if self._draining:
                raise shutting_down()
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def start(self, request: TextRequest) -> OpenRequest:
        """Send a request of a call on its way; use it as an async context manager, so that leaving it ends the request.

        Raises ApiError (INVALID_ARGUMENT) for stop strings that can't be served.
        """
        if request.deadline_s is None and self._request_timeout is not None:
            request = replace(request, deadline_s=self._request_timeout)
        span = serving()
        if span is not None:
            request = replace(request, trace_parent=span.traceparent())
        with self.refusals_counted():
            answer = self._start(request)
        self.metrics.open_requests += 1
        given_up = functools.partial(self._given_up, self._engine.info)
        opened = OpenRequest(answer, len(request.prompt_ids), self.metrics, self._clock, given_up, self._ended, span)
        self._open[opened] = None
        return opened

    def drain(self) -> None:
        """Refuse new calls from now on; health says so at once."""
        self._draining = True

    async def idle(self) -> None:
        """Returns when no call is open."""
        await self._idle.wait()

    async def _given_up(self, session: engine_pb2.GetInfoResponse | None) -> None:
        """The engine core gave up a request of that session, so it is on its way down: until there is another session
        health says so, and does before the request's client hears of it."""
        if session is self._engine.info:
            self._lost = session
        if self.health is not Health.SERVING:
            await self._on_lost()

    def _ended(self, request: OpenRequest) -> None:
        del self._open[request]
        self.metrics.open_requests -= 1


def _cut_after_last_message(text: str, chat: ChatPrompt) -> str:
    """A rendered chat without what the template puts behind the last message's content."""
    content = str(chat.messages[-1]["content"]).strip()
    at = text.rfind(content) if content else -1
    if at < 0:
        raise ApiError(
            Code.INVALID_ARGUMENT,
            "the last message can't be continued: it is empty or the model's template changes its text",
            "continue_final_message",
        )
    return text[: at + len(content)]
