"""The session protocol without I/O: protobuf messages in, commands out; outputs in, protobuf messages out.

Owns what a frontend may say and when, and the validation of every request before anything is allocated for it. A
request that can't be served is refused by a `Finish` and harms nothing else; a broken protocol, or a client that lets
its unacknowledged bytes pass their bound, raises `SessionBroken`, after which the session must be closed. Knows neither
asyncio nor gRPC; the clock's time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from greenlane.engine.v1 import engine_pb2 as pb

from engine_core.errors import Rejected, RejectReason, StatusCode
from engine_core.outbox import Outbox
from engine_core.request import (
    FINISH_REJECTED,
    MAX_GRAMMAR_BYTES,
    MAX_LABEL_BYTES,
    MAX_N,
    MAX_SALT_BYTES,
    PREFIX_HASH_BYTES,
    Abort,
    CloseSession,
    Command,
    Finish,
    FinishError,
    Grammar,
    Ids,
    ModelLimits,
    Output,
    RawSampling,
    Request,
    check_prompt,
    prefix_chain,
    resolve,
)

MAX_ADDS = 256
"""Of one message: what it costs to check them may not hold up other sessions."""
PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_UNACKED_BYTES = 8 << 20
MAX_CLIENT_NAME_BYTES = 128
MAX_DEADLINE_S = 1e9
HEARTBEAT_S = 1.0
"""Silence after which an empty message tells the frontend that the core lives, unless it asks for another one."""
MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 0.1, 60.0
HELLO_S = 10.0
"""How long a client may hold a session's place without saying hello."""


