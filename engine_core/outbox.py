"""What a session still has to tell its frontend: outputs of engine steps, merged, split and bounded. No I/O.

Owns the conversion of an `Output` to `StepOutput` messages. Steps that arrive while a write is outstanding merge into
the next message; no message exceeds its size limit; every byte not yet acknowledged counts against the session. Refuses
to drop anything: when the bound is passed, `unacked_bytes` says so and the session ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from greenlane.engine.v1 import engine_pb2 as pb

from engine_core.request import Finish, LogprobColumns, Output, PromptLogprobs

ENVELOPE_BYTES = 512
"""Upper bound of a message's tags, lengths and scalar fields; more than is ever needed."""
MAX_ERROR_CHARS = 2048
"""A cause chain is cut here, so that failing thousands of sequences at once stays within the session's bound."""


class Outbox:
    """A session's outgoing step outputs. Sizes are upper estimates of serialized bytes, at most ~10 % too high."""

    def __init__(self, max_message_bytes: int) -> None:
        self._room = max_message_bytes - ENVELOPE_BYTES
        self._pending: deque[_Message] = deque()
        self._pending_bytes = 0
        self._sent: deque[tuple[int, int]] = deque()
        self._sent_bytes = 0
        self._sequence = 0
        self._acked = 0

    @property
    def unacked_bytes(self) -> int:
        """Bytes that the client hasn't acknowledged, those not yet written included."""
        return self._pending_bytes + self._sent_bytes

    @property
    def sent(self) -> int:
        """The highest sequence handed out by `take`."""
        return self._sequence

    @property
    def acked(self) -> int:
        """The highest sequence that the client has acknowledged."""
        return self._acked

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._pending

    def add(self, output: Output) -> None:
        """Append a step's output to the newest unwritten message, or to new ones where it has no room."""
        for part in split(output, self._room):
            size = wire_size(part)
            if not self._pending or self._pending[-1].size + size > self._room:
                self._pending.append(_Message())
                self._pending_bytes += ENVELOPE_BYTES
            self._pending[-1].merge(part, size)
            self._pending_bytes += size

    def take(self) -> pb.StepOutput | None:
        """The next message to write, numbered, or None. It counts as unacknowledged from here on."""
        if not self._pending:
            return None
        message = self._pending.popleft()
        self._sequence += 1
        size = message.size + ENVELOPE_BYTES
        self._pending_bytes -= size
        self._sent.append((self._sequence, size))
        self._sent_bytes += size
        return message.build(self._sequence)

    def ack(self, sequence: int) -> None:
        """Everything up to `sequence` was processed. Raises ValueError for one that was never sent, or going back."""
        if not self._acked <= sequence <= self._sequence:
            raise ValueError(f"ack {sequence} is outside {self._acked} .. {self._sequence}")
        self._acked = sequence
        while self._sent and self._sent[0][0] <= sequence:
            self._sent_bytes -= self._sent.popleft()[1]


