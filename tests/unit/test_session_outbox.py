"""Step outputs on the wire: merging, splitting and sizes, compared by values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sized

import numpy as np
import numpy.typing as npt
from greenlane.engine.v1 import engine_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.errors import RejectReason, StatusCode
from engine_core.outbox import ENVELOPE_BYTES, MAX_ERROR_CHARS, Outbox, finish_message, split, wire_size
from engine_core.request import Finish, FinishError, LogprobColumns, Output, PromptLogprobs

MIB = 1 << 20


def rows(numbers: list[int], *, step: int = 1, counts: dict[int, int] | None = None) -> Output:
    """One token a number; `counts` maps rows with logprobs to their number of alternatives."""
    output = Output(1, step, numbers=np.array(numbers, np.uint64), tokens=np.array(numbers, np.int32) + 100)
    if counts is not None:
        places = sorted(counts)
        tops = sum(counts.values())
        output.logprobs = LogprobColumns(
            rows=np.array(places, np.uint32),
            sampled=-np.array([numbers[place] for place in places], np.float32),
            ranks=np.array([numbers[place] + 1 for place in places], np.int32),
            counts=np.array([counts[place] for place in places], np.uint32),
            top_ids=np.concatenate([[numbers[p]] * counts[p] for p in places] or [[]]).astype(np.int32),
            top_logprobs=np.linspace(-1, -2, tops).astype(np.float32),
        )
    return output


def drain(outbox: Outbox) -> list[pb.StepOutput]:
    messages = []
    while (message := outbox.take()) is not None:
        messages.append(message)
    return messages


def column(data: bytes, dtype: str) -> list[int]:
    values: npt.NDArray[np.int64] = np.frombuffer(data, dtype)
    return list(values.tolist())


def logprobs_by_number(messages: list[pb.StepOutput]) -> dict[int, tuple[float, int, list[int]]]:
    """sequence number → (sampled logprob, rank, alternatives), read as a frontend reads it."""
    out: dict[int, tuple[float, int, list[int]]] = {}
    for message in messages:
        numbers = column(message.numbers, "<u8")
        columns = message.logprobs
        tops = iter(column(columns.top_ids, "<i4"))
        for row, sampled, rank, count in zip(
            column(columns.rows, "<u4"),
            column(columns.sampled, "<f4"),
            column(columns.ranks, "<i4"),
            column(columns.counts, "<u4"),
            strict=True,
        ):
            out[numbers[row]] = (sampled, rank, [next(tops) for _ in range(count)])
        assert next(tops, None) is None
    return out


def test_merged_logprob_rows_point_at_their_own_tokens() -> None:
    """Red when the rows of a merged step aren't moved behind those of the step before."""
    outbox = Outbox(MIB)
    outbox.add(rows([5, 6, 7], counts={1: 2}))
    outbox.add(rows([5, 6, 7], step=2))
    outbox.add(rows([8, 9], step=3, counts={0: 1, 1: 3}))
    (message,) = drain(outbox)
    assert (message.sequence, message.step) == (1, 3)
    assert column(message.numbers, "<u8") == [5, 6, 7, 5, 6, 7, 8, 9]
    assert column(message.logprobs.rows, "<u4") == [1, 6, 7]
    assert logprobs_by_number([message]) == {6: (-6.0, 7, [6, 6]), 8: (-8.0, 9, [8]), 9: (-9.0, 10, [9, 9, 9])}


def test_a_step_without_logprobs_has_no_logprob_columns() -> None:
    """Red when empty logprob columns are sent for everyone."""
    outbox = Outbox(MIB)
    outbox.add(rows([1]))
    (message,) = drain(outbox)
    assert not message.HasField("logprobs")


def test_every_field_reaches_the_wire() -> None:
    """Red when a column or a field of a last word is dropped."""
    outbox = Outbox(MIB)
    error = FinishError(StatusCode.RESOURCE_EXHAUSTED, "full", RejectReason.QUEUE_FULL, "n", 1.5)
    block = PromptLogprobs(3, 1, b"\0" * 8, b"\1" * 8, 1, b"\2" * 8, b"\3" * 8)
    outbox.add(
        Output(
            1,
            9,
            accepted=[3],
            started=[(3, 16)],
            prompt_logprobs=[block],
            finishes=[Finish(3, 1, 20, 4, 16, stop_token_id=0), Finish(4, 4, 20, 0, 0, error=error)],
        )
    )
    (message,) = drain(outbox)
    assert column(message.started, "<u8") == [3]
    assert column(message.started_cached, "<i4") == [16]
    (prompt,) = message.prompt_logprobs
    assert (prompt.number, prompt.start, prompt.top, prompt.top_logprobs) == (3, 1, 1, b"\3" * 8)
    stop, refused = message.finishes
    assert (stop.reason, stop.prompt_tokens, stop.output_tokens, stop.cached_tokens) == (
        pb.FINISH_REASON_STOP,
        20,
        4,
        16,
    )
    assert stop.HasField("stop_token_id")
    assert not stop.HasField("error")
    assert not refused.HasField("stop_token_id")
    assert refused.error == pb.Error(
        code=8, message="full", reject_reason=pb.REJECT_REASON_QUEUE_FULL, parameter="n", retry_after_s=1.5
    )


def test_no_message_exceeds_its_limit_however_much_waits() -> None:
    """Red when merging ignores the size limit: the transport would refuse the message and end the session."""
    outbox = Outbox(4096)
    for step in range(1, 101):
        outbox.add(rows(list(range(64)), step=step))
    messages = drain(outbox)
    assert len(messages) > 1
    assert all(message.ByteSize() <= 4096 for message in messages)
    assert [message.sequence for message in messages] == list(range(1, len(messages) + 1))
    assert sum(len(message.numbers) for message in messages) == 100 * 64 * 8
    assert messages[-1].step == 100


