"""The frontend's side of the session protocol, without I/O: requests in, messages out; messages in, streams fed.

Owns numbers, what waits to be sent, acknowledgements, the fan-out of a step's columns to its requests' streams, whose
readers are woken when, and the bounds: of what waits to be sent and of what one request's reader leaves unread. A
message that breaks the contract raises ProtocolViolation, after which the session must be failed. Knows neither gRPC
nor time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.request import ApiError, Code
from frontend.streams import Finished, RequestStream, Sequence
from frontend.wire import ProtocolViolation, api_error, column, logprob_rows

PROTOCOL_VERSION = 1
HEARTBEAT_PART, MAX_HEARTBEAT_S = 0.4, 2.0
"""Heartbeats that a frontend asks for: two within the silence that ends its session, and one every 2 s at least.

Each wakes a dozen times the threads that gRPC polls with, in both processes: most of what an idle server does.
"""
MAX_UNSENT_BYTES = 64 << 20
"""Requests waiting for the transport, while it makes no progress."""
MAX_ADDS = 256
"""Requests in one message: the engine core takes no more."""
ADD_TURNS = 16
"""Turns of the event loop from a message with requests to the next message. A busy engine core takes some ms to read
one, however little is in it: of many small ones, acknowledgements wait behind all."""
READERS = 8
"""Readers woken at once: some 20 to 50 µs each to write what they have."""
MAX_UNREAD = 1 << 17
"""Tokens, or with logprobs alternatives, that a request's reader may leave unread over all its sequences …"""
MIN_UNREAD_TOKENS = 256
"""… but never fewer than these of each sequence."""
ADD_OVERHEAD = 16
"""Bytes of framing that an add costs in its message, at most; also of a message's other small fields."""
NUMBER_BYTES = 8
END_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Session:
    """One session, from the engine core's welcome to its end. All calls from one thread."""

    def __init__(self, welcome: pb.Welcome, on_due: Callable[[], None]) -> None:
        """`on_due` is called when there is something to send. Raises ProtocolViolation for a foreign welcome."""
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise ProtocolViolation(
                f"the engine core speaks protocol version {welcome.protocol_version}, this frontend "
                f"{PROTOCOL_VERSION}: install one greenlane on both"
            )
        self.info = welcome.info
        limits = welcome.info.limits
        if not welcome.info.page_size or not welcome.info.vocab_size or not limits.max_message_bytes:
            raise ProtocolViolation("the engine core's welcome names no page size, vocabulary or message limit")
        self._on_due = on_due
        self._sequences: dict[int, Sequence] = {}
        self._next_number = 1
        self._adds: dict[int, tuple[pb.AddRequest, int]] = {}
        self._unsent_bytes = 0
        self._aborts: list[int] = []
        self._received = 0  # the newest StepOutput
        self._acked = 0
        self._unacked_bytes = 0
        self._ack_wanted = False
        self._ack_due = False
        self._ack_bytes = limits.max_unacked_bytes // 4
        self._news: dict[RequestStream, None] = {}
        """Streams whose readers are to be woken, in this order: whoever waits takes all that comes meanwhile."""

    # -------------------------- to the engine core

    @property
    def max_add_bytes(self) -> int:
        """Size of the largest request that fits into a message."""
        return self.info.limits.max_message_bytes - 2 * ADD_OVERHEAD

    @property
    def open_sequences(self) -> int:
        """Sequences without an end yet."""
        return len(self._sequences)

    def add(self, add: pb.AddRequest) -> RequestStream:
        """Number a request (see `wire.build_add`) and queue it.

        Raises ApiError (RESOURCE_EXHAUSTED) while too much waits to be sent.
        """
        size = add.ByteSize() + ADD_OVERHEAD
        if self._unsent_bytes + size > MAX_UNSENT_BYTES:
            raise ApiError(
                Code.RESOURCE_EXHAUSTED, "too many requests wait for the engine core; retry later", retry_after_s=1.0
            )
        sampling = add.sampling
        count = sampling.n if sampling.HasField("n") else 1
        self._check_room(count)
        add.number = self._next_number
        self._next_number += count
        unread_limit = max(MIN_UNREAD_TOKENS, MAX_UNREAD // (count * (1 + sampling.logprobs)))
        stream = RequestStream(add.number, count, unread_limit)
        for index, number in enumerate(stream.numbers):
            self._sequences[number] = Sequence(stream, number, index)
        self._adds[add.number] = (add, size)
        self._unsent_bytes += size
        self._on_due()
        return stream

    def _check_room(self, count: int) -> None:
        """Refuse here what the engine core could not even queue, instead of asking it thousands of times."""
        limits = self.info.limits
        most = limits.max_queue + limits.max_num_seqs
        if most and count <= most < len(self._sequences) + count:
            raise ApiError(
                Code.RESOURCE_EXHAUSTED,
                f"{len(self._sequences)} sequences are open and {count} more exceed the {most} that the server runs "
                "and queues at once (--max-num-seqs, --max-queue); retry later",
                retry_after_s=1.0,
                reason="QUEUE_FULL",
            )

    def abort(self, stream: RequestStream) -> None:
        """End what is open of a request; it gets nothing more. Idempotent, also for another session's request."""
        opened = [number for number in stream.numbers if self._is_open(number, stream)]
        if not opened:
            return
        for number in opened:
            del self._sequences[number]
        unsent = self._adds.pop(stream.number, None)
        if unsent is not None:
            self._unsent_bytes -= unsent[1]
        else:
            self._aborts.extend(opened)
            self._on_due()

    def abort_sequence(self, sequence: Sequence) -> None:
        """End one of a request's sequences. Idempotent, also for another session's sequence."""
        if self._close(sequence):
            self._aborts.append(sequence.number)
            self._on_due()

    def _is_open(self, number: int, stream: RequestStream) -> bool:
        """Whether it is a sequence of this stream, without an end yet; numbers alone don't tell, as in `_close`."""
        sequence = self._sequences.get(number)
        return sequence is not None and sequence.stream is stream

    def _close(self, sequence: Sequence) -> bool:
        """Whether the sequence was open; numbers alone don't tell, every session counts from 1."""
        if self._sequences.get(sequence.number) is not sequence:
            return False
        del self._sequences[sequence.number]
        return True

    def fail(self, error: ApiError) -> None:
        """The session is over: every open request ends with the error."""
        while self.hand_on():
            pass
        streams = {sequence.stream.number: sequence.stream for sequence in self._sequences.values()}
        self._sequences.clear()
        self._adds.clear()
        self._aborts.clear()
        for stream in streams.values():
            stream.fail(error)

    def take(self) -> pb.SessionRequest | None:
        """The next message to write, or None. Write it before taking another."""
        if not (self._adds or self._aborts or self._ack_due):
            return None
        message = pb.SessionRequest()
        room = self.max_add_bytes
        for number in list(itertools.islice(self._adds, MAX_ADDS)):
            add, size = self._adds[number]
            if size - ADD_OVERHEAD > room:
                break
            room -= size
            message.adds.append(add)
            del self._adds[number]
            self._unsent_bytes -= size
        count = max(0, room) // NUMBER_BYTES
        message.aborts = np.array(self._aborts[:count], "<u8").tobytes()
        del self._aborts[:count]
        self._acknowledge(message)
        return message

    def _acknowledge(self, message: pb.SessionRequest) -> None:
        """Every message acknowledges what there is; a message for that alone is only sent when `_ack_due`."""
        self._ack_due = False
        if self._received > self._acked:
            message.ack = self._acked = self._received
            self._unacked_bytes = 0

    # -------------------------- from the engine core

    def receive(self, message: pb.SessionResponse) -> None:
        """Feed the streams; then `hand_on`. Raises ProtocolViolation for a message that breaks the contract."""
        if message.HasField("welcome"):
            raise ProtocolViolation("a second welcome")
        failed = False
        if message.HasField("output"):
            failed = self._apply(message.output)
            self._unacked_bytes += message.ByteSize()
        behind = self._received > self._acked
        idle = not message.HasField("output") or not self._sequences
        asked = message.output.ack_now
        if behind and (asked or idle or failed or self._unacked_bytes >= self._ack_bytes):
            self._ack_wanted = True

    def hand_on(self) -> bool:
        """Wake the next readers of what was received; whether others still wait for their turn."""
        for stream in list(itertools.islice(self._news, READERS)):
            del self._news[stream]
            stream.wake()
        return bool(self._news)

    def acknowledge(self) -> None:
        """Readers are far enough for the engine core's next message: say so if it waits for that."""
        if self._ack_wanted:
            self._ack_wanted = False
            self._ack_due = True
            self._on_due()

    def _apply(self, output: pb.StepOutput) -> bool:
        """Returns whether a request failed."""
        if output.sequence != self._received + 1:
            raise ProtocolViolation(f"output {output.sequence} after output {self._received}")
        self._received = output.sequence
        self._accept(self._numbers("accepted", output.accepted))
        if output.started:
            self._start(
                self._numbers("started", output.started), column("started_cached", output.started_cached, "<i4")
            )
        for stretch in output.prompt_logprobs:
            sequence = self._sequences.get(self._known(stretch.number))
            if sequence is not None and sequence.index == 0:
                sequence.stream.prompt_logprobs.append(stretch)
                self._news[sequence.stream] = None
        if output.numbers:
            self._spread(self._numbers("numbers", output.numbers), output)
        failed = [self._finish(finish) for finish in output.finishes]
        return any(failed)

    def _accept(self, numbers: list[int]) -> None:
        for number in numbers:
            sequence = self._sequences.get(number)
            if sequence is not None:
                sequence.stream.accepted = True
                self._news[sequence.stream] = None

    def _start(self, numbers: list[int], cached: npt.NDArray[Any]) -> None:
        if len(numbers) != len(cached):
            raise ProtocolViolation("the columns of started sequences differ in length")
        for number, tokens in zip(numbers, cached.tolist(), strict=True):
            sequence = self._sequences.get(number)
            if sequence is not None and sequence.index == 0:
                sequence.stream.started = True
                sequence.stream.cached_tokens = tokens

    def _spread(self, numbers: list[int], output: pb.StepOutput) -> None:
        """Hand every token to its sequence: the loop that runs once a token.

        A reader is too slow only if it left tokens of an earlier message, its turn not being still to come: one
        message may bring many steps.
        """
        tokens = column("tokens", output.tokens, "<i4")
        if len(tokens) != len(numbers):
            raise ProtocolViolation(f"{len(numbers)} numbers beside {len(tokens)} tokens")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.info.vocab_size:
            raise ProtocolViolation("a token outside the vocabulary")
        sequences, current, news = self._sequences, self._received, self._news
        for number, token in zip(numbers, tokens.tolist(), strict=True):
            sequence = sequences.get(number)
            if sequence is None:
                continue  # aborted here a moment ago
            sequence.tokens.append(token)
            if not sequence.unread_since:
                sequence.announce(current)
                news[sequence.stream] = None
            elif (
                sequence.unread_since != current
                and len(sequence.tokens) > sequence.stream.unread_limit
                and sequence.stream not in news
            ):
                self._overflow(sequence.stream)
        if output.HasField("logprobs"):
            for row, logprob in logprob_rows(output.logprobs, len(numbers)):
                sequence = sequences.get(numbers[row])
                if sequence is not None:
                    sequence.logprobs.append(logprob)

    def _overflow(self, stream: RequestStream) -> None:
        self.abort(stream)
        stream.fail(
            ApiError(Code.RESOURCE_EXHAUSTED, "the answer was read too slowly; its unread part passed the bound")
        )

    def _finish(self, finish: pb.Finish) -> bool:
        sequence = self._sequences.get(self._known(finish.number))
        if sequence is None:
            return False
        stream = sequence.stream
        reason = END_REASONS.get(finish.reason)
        if reason is None:
            error = _failure(finish)  # raises for an unknown reason: the sequence must still be open then
            self._close(sequence)
            self.abort(stream)
            stream.fail(error)
            return True
        self._close(sequence)
        stream.accepted = True
        sequence.finished = Finished(
            reason, finish.stop_token_id if finish.HasField("stop_token_id") else None, finish.output_tokens
        )
        sequence.announce(self._received)
        self._news[stream] = None
        return False

    def _numbers(self, name: str, data: bytes) -> list[int]:
        numbers = column(name, data, "<u8")
        if len(numbers):
            self._known(int(numbers.max()))
        return list(numbers.tolist())

    def _known(self, number: int) -> int:
        if number >= self._next_number:
            raise ProtocolViolation(f"{number} is the number of no request")
        return number


def hello(client_name: str, engine_timeout: float) -> pb.SessionRequest:
    """The first message, of a client that gives its session up after `engine_timeout` seconds of silence."""
    heartbeat_s = min(HEARTBEAT_PART * engine_timeout, MAX_HEARTBEAT_S)
    greeting = pb.Hello(protocol_version=PROTOCOL_VERSION, client_name=client_name, heartbeat_s=heartbeat_s)
    return pb.SessionRequest(hello=greeting)


def _failure(finish: pb.Finish) -> ApiError:
    """The error of a sequence that didn't end regularly. Raises ProtocolViolation for an unknown reason."""
    if finish.HasField("error"):
        return api_error(finish.error)
    if finish.reason == pb.FINISH_REASON_ABORT:
        return ApiError(Code.CANCELLED, "the engine core aborted the request")
    if finish.reason in (pb.FINISH_REASON_REJECTED, pb.FINISH_REASON_ERROR):
        return ApiError(Code.INTERNAL, "the engine core failed the request and gave no reason")
    raise ProtocolViolation(f"finish reason {finish.reason}")