class _Message:
    """Columns of one unwritten StepOutput, kept as pieces until it is built."""

    __slots__ = (
        "_accepted",
        "_finishes",
        "_logprobs",
        "_numbers",
        "_prompt_logprobs",
        "_rows",
        "_started",
        "_started_cached",
        "_step",
        "_steps",
        "_tokens",
        "size",
    )

    def __init__(self) -> None:
        self.size = 0
        self._step = 0
        self._steps = 0
        self._rows = 0
        self._accepted: list[bytes] = []
        self._started: list[bytes] = []
        self._started_cached: list[bytes] = []
        self._numbers: list[bytes] = []
        self._tokens: list[bytes] = []
        self._logprobs: list[tuple[bytes, ...]] = []
        self._prompt_logprobs: list[pb.PromptLogprobs] = []
        self._finishes: list[pb.Finish] = []

    def merge(self, output: Output, size: int) -> None:
        """Append one output's columns; its logprob rows move by the rows already here."""
        self.size += size
        self._steps += 1
        self._step = output.step
        if output.accepted:
            self._accepted.append(np.array(output.accepted, "<u8").tobytes())
        if output.started:
            self._started.append(np.array([number for number, _ in output.started], "<u8").tobytes())
            self._started_cached.append(np.array([cached for _, cached in output.started], "<i4").tobytes())
        if output.logprobs is not None and len(output.logprobs.rows):
            self._logprobs.append(_logprob_bytes(output.logprobs, self._rows))
        if len(output.numbers):
            self._numbers.append(output.numbers.astype("<u8", copy=False).tobytes())
            self._tokens.append(output.tokens.astype("<i4", copy=False).tobytes())
            self._rows += len(output.numbers)
        self._prompt_logprobs.extend(_prompt_logprobs_message(block) for block in output.prompt_logprobs)
        self._finishes.extend(finish_message(finish) for finish in output.finishes)

    def build(self, sequence: int) -> pb.StepOutput:
        message = pb.StepOutput(
            sequence=sequence,
            step=self._step,
            accepted=b"".join(self._accepted),
            started=b"".join(self._started),
            started_cached=b"".join(self._started_cached),
            numbers=b"".join(self._numbers),
            tokens=b"".join(self._tokens),
            prompt_logprobs=self._prompt_logprobs,
            finishes=self._finishes,
            ack_now=True if self._steps > 1 else None,
        )
        if self._logprobs:
            columns = [b"".join(pieces) for pieces in zip(*self._logprobs, strict=True)]
            message.logprobs.CopyFrom(
                pb.LogprobColumns(
                    rows=columns[0],
                    sampled=columns[1],
                    ranks=columns[2],
                    counts=columns[3],
                    top_ids=columns[4],
                    top_logprobs=columns[5],
                )
            )
        return message


def _logprob_bytes(columns: LogprobColumns, first_row: int) -> tuple[bytes, ...]:
    return (
        (columns.rows + np.uint32(first_row)).astype("<u4", copy=False).tobytes(),
        columns.sampled.astype("<f4", copy=False).tobytes(),
        columns.ranks.astype("<i4", copy=False).tobytes(),
        columns.counts.astype("<u4", copy=False).tobytes(),
        columns.top_ids.astype("<i4", copy=False).tobytes(),
        columns.top_logprobs.astype("<f4", copy=False).tobytes(),
    )


def _prompt_logprobs_message(block: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        number=block.number,
        start=block.start,
        logprobs=block.logprobs,
        ranks=block.ranks,
        top=block.top,
        top_ids=block.top_ids,
        top_logprobs=block.top_logprobs,
    )


def finish_message(finish: Finish) -> pb.Finish:
    """A sequence's last word on the wire; an error's text is cut to `MAX_ERROR_CHARS`."""
    message = pb.Finish(
        number=finish.number,
        reason=pb.FinishReason.Name(finish.reason),
        stop_token_id=finish.stop_token_id,
        prompt_tokens=finish.prompt_tokens,
        output_tokens=finish.output_tokens,
        cached_tokens=finish.cached_tokens,
    )
    if finish.error is not None:
        error = finish.error
        message.error.CopyFrom(
            pb.Error(
                code=int(error.code),
                message=cut(error.message),
                reject_reason=None if error.reject_reason is None else pb.RejectReason.Name(error.reject_reason),
                parameter=error.parameter,
                retry_after_s=error.retry_after_s,
            )
        )
    return message


