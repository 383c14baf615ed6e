"""What fails, whom it takes along, and what the others get."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from engine_core.errors import EngineDead, StatusCode, describe_chain
from engine_core.ledger import Ledger, LedgerError
from engine_core.request import FINISH_ERROR, FINISH_REJECTED, Finish, FinishError, Request
from engine_core.scheduling.sequence import Ended
from engine_core.step import LogprobBlock, PrefillResult, PromptLogprobBlock, StepResult
from tests.engine.rig import Rig
from tests.engine.simulated_model import expected_tokens

PROMPT = [1, 2, 3, 4, 5, 6]
CAUSE = "RuntimeError: the forward raised: OutOfMemoryError: 3 GiB were asked for"


def error_of(rig: Rig, request: Request) -> FinishError:
    finish = rig.finish(request)
    assert finish.reason == FINISH_ERROR
    assert finish.error is not None
    return finish.error


# ------------------------------ a step fails, the engine goes on


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_fails_its_own_rows_only(depth: int) -> None:
    """Red when a row of the failed step survives, another one dies, or late rows of the failed ones are published."""
    rig = Rig(async_depth=depth, max_num_batched_tokens=8)
    failed = rig.add(PROMPT, max_tokens=20)
    rig.turn()
    rig.worker.fail_steps[len(rig.worker.plans) + 1] = CAUSE
    rig.turn()
    spared = rig.add([*PROMPT, 7], max_tokens=20, seed=3)
    rig.run()
    assert (error_of(rig, failed).code, error_of(rig, failed).message) == (StatusCode.INTERNAL, CAUSE)
    assert rig.of(failed).tokens == expected_tokens(failed, 0)[: len(rig.of(failed).tokens)]
    assert rig.of(spared).tokens == expected_tokens(spared, 0)
    assert rig.engine.stats().rows_discarded == depth - 1
    rig.check_settled()


def test_a_failed_mixed_step_fails_rows_and_chunks() -> None:
    rig = Rig(max_num_batched_tokens=16)
    decoding = rig.add(PROMPT, max_tokens=20)
    rig.turn()
    prefilling = rig.add([9] * 14, max_tokens=3)
    rig.worker.fail_steps[len(rig.worker.plans) + 1] = CAUSE
    rig.run()
    assert error_of(rig, decoding).message == error_of(rig, prefilling).message == CAUSE
    rig.check_settled()


def test_pages_of_a_failed_step_aren_t_published() -> None:
    """Red when KV of a forward that raised is found by the next prompt."""
    rig = Rig()
    rig.worker.fail_steps[1] = CAUSE
    rig.add([9] * 12, max_tokens=3)
    rig.run()
    again = rig.add([9] * 12, max_tokens=3)
    rig.run()
    assert rig.of(again).cached == 0
    assert rig.of(again).tokens == expected_tokens(again, 0)


def test_a_failed_row_publishes_nothing_more() -> None:
    """Red when the pages that a failed row still held are offered to the next turn of its conversation."""
    rig = Rig()
    failed = rig.add(PROMPT, max_tokens=40)
    rig.step()
    while len(rig.of(failed).tokens) < 7:
        rig.turn()
    rig.worker.fail_steps[len(rig.worker.plans)] = CAUSE
    rig.turn()
    again = rig.add([*PROMPT, *rig.of(failed).tokens, 3], max_tokens=2)
    rig.run()
    assert error_of(rig, failed).message == CAUSE
    assert rig.of(again).cached == 4


# ------------------------------ a result is lost or wrong, the engine stops


def answer(rig: Rig) -> StepResult:
    """The worker's true answer to the oldest plan, taken out of its hands."""
    assert rig.worker.finish_step()
    (result,) = rig.worker.collect()
    return result


def deliver(rig: Rig, result: StepResult) -> str:
    """Hand a result to the engine, which must die of it as its owner would let it; the cause that is published."""
    rig.worker.hold([result])
    published = len(rig.published)
    with pytest.raises(EngineDead) as death:
        rig.engine.step(rig.now)
    assert len(rig.published) == published, "failures were published before health could turn"
    cause = describe_chain(death.value)
    rig.engine.fail_all(cause)
    return cause


