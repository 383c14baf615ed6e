"""From events to one output a session: splitting, merging, logprob columns."""

from __future__ import annotations

import numpy as np

from engine_core.request import LogprobColumns
from engine_core.scheduling.outputs import Events, OutputBuffer, Started, TokenColumns, select_logprobs
from engine_core.scheduling.rows import SessionRows
from tests.engine.rig import Rig
from tests.engine.simulated_model import expected_tokens


def columns(*entries: tuple[int, int, list[int]]) -> LogprobColumns:
    """(row, sampled, alternatives) of each."""
    return LogprobColumns(
        rows=np.array([row for row, _, _ in entries], np.uint32),
        sampled=np.array([sampled for _, sampled, _ in entries], np.float32),
        ranks=np.array([sampled + 1 for _, sampled, _ in entries], np.int32),
        counts=np.array([len(tops) for _, _, tops in entries], np.uint32),
        top_ids=np.array([top for _, _, tops in entries for top in tops], np.int32),
        top_logprobs=np.array([-top for _, _, tops in entries for top in tops], np.float32),
    )


def entries(block: LogprobColumns | None) -> list[tuple[int, int, list[int]]]:
    if block is None:
        return []
    ends = np.cumsum(block.counts).tolist()
    return [
        (row, int(block.sampled[i]), block.top_ids[ends[i] - int(block.counts[i]) : ends[i]].tolist())
        for i, row in enumerate(block.rows.tolist())
    ]


def rows(session: int, numbers: list[int], index: list[int] | None = None) -> SessionRows:
    return SessionRows(session, np.array(numbers, np.uint64), None if index is None else np.array(index, np.int64))


def tokens(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


BLOCK = columns((0, 10, [1]), (2, 12, []), (3, 13, [4, 5]))


def test_selected_logprobs_keep_their_alternatives() -> None:
    """Red when a dropped row's alternatives slip to its neighbour, or rows aren't renumbered."""
    assert entries(select_logprobs(BLOCK, np.array([1, 3]), 4)) == [(1, 13, [4, 5])]
    assert entries(select_logprobs(BLOCK, np.array([0, 2]), 4)) == [(0, 10, [1]), (1, 12, [])]
    assert select_logprobs(BLOCK, np.array([1]), 4) is None
    assert select_logprobs(None, np.array([1]), 4) is None


def test_one_session_is_not_copied() -> None:
    """Red when the common step, all rows of one session, costs a copy of its columns."""
    buffer, drawn = OutputBuffer(), tokens(5, 6)
    buffer.add(Events(3, tokens=[TokenColumns((rows(1, [8, 9]),), drawn)]))
    (output,) = buffer.take()
    assert (output.session, output.step, output.numbers.tolist()) == (1, 3, [8, 9])
    assert output.tokens is drawn
    assert buffer.take() == []


def test_sessions_get_their_own_rows() -> None:
    buffer = OutputBuffer()
    split = TokenColumns((rows(1, [8, 9], [0, 2]), rows(2, [8, 7], [1, 3])), tokens(5, 6, 7, 8), BLOCK)
    buffer.add(Events(3, tokens=[split]))
    first, second = buffer.take()
    assert (first.session, first.numbers.tolist(), first.tokens.tolist()) == (1, [8, 9], [5, 7])
    assert (second.session, second.numbers.tolist(), second.tokens.tolist()) == (2, [8, 7], [6, 8])
    assert entries(first.logprobs) == [(0, 10, [1]), (1, 12, [])]
    assert entries(second.logprobs) == [(1, 13, [4, 5])]


def test_results_of_one_step_are_merged() -> None:
    """Red when logprob rows of a later result aren't counted on from the earlier one's tokens."""
    buffer = OutputBuffer()
    buffer.add(Events(3, tokens=[TokenColumns((rows(1, [8, 9]),), tokens(5, 6), columns((1, 20, [])))]))
    buffer.add(Events(4, tokens=[TokenColumns((rows(1, [8]),), tokens(7)), TokenColumns((rows(1, [9]),), tokens(8))]))
    buffer.add(Events(5, tokens=[TokenColumns((rows(1, [8]),), tokens(9), columns((0, 21, [3])))]))
    (output,) = buffer.take()
    assert output.step == 5
    assert (output.numbers.tolist(), output.tokens.tolist()) == ([8, 9, 8, 9, 8], [5, 6, 7, 8, 9])
    assert entries(output.logprobs) == [(1, 20, []), (4, 21, [3])]


def test_a_dropped_session_is_gone() -> None:
    buffer = OutputBuffer()
    buffer.accept(1, 5)
    buffer.accept(2, 6)
    buffer.add(Events(3, tokens=[TokenColumns((rows(1, [5]),), tokens(5))]))
    buffer.drop(1)
    (output,) = buffer.take()
    assert (output.session, output.accepted, output.tokens.size) == (2, [6], 0)


def test_starts_and_acceptances() -> None:
    buffer = OutputBuffer()
    buffer.accept(1, 5)
    buffer.start(Started(1, 5, 100, 64, 0.0))
    (output,) = buffer.take()
    assert (output.accepted, output.started) == ([5], [(5, 64)])


def test_logprobs_come_with_their_tokens_through_the_whole_engine() -> None:
    """Red when rows with and without logprobs, of several sessions, finished and discarded, get mixed up."""
    rig = Rig(async_depth=3, max_num_seqs=6)
    requests = [
        rig.add(
            [3 + index] * (3 + index), session=1 + index % 3, logprobs=count, max_tokens=8, ignore_eos=False, seed=9
        )
        for index, count in enumerate((-1, 0, 2, -1, 5, 1))
    ]
    rig.run()
    for request in requests:
        seen, count = rig.of(request), request.params.logprobs
        assert seen.tokens == expected_tokens(request, 0)
        expected = [(-float(token), token + 1, [token + k for k in range(count)]) for token in seen.tokens]
        assert seen.logprobs == (expected if count >= 0 else [])