def cut(text: str) -> str:
    """The text, at most `MAX_ERROR_CHARS` long; its middle goes first, since a chain's ends say most."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    half = (MAX_ERROR_CHARS - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


# ------------------------------ sizes and splitting


def wire_size(output: Output) -> int:
    """Upper estimate of the serialized bytes of an output's columns, without the message's envelope."""
    size = 8 * len(output.accepted) + 12 * len(output.started) + 12 * len(output.numbers)
    if output.logprobs is not None:
        size += 16 * len(output.logprobs.rows) + 8 * len(output.logprobs.top_ids)
    for block in output.prompt_logprobs:
        size += _prompt_logprobs_size(block)
    for finish in output.finishes:
        size += _finish_size(finish)
    return size


def _prompt_logprobs_size(block: PromptLogprobs) -> int:
    return 64 + len(block.logprobs) + len(block.ranks) + len(block.top_ids) + len(block.top_logprobs)


def _finish_size(finish: Finish) -> int:
    if finish.error is None:
        return 48
    text = len(cut(finish.error.message).encode()) + len((finish.error.parameter or "").encode())
    return 96 + text


def split(output: Output, room: int) -> Iterator[Output]:
    """The output itself where it fits into `room` bytes, else parts that do, in the order that clients rely on.

    That order: acceptance, start, prompt logprobs, sampled rows, last words.
    """
    if wire_size(output) <= room:
        yield output
        return
    for start in range(0, len(output.accepted), room // 8):
        yield _part(output, accepted=output.accepted[start : start + room // 8])
    for start in range(0, len(output.started), room // 12):
        yield _part(output, started=output.started[start : start + room // 12])
    for block in output.prompt_logprobs:
        for piece in _split_prompt_logprobs(block, room):
            yield _part(output, prompt_logprobs=[piece])
    yield from _split_rows(output, room)
    for finish in output.finishes:
        yield _part(output, finishes=[finish])


def _part(
    output: Output,
    *,
    accepted: list[int] | None = None,
    started: list[tuple[int, int]] | None = None,
    prompt_logprobs: list[PromptLogprobs] | None = None,
    finishes: list[Finish] | None = None,
) -> Output:
    return Output(
        output.session,
        output.step,
        accepted=accepted or [],
        started=started or [],
        prompt_logprobs=prompt_logprobs or [],
        finishes=finishes or [],
    )


def _split_prompt_logprobs(block: PromptLogprobs, room: int) -> Iterator[PromptLogprobs]:
    """Stretches of at most `room` bytes; each token takes 8 bytes and 8 for each alternative."""
    tokens = len(block.logprobs) // 4
    width = 4 * block.top
    at_once = max(1, (room - 64) // (8 + 2 * width))
    for start in range(0, tokens, at_once):
        end = min(start + at_once, tokens)
        yield PromptLogprobs(
            number=block.number,
            start=block.start + start,
            logprobs=block.logprobs[4 * start : 4 * end],
            ranks=block.ranks[4 * start : 4 * end],
            top=block.top,
            top_ids=block.top_ids[width * start : width * end],
            top_logprobs=block.top_logprobs[width * start : width * end],
        )


def _split_rows(output: Output, room: int) -> Iterator[Output]:
    """Sampled rows with their logprobs, cut between rows."""
    rows = len(output.numbers)
    sizes = np.full(rows, 12, np.int64)
    if output.logprobs is not None:
        sizes[output.logprobs.rows] += 16 + 8 * output.logprobs.counts.astype(np.int64)
    for start, end in _runs(sizes, room):
        part = _part(output)
        part.numbers = output.numbers[start:end]
        part.tokens = output.tokens[start:end]
        if output.logprobs is not None:
            part.logprobs = _slice_logprobs(output.logprobs, start, end)
        yield part


def _runs(sizes: npt.NDArray[np.int64], room: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges whose sizes sum to at most `room` (a single item may be larger)."""
    start, total = 0, 0
    for end, size in enumerate(sizes.tolist()):
        if end > start and total + size > room:
            yield start, end
            start, total = end, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def _slice_logprobs(columns: LogprobColumns, start: int, end: int) -> LogprobColumns:
    """The logprobs of rows start .. end-1, numbered from 0. `rows` is ascending."""
    first, last = np.searchsorted(columns.rows, (start, end)).tolist()
    offsets = [0, *accumulate(columns.counts.tolist())]
    top = slice(offsets[first], offsets[last])
    return LogprobColumns(
        rows=columns.rows[first:last] - np.uint32(start),
        sampled=columns.sampled[first:last],
        ranks=columns.ranks[first:last],
        counts=columns.counts[first:last],
        top_ids=columns.top_ids[top],
        top_logprobs=columns.top_logprobs[top],
    )