BLOCK = LogprobBlock(b"\0" * 4, b"\0" * 4, b"\0" * 4, b"\0" * 4, b"", b"")
PROMPTS = PromptLogprobBlock(0, 1, b"\0" * 4, b"\0" * 4, 0, b"", b"")
Change = Callable[[StepResult], StepResult]

WRONG_DECODE: dict[str, Change] = {
    "another step": lambda r: msgspec.structs.replace(r, step=r.step + 1),
    "an earlier step": lambda r: msgspec.structs.replace(r, step=r.step - 1),
    "a token missing": lambda r: msgspec.structs.replace(r, tokens=b""),
    "a token more": lambda r: msgspec.structs.replace(r, tokens=r.tokens + b"\0" * 4),
    "half a token": lambda r: msgspec.structs.replace(r, tokens=r.tokens[:2]),
    "unproven": lambda r: msgspec.structs.replace(r, primary_complete=r.step - 1),
    "a prefill nobody launched": lambda r: msgspec.structs.replace(r, prefills=[PrefillResult(r.step, b"")]),
    "tokens of a failed step": lambda r: msgspec.structs.replace(r, error="it failed"),
    "logprobs of a row that isn't there": lambda r: msgspec.structs.replace(
        r, logprobs=msgspec.structs.replace(BLOCK, rows=b"\1\0\0\0")
    ),
    "ragged logprobs": lambda r: msgspec.structs.replace(r, logprobs=msgspec.structs.replace(BLOCK, ranks=b"")),
    "alternatives missing": lambda r: msgspec.structs.replace(
        r, logprobs=msgspec.structs.replace(BLOCK, counts=b"\1\0\0\0")
    ),
}
WRONG_PREFILL: dict[str, Change] = {
    "no prefill": lambda r: msgspec.structs.replace(r, prefills=[]),
    "two prefills": lambda r: msgspec.structs.replace(r, prefills=r.prefills * 2),
    "another prefill": lambda r: msgspec.structs.replace(r, prefills=[PrefillResult(r.step + 1, b"\0" * 4)]),
    "its token missing": lambda r: msgspec.structs.replace(r, prefills=[PrefillResult(r.step, b"")]),
    "tokens of a failed prefill": lambda r: msgspec.structs.replace(
        r, prefills=[PrefillResult(r.step, b"\0" * 4, error="it failed")]
    ),
    "prompt logprobs of another slot": lambda r: msgspec.structs.replace(
        r,
        prefills=[
            PrefillResult(r.step, b"\0" * 4, prompt_logprobs=[msgspec.structs.replace(PROMPTS, slot=5)]),
        ],
    ),
    "ragged prompt logprobs": lambda r: msgspec.structs.replace(
        r,
        prefills=[PrefillResult(r.step, b"\0" * 4, prompt_logprobs=[msgspec.structs.replace(PROMPTS, top=1)])],
    ),
}


@pytest.mark.parametrize("what", WRONG_DECODE)
def test_a_wrong_decode_result_ends_the_engine(what: str) -> None:
    """Red when a result that doesn't answer its plan is believed, or its request isn't told apart from the others."""
    rig = Rig(async_depth=2, max_num_seqs=1)
    victim, waiting = rig.add(PROMPT, max_tokens=20), rig.add(PROMPT, max_tokens=5)
    rig.step()
    rig.worker.finish_step()
    rig.step()
    rig.worker.finish_step()
    rig.step()
    tokens = list(rig.of(victim).tokens)
    cause = deliver(rig, WRONG_DECODE[what](answer(rig)))
    assert (error_of(rig, victim).code, error_of(rig, victim).message) == (StatusCode.INTERNAL, cause)
    assert rig.of(victim).tokens == tokens
    assert (error_of(rig, waiting).code, error_of(rig, waiting).message) == (StatusCode.UNAVAILABLE, cause)
    check_dead(rig)


