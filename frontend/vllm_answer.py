"""A request's deltas as vllm.grpc.engine messages.

Owns what a chunk and a completion hold. In a stream, chunks carry the tokens and logprobs that are new and a completion
closes each sequence; without one, a sequence's completion carries everything and is its only message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from frontend.request import Delta, TextRequest, TokenLogprob


class AnswerMessages:
    """The messages of one request, made as its deltas arrive."""

    def __init__(self, request: TextRequest, stream: bool) -> None:
        """`stream`: whether chunks are wanted."""
        self.cached_tokens = 0
        self._stream = stream
        self._prompt_tokens = len(request.prompt_ids)
        self._top = bool(request.sampling.logprobs)
        self._prompt_top = bool(request.sampling.prompt_logprobs)
        self._sequences = [_Sequence() for _ in range(request.sampling.n or 1)]

    def messages(self, deltas: Sequence[Delta], prompt: Sequence[TokenLogprob]) -> Iterator[Any]:
        """GenerateResponses of what arrived together, one a sequence where they can be merged. `prompt`: the prompt's
        logprobs, if they were asked for."""
        for index, group in itertools.groupby(deltas, lambda delta: delta.index):
            run, sequence = list(group), self._sequences[index]
            ids = [token for delta in run for token in delta.token_ids]
            logprobs = [entry for delta in run for entry in delta.logprobs or ()]
            sequence.ids += ids
            if self._stream:
                yield pb.GenerateResponse(chunk=self._chunk(index, ids, logprobs, prompt))
            elif logprobs:
                _extend(sequence.logprobs, logprobs, self._top)
            if run[-1].finish_reason is not None:
                yield pb.GenerateResponse(complete=self._complete(index, run[-1], prompt))

    def aborted(self) -> Iterator[Any]:
        """The completions of all sequences that have none yet, as aborted ones."""
        for index, sequence in enumerate(self._sequences):
            if not sequence.over:
                yield pb.GenerateResponse(complete=self._complete(index, Delta(index, "", [], None, "abort"), ()))

    def _chunk(self, index: int, ids: list[int], logprobs: list[TokenLogprob], prompt: Sequence[TokenLogprob]) -> Any:
        chunk = pb.GenerateStreamChunk(
            token_ids=ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(ids),  # of this chunk: readers of this contract add them up
            cached_tokens=self.cached_tokens,
            index=index,
        )
        if logprobs:
            _extend(chunk.output_logprobs, logprobs, self._top)
        sequence = self._sequences[index]
        if prompt and not sequence.described:
            sequence.described = True
            self._describe(chunk.input_logprobs, prompt)
        return chunk

    def _complete(self, index: int, last: Delta, prompt: Sequence[TokenLogprob]) -> Any:
        sequence = self._sequences[index]
        sequence.over = True
        complete = pb.GenerateComplete(
            output_ids=sequence.ids,
            finish_reason=last.finish_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(sequence.ids),
            cached_tokens=self.cached_tokens,
            index=index,
        )
        if sequence.logprobs.token_ids:
            complete.output_logprobs.CopyFrom(sequence.logprobs)
        if prompt and not sequence.described:
            self._describe(complete.input_logprobs, prompt)
        if isinstance(last.stop_reason, str):
            complete.matched_stop_str = last.stop_reason
        elif last.stop_reason is not None:
            complete.matched_token_id = last.stop_reason
        return complete

    def _describe(self, columns: Any, prompt: Sequence[TokenLogprob]) -> None:
        """The prompt's logprobs; its first token has none."""
        for entry in prompt:
            columns.token_logprobs.add(value=entry.logprob)
            columns.token_ids.append(entry.id)
            columns.top_logprobs.append(_top(entry) if self._prompt_top else pb.TopLogProbs())


class _Sequence:
    """One of the n sequences so far."""

    __slots__ = ("described", "ids", "logprobs", "over")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs = pb.OutputLogProbs()
        """Kept for the completion, unless chunks carry them."""
        self.described = False
        """The prompt's logprobs were sent."""
        self.over = False


def _extend(columns: Any, entries: Sequence[TokenLogprob], with_top: bool) -> None:
    columns.token_logprobs.extend(entry.logprob for entry in entries)
    columns.token_ids.extend(entry.id for entry in entries)
    if with_top:
        columns.top_logprobs.extend(map(_top, entries))


def _top(entry: TokenLogprob) -> Any:
    return pb.TopLogProbs(values=[top.logprob for top in entry.top], token_ids=[top.id for top in entry.top])