class SessionBroken(Exception):
    """The session can't go on; the status to end it with."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Session:
    """One frontend's session, from `hello` to its end.

    Calls, all from one thread: `receive` for each message of the client, `publish` for each step's output, and for
    writing `take`, then `written` when the transport has taken the message.
    """

    def __init__(
        self,
        number: int,
        limits: ModelLimits,
        info: pb.GetInfoResponse,
        *,
        now: float,
        draw_seed: Callable[[], int],
        max_unacked_bytes: int = MAX_UNACKED_BYTES,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        on_refused: Callable[[Output], None] | None = None,
    ) -> None:
        """`on_refused` hears of requests that end here, before the engine saw them."""
        self.number = number
        self.client_name = ""
        self.rejected = 0
        """Sequences refused here, before the engine saw them."""
        self._limits = limits
        self._info = info
        self._draw_seed = draw_seed
        self._on_refused = on_refused
        self._max_unacked_bytes = max_unacked_bytes
        self._outbox = Outbox(max_message_bytes)
        self._awaited = 0
        """The StepOutput that the client has to acknowledge before the next."""
        self._greeted = False
        self._welcome_due = False
        self._state_due: int | None = None
        self._next_number = 0
        self._step = 0
        self._writing = False
        self._opened = now
        self._last_write = now
        self._heartbeat_s = HEARTBEAT_S

    # -------------------------- from the client

    def receive(self, message: pb.SessionRequest, now: float) -> list[Command]:
        """The commands that a message holds, in order. Raises SessionBroken when it breaks the protocol."""
        self._check_hello(message)
        if message.HasField("ack"):
            self._acknowledge(message.ack)
        if len(message.adds) > MAX_ADDS:
            raise _violation(f"a message holds {len(message.adds)} adds; at most {MAX_ADDS} are allowed")
        commands: list[Command] = []
        for add in message.adds:
            request = self._add(add, now)
            if request is not None:
                commands.append(request)
        if message.aborts:
            numbers = np.frombuffer(_whole_items("aborts", message.aborts, 8), "<u8")
            commands.append(Abort(self.number, tuple(numbers.tolist())))
        return commands

    def _check_hello(self, message: pb.SessionRequest) -> None:
        if message.HasField("hello") == self._greeted:
            raise _violation("hello must be in the first message, and only there")
        if self._greeted:
            return
        if message.hello.protocol_version != PROTOCOL_VERSION:
            raise _violation(
                f"protocol version {message.hello.protocol_version} isn't spoken here; this engine core speaks "
                f"{PROTOCOL_VERSION}: install one greenlane on both sides"
            )
        if len(message.hello.client_name.encode()) > MAX_CLIENT_NAME_BYTES:
            raise _violation(f"client_name has more than {MAX_CLIENT_NAME_BYTES} bytes")
        if message.hello.HasField("heartbeat_s"):
            wanted = message.hello.heartbeat_s
            if not MIN_HEARTBEAT_S <= wanted <= MAX_HEARTBEAT_S:
                raise _violation(
                    f"heartbeat_s is {wanted!r}; it must be from {MIN_HEARTBEAT_S:g} to {MAX_HEARTBEAT_S:g}"
                )
            self._heartbeat_s = wanted
        self.client_name = message.hello.client_name
        self._greeted = True
        self._welcome_due = True

    def _acknowledge(self, sequence: int) -> None:
        try:
            self._outbox.ack(sequence)
        except ValueError as error:
            raise _violation(str(error)) from error

    def _add(self, add: pb.AddRequest, now: float) -> Request | None:
        """The request, or None after its refusal was put into the outbox."""
        prompt = np.frombuffer(_whole_items("prompt_ids", add.prompt_ids, 4), "<i4")
        _whole_items("prefix_hashes", add.prefix_hashes, PREFIX_HASH_BYTES)
        count = self._claim_numbers(add)
        try:
            return self._read(add, prompt, now)
        except Rejected as refusal:
            self.rejected += count
            self._refuse(add.number, count, len(prompt), refusal)
            return None

    def _claim_numbers(self, add: pb.AddRequest) -> int:
        """How many sequence numbers the request owns; an `n` out of range owns one and is refused later."""
        count = add.sampling.n if add.sampling.HasField("n") and 1 <= add.sampling.n <= MAX_N else 1
        if add.number < self._next_number:
            raise _violation(
                f"request number {add.number} isn't beyond those in use; the next must be at least {self._next_number}"
            )
        if add.number + count > 1 << 64:
            raise _violation(f"request number {add.number} with n = {count} goes beyond 64 bits")
        self._next_number = add.number + count
        return count

    def _read(self, add: pb.AddRequest, prompt: Ids, now: float) -> Request:
        """Validate everything a client may say about a request; raises Rejected."""
        limits = self._limits
        check_prompt(prompt, limits)
        params = resolve(_raw_sampling(add.sampling), len(prompt), limits, self._draw_seed())
        salt = add.cache_salt.encode() if add.HasField("cache_salt") else None
        _cap("cache_salt", salt or b"", MAX_SALT_BYTES)
        _cap("label", add.label.encode(), MAX_LABEL_BYTES)
        return Request(
            session=self.number,
            number=add.number,
            ids=prompt,
            hashes=_hashes(add, prompt, limits.page_size, salt),
            salt=salt,
            params=params,
            priority=add.priority,
            deadline=_deadline(add, now),
            label=add.label,
            grammar=_grammar(add, params.min_tokens, limits.no_grammars),
        )

    def _refuse(self, number: int, count: int, prompt_tokens: int, refusal: Rejected) -> None:
        error = FinishError(
            refusal.reason.code, refusal.message, refusal.reason, refusal.parameter, refusal.retry_after_s
        )
        finishes = [Finish(number + index, FINISH_REJECTED, prompt_tokens, 0, 0, error=error) for index in range(count)]
        output = Output(self.number, self._step, finishes=finishes)
        if self._on_refused is not None:
            self._on_refused(output)
        self.publish(output)

    # -------------------------- to the client

    def publish(self, output: Output) -> None:
        """Queue what happened in an engine step. Raises SessionBroken when the client is too far behind."""
        self._step = output.step
        self._outbox.add(output)
        if self._outbox.unacked_bytes > self._max_unacked_bytes:
            raise SessionBroken(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{self._outbox.unacked_bytes} bytes are unacknowledged; the limit is {self._max_unacked_bytes}: "
                "read and acknowledge faster",
            )

    def tell_state(self, state: int) -> None:
        """Have the next message say what has become of the engine core (an EngineState)."""
        self._state_due = state

    def take(self, now: float) -> pb.SessionResponse | None:
        """The next message to write, or None: nothing to say, or a write is outstanding. Then call `written`."""
        if self._writing or not self._greeted:
            return None
        message = self._next_message(now)
        self._writing = message is not None
        return message

    def _next_message(self, now: float) -> pb.SessionResponse | None:
        if self._welcome_due:
            self._welcome_due = False
            return pb.SessionResponse(welcome=pb.Welcome(protocol_version=PROTOCOL_VERSION, info=self._info))
        output = self._next_output()
        if output is None and self._state_due is None and now < self._last_write + self._heartbeat_s:
            return None
        message = pb.SessionResponse(output=output)
        if self._state_due is not None:
            message.MergeFrom(pb.SessionResponse(state=pb.EngineState.Name(self._state_due)))
            self._state_due = None
        return message

    def _next_output(self) -> pb.StepOutput | None:
        """None also for a client that is still at work on merged steps.

        A message that left now would grow old in its socket, and one more in the transport before it; here, later
        steps go on merging into it.
        """
        if self._outbox.acked < self._awaited:
            return None
        output = self._outbox.take()
        if output is not None and output.ack_now:
            self._awaited = output.sequence
        return output

    def written(self, now: float) -> None:
        """The transport has taken the message; the next may follow."""
        self._writing = False
        self._last_write = now

    def due(self, now: float) -> float:
        """When to call `take` again if nothing happens before: a heartbeat is due then.

        Raises SessionBroken for a client that has kept its place for long without a hello.
        """
        if self._greeted:
            return self._last_write + self._heartbeat_s
        if now - self._opened >= HELLO_S:
            raise _violation("no hello came")
        return self._opened + HELLO_S

    @property
    def settled(self) -> bool:
        """Whether the client has acknowledged everything there was to say."""
        told = self._outbox.empty and self._state_due is None
        return told and not self._writing and self._outbox.acked == self._outbox.sent

    def close(self) -> CloseSession:
        """The command that aborts all that the session has open."""
        return CloseSession(self.number)


# ------------------------------ reading a request


def _raw_sampling(message: pb.SamplingParams) -> RawSampling:
    """Fields as the client sent them; an absent one is None."""

    def real(name: str) -> float | None:
        return getattr(message, name) if message.HasField(name) else None

    def whole(name: str) -> int | None:
        return getattr(message, name) if message.HasField(name) else None

    return RawSampling(
        temperature=real("temperature"),
        top_p=real("top_p"),
        top_k=whole("top_k"),
        min_p=real("min_p"),
        seed=whole("seed"),
        repetition_penalty=real("repetition_penalty"),
        presence_penalty=real("presence_penalty"),
        frequency_penalty=real("frequency_penalty"),
        logit_bias=dict(message.logit_bias),
        max_tokens=whole("max_tokens"),
        min_tokens=whole("min_tokens"),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else None,
        n=whole("n"),
        logprobs=whole("logprobs"),
        prompt_logprobs=whole("prompt_logprobs"),
    )


def _hashes(add: pb.AddRequest, prompt: Ids, page_size: int, salt: bytes | None) -> bytes:
    """The client's prefix chain, of the right length, or one computed here."""
    if not add.HasField("prefix_hashes"):
        return prefix_chain(prompt, page_size, salt)
    pages = len(prompt) // page_size
    if len(add.prefix_hashes) != pages * PREFIX_HASH_BYTES:
        raise Rejected(
            RejectReason.MALFORMED,
            f"prefix_hashes has {len(add.prefix_hashes) // PREFIX_HASH_BYTES} entries; {len(prompt)} tokens fill "
            f"{pages} pages of {page_size}",
            "prefix_hashes",
        )
    return bytes(add.prefix_hashes)