@pytest.mark.parametrize("what", WRONG_PREFILL)
def test_a_wrong_prefill_result_ends_the_engine(what: str) -> None:
    rig = Rig(max_num_seqs=1)
    victim, waiting = rig.add(PROMPT, max_tokens=20), rig.add(PROMPT, max_tokens=5)
    rig.step()
    cause = deliver(rig, WRONG_PREFILL[what](answer(rig)))
    assert (error_of(rig, victim).code, error_of(rig, victim).message) == (StatusCode.INTERNAL, cause)
    assert (error_of(rig, waiting).code, error_of(rig, waiting).message) == (StatusCode.UNAVAILABLE, cause)
    assert rig.engine.stats().pages_referenced == 2, "pages of a lost result went back"
    check_dead(rig)


def check_dead(rig: Rig) -> None:
    """Everybody has a last word, and nobody new gets in."""
    assert rig.engine.open_count == 0
    late = rig.request(PROMPT)
    rig.engine.submit(late, rig.now)
    rig.engine.abort_all("")
    finish = rig.finish(late)
    assert finish.reason == FINISH_REJECTED
    assert finish.error is not None
    assert finish.error.code is StatusCode.UNAVAILABLE
    stats = rig.engine.stats()
    assert stats.sequences_accepted == stats.finished_error


def test_a_result_nobody_asked_for_ends_the_engine() -> None:
    rig = Rig()
    cause = deliver(rig, StepResult(1, b"", None, [], 1, 0))
    assert "no step is in flight" in cause


def test_a_lost_worker_fails_everybody_with_the_whole_cause() -> None:
    """Red when a cause is cut, tokens that came before it are lost, or the second call tells everybody again."""
    rig = Rig(async_depth=2)
    running, waiting = rig.add(PROMPT, max_tokens=20), rig.add(PROMPT, session=2, n=2, max_tokens=20)
    rig.turn()
    rig.worker.dead = "worker 0 aborted: CUDA error 700"
    with pytest.raises(EngineDead) as death:
        rig.step()
    rig.engine.fail_all(describe_chain(death.value))
    for request in (running, waiting):
        error = error_of(rig, request)
        assert (error.code, error.message) == (StatusCode.UNAVAILABLE, "worker 0 aborted: CUDA error 700")
    published = len(rig.published)
    rig.engine.fail_all("again")
    assert len(rig.published) == published
    check_dead(rig)


def test_tokens_of_the_failing_step_stand_before_the_last_word() -> None:
    """Red when tokens applied in the same step as the loss are dropped: the counts in `finish` would be wrong."""
    rig = Rig()
    request = rig.add(PROMPT, max_tokens=20)
    rig.step()
    rig.worker.finish_step()
    rig.worker.die_at_submit = "worker 0 was killed by SIGKILL"
    with pytest.raises(EngineDead):
        rig.step()
    rig.engine.fail_all("worker 0 was killed by SIGKILL")
    assert rig.of(request).tokens == expected_tokens(request, 0)[:1]
    assert rig.finish(request).output_tokens == 1


# ------------------------------ the ledger


def ended(serial: int, reason: int = FINISH_ERROR) -> Ended:
    return Ended(serial, 1, Finish(serial, reason, 1, 0, 0))


def test_the_ledger_takes_one_end_for_one_acceptance() -> None:
    """Red when a double, forgotten or invented end passes unseen."""
    rig = Rig()
    sequences = rig.scheduler.add(rig.request(PROMPT, n=2))
    ledger = Ledger()
    ledger.accept(sequences, 0.0)
    with pytest.raises(LedgerError, match="accepted twice"):
        ledger.accept(sequences[:1], 0.0)
    ledger.finish([ended(sequences[0].serial)])
    assert ledger.open_count == 1
    for serial in (sequences[0].serial, 999):
        with pytest.raises(LedgerError, match="wasn't open"):
            ledger.finish([ended(serial)])
    ledger.finish([ended(sequences[1].serial)])
    assert (ledger.open_count, ledger.counts.sequences_accepted, ledger.counts.finished_error) == (0, 2, 2)