def test_a_full_message_of_the_real_limit_stays_within_it() -> None:
    """Red when ENVELOPE_BYTES is too small for what a message holds besides its columns."""
    outbox = Outbox(MIB)
    for _ in range(400):
        outbox.add(rows(list(range(256)), step=2**63, counts=dict.fromkeys(range(256), 1)))
    messages = drain(outbox)
    sizes = [pb.SessionResponse(output=message).ByteSize() for message in messages]
    assert max(sizes) <= MIB
    assert max(sizes) >= MIB - (16 << 10), "messages are filled, not cut early"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(0, 20),
    st.integers(700, 3000),
)
def test_splitting_keeps_everything_in_order(alternatives: list[int], prompt_tokens: int, top: int, room: int) -> None:
    """Red when a split loses or repeats an item, exceeds the room, or lets a token overtake its prompt logprobs."""
    numbers = list(range(len(alternatives)))
    whole = rows(numbers, counts={place: count for place, count in enumerate(alternatives) if count < 20})
    whole.accepted = numbers
    whole.started = [(number, 2 * number) for number in numbers]
    floats = np.arange(prompt_tokens, dtype=np.float32)
    tops = np.arange(prompt_tokens * top, dtype=np.int32)
    whole.prompt_logprobs = [
        PromptLogprobs(0, 1, floats.tobytes(), floats.tobytes(), top, tops.tobytes(), tops.tobytes())
    ]
    whole.finishes = [Finish(number, 1, 1, 1, 0) for number in numbers]
    parts = list(split(whole, room))
    assert all(wire_size(part) <= room for part in parts)
    assert [item for part in parts for item in part.accepted] == whole.accepted
    assert [item for part in parts for item in part.started] == whole.started
    assert [item for part in parts for item in part.finishes] == whole.finishes
    assert np.concatenate([part.numbers for part in parts]).tolist() == numbers
    blocks = [block for part in parts for block in part.prompt_logprobs]
    assert b"".join(block.logprobs for block in blocks) == floats.tobytes()
    assert b"".join(block.top_ids for block in blocks) == tops.tobytes()
    described = [start for block in blocks for start in range(block.start, block.start + len(block.logprobs) // 4)]
    assert described == list(range(1, prompt_tokens + 1))
    kinds = [_kinds(part) for part in parts]
    assert kinds == sorted(kinds), "acceptance, start, prompt logprobs, rows, last words"
    joined, direct = Outbox(room + ENVELOPE_BYTES), Outbox(MIB)
    joined.add(whole)
    direct.add(whole)
    assert logprobs_by_number(drain(joined)) == logprobs_by_number(drain(direct))


def _kinds(part: Output) -> int:
    columns: tuple[Sized, ...] = (part.accepted, part.started, part.prompt_logprobs, part.numbers, part.finishes)
    present = [place for place, items in enumerate(columns) if len(items)]
    return present[0] if len(present) == 1 else 0


def test_sizes_are_upper_estimates_close_to_the_truth() -> None:
    """Red when an estimate falls below the serialized size (messages too large) or far above (sessions cut early)."""
    error = FinishError(StatusCode.INTERNAL, "x" * 300, parameter="temperature")
    cases = [
        rows(list(range(256))),
        rows(list(range(256)), counts=dict.fromkeys(range(256), 20)),
        Output(1, 1, finishes=[Finish(2**63 + n, 5, 2**31 - 1, 2**31 - 1, 7, 3, error) for n in range(50)]),
        Output(
            1, 1, prompt_logprobs=[PromptLogprobs(2**63, 2**31, b"\0" * 400, b"\0" * 400, 1, b"\0" * 400, b"\0" * 400)]
        ),
    ]
    for case in cases:
        outbox = Outbox(MIB)
        outbox.add(case)
        counted = outbox.unacked_bytes
        (message,) = drain(outbox)
        assert message.ByteSize() <= counted <= 1.3 * message.ByteSize() + ENVELOPE_BYTES


def test_a_cause_chain_is_cut_in_the_middle() -> None:
    """Red when thousands of sequences failing at once with a long chain pass the session's bound for no reason."""
    text = "begin" + "x" * 10_000 + "end"
    message = finish_message(Finish(1, 5, 0, 0, 0, error=FinishError(StatusCode.INTERNAL, text)))
    assert len(message.error.message) <= MAX_ERROR_CHARS
    assert message.error.message.startswith("begin")
    assert message.error.message.endswith("end")


def test_sent_and_pending_bytes_count_until_acknowledged() -> None:
    """Red when bytes are counted twice, or forgotten on the way from pending to sent to acknowledged."""
    outbox = Outbox(MIB)
    assert (outbox.unacked_bytes, outbox.empty) == (0, True)
    outbox.add(rows([1, 2, 3]))
    pending = outbox.unacked_bytes
    assert pending > 36
    outbox.take()
    outbox.add(rows([1, 2, 3], step=2))
    assert outbox.unacked_bytes == 2 * pending
    outbox.ack(1)
    assert outbox.unacked_bytes == pending
    outbox.take()
    outbox.ack(2)
    assert (outbox.unacked_bytes, outbox.empty, outbox.sent, outbox.acked) == (0, True, 2, 2)


def test_an_output_is_not_changed_by_being_sent() -> None:
    """Red when row offsets are written into the engine's own arrays."""
    output = rows([1, 2], counts={0: 1, 1: 1})
    before = dataclasses.replace(output)
    assert output.logprobs is not None
    kept = output.logprobs.rows.copy()
    outbox = Outbox(MIB)
    outbox.add(output)
    outbox.add(output)
    drain(outbox)
    assert output.logprobs.rows.tolist() == kept.tolist()
    assert output.numbers is before.numbers