def _grammar(add: pb.AddRequest, min_tokens: int, unserved: str | None) -> Grammar | None:
    if not add.HasField("grammar"):
        return None
    if unserved is not None:
        raise Rejected(RejectReason.UNSUPPORTED, f"no output can follow a grammar here: {unserved}", "grammar")
    kind = add.grammar.WhichOneof("grammar")
    if kind is None:
        raise Rejected(RejectReason.MALFORMED, "the grammar is missing, or of a kind that isn't known here", "grammar")
    text = getattr(add.grammar, kind)
    _cap("grammar", text.encode(), MAX_GRAMMAR_BYTES)
    if min_tokens:
        raise Rejected(
            RejectReason.PARAMETER_OUT_OF_RANGE,
            f"min_tokens is {min_tokens}; beside a grammar it must be 0, since the output ends where the grammar does",
            "min_tokens",
        )
    return Grammar(kind, text)


def _deadline(add: pb.AddRequest, now: float) -> float | None:
    if not add.HasField("deadline_s"):
        return None
    if not 0 < add.deadline_s <= MAX_DEADLINE_S:
        raise Rejected(
            RejectReason.PARAMETER_OUT_OF_RANGE,
            f"deadline_s is {add.deadline_s!r}; it must be in (0, {MAX_DEADLINE_S:g}]",
            "deadline_s",
        )
    return now + float(add.deadline_s)


def _cap(name: str, value: bytes, limit: int) -> None:
    if len(value) > limit:
        raise Rejected(
            RejectReason.PARAMETER_OUT_OF_RANGE, f"{name} has {len(value)} bytes; at most {limit} are allowed", name
        )


def _whole_items(name: str, column: bytes, width: int) -> bytes:
    if len(column) % width:
        raise _violation(f"{name} has {len(column)} bytes, not a multiple of {width}")
    return column


def _violation(message: str) -> SessionBroken:
    return SessionBroken(StatusCode.INVALID_ARGUMENT, message)
